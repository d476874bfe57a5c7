"""What `VLLMRollout` refuses, and what it costs those who don't use it; needs no vLLM."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer

from tests.runs import make_ppo, make_prompts, make_trainer
from verl_lightning.callbacks import HFRollout, RayRollout, VLLMRollout
from verl_lightning.callbacks.placement import Beside, RayActors, check_visible, trainer_gpu
from verl_lightning.callbacks.vllm_rollout import log_probs_mode
from verl_lightning.rollout.base import Guide, SamplingConfig
from verl_lightning.rollout.turns import Environment, TurnsConfig
from verl_lightning.rollout.vllm_config import SpeculationConfig
from verl_lightning.rollout.vllm_launch import launcher


class Silence(Environment):
    """Says nothing."""

    def respond(self, conversation):
        return None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu_memory_utilization": 0.0}, r"`rollout.gpu_memory_utilization` must lie in \(0, 1\], got 0.0"),
        ({"gpu_memory_utilization": 1.5}, r"`rollout.gpu_memory_utilization` must lie in \(0, 1\], got 1.5"),
        ({"canary_limit": 0.0}, r"`rollout.canary_limit` must be above 0 nats per token, got 0.0"),
        ({"deadline": 0.0}, r"`rollout.deadline` must be above 0 seconds, got 0.0"),
        (
            {"max_staleness": 1},
            r"`rollout.max_staleness: 1` needs engines outside of the training processes: set `rollout.placement`",
        ),
        ({"tensor_parallel_size": 0}, r"`rollout.tensor_parallel_size` must be at least 1, got 0"),
        ({"tensor_parallel_size": 2, "placement": Beside()}, r"Set it to 1, or take `placement` out; got 2"),
        (
            {"turns": TurnsConfig(environment=Silence()), "tensor_parallel_size": 2},
            r"`rollout.turns` needs an engine",
        ),
        ({"sampling": SamplingConfig(top_k=5, temperature=0.7)}, r"`temperature` is 0.7. Set it to 1, or"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        VLLMRollout(**options)


@pytest.mark.parametrize(
    ("sampling", "mode"),
    [
        (SamplingConfig(temperature=0.7), "processed_logprobs"),
        (SamplingConfig(top_p=0.9), "raw_logprobs"),
        (SamplingConfig(top_k=9), "raw_logprobs"),
    ],
)
def test_log_probs_are_over_the_whole_vocabulary(sampling, mode):
    assert log_probs_mode(sampling) == mode


@pytest.mark.parametrize(
    ("precision", "weights", "dtype"),
    [
        ("32-true", "float32", "float32"),
        ("bf16-mixed", "float32", "bfloat16"),
        ("bf16-true", "float32", "bfloat16"),
        ("16-mixed", "float32", "float16"),
        ("32-true", "bfloat16", "bfloat16"),
        (None, "float32", "float32"),
    ],
)
def test_the_engine_computes_in_the_type_of_the_trainer(precision, weights, dtype):
    module = SimpleNamespace(trainer=SimpleNamespace(precision=precision), policy_config=SimpleNamespace(dtype=weights))
    assert HFRollout().engine_dtype(module) == dtype


@pytest.mark.parametrize(
    ("rollout", "dtype"),
    [
        (VLLMRollout(), torch.bfloat16),
        (RayRollout(VLLMRollout()), torch.bfloat16),
        (HFRollout(), None),  # takes them as they are
    ],
)
def test_weights_travel_in_the_type_of_the_engine(rollout, dtype):
    """Half the bytes between ranks, and to engines that are elsewhere."""
    module = SimpleNamespace(
        trainer=SimpleNamespace(precision="bf16-mixed"), policy_config=SimpleNamespace(dtype="float32")
    )
    assert rollout.weights_type(module) is dtype


def test_a_single_process_on_another_gpu_is_refused():
    with pytest.raises(MisconfigurationException, match="uses cuda:1.*`CUDA_VISIBLE_DEVICES=1`"):
        launcher(torch.device("cuda", 1))
    assert launcher(torch.device("cuda", 0)) is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Beside(gpus=[1, 1]), r"`gpus` must name a GPU of its own for each local rank, got \[1, 1\]"),
        (lambda: Beside(max_restarts=-1), "`max_restarts` must not be negative, got -1"),
        (lambda: Guide(), r"must set one of `regex`, `choice`, `json` and `grammar`, got none"),
        (lambda: Guide(json="{"), "`guide.json` must be a schema written in JSON, which it is not: Expecting"),
        (lambda: Guide(regex="a", json="{}"), r"`grammar`, got \['regex', 'json'\]"),
        (lambda: SamplingConfig(stop=[""]), r"`stop` must list texts that are not empty, got \[''\]"),
        (lambda: HFRollout(SamplingConfig(stop=["x"])), r"`rollout.sampling` sets `stop` or `guide`.*`VLLMRollout`"),
    ],
)
def test_bad_values_of_vllm_options_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("placement", [None, Beside()])
def test_speculation_on_a_cpu_is_refused_before_models_load(tmp_path, tiny_folder, prompt_file, monkeypatch, placement):
    monkeypatch.setattr("verl_lightning.callbacks.vllm_rollout.check_vllm", lambda: None)
    samplings = SamplingConfig(temperature=0.0), SamplingConfig(temperature=0.7)
    rollout = VLLMRollout(*samplings, placement=placement, speculation=SpeculationConfig())
    module = make_ppo(tiny_folder)

    with pytest.raises(ValueError, match="`rollout.speculation` on a CPU can decode greedily alone"):
        make_trainer(tmp_path, rollout).fit(module, make_prompts(prompt_file))
    assert not list(module.parameters())


def test_overlap_needs_a_correction(tmp_path, tiny_folder, prompt_file):
    trainer = make_trainer(tmp_path, VLLMRollout(placement=Beside(), max_staleness=1))

    with pytest.raises(
        MisconfigurationException, match=r"older policies than the one that learns, but nothing corrects"
    ):
        trainer.fit(make_ppo(tiny_folder), datamodule=make_prompts(prompt_file))


def test_an_engine_is_shared_by_equal_numbers_of_processes(tmp_path, tiny_folder, prompt_file):
    trainer = make_trainer(tmp_path, VLLMRollout(tensor_parallel_size=2))

    with pytest.raises(MisconfigurationException, match=r"`rollout.tensor_parallel_size: 2` does not divide the 1"):
        trainer.fit(make_ppo(tiny_folder), datamodule=make_prompts(prompt_file))


def test_engines_beside_the_trainer_have_the_gpu_of_their_rank():
    trainer = Trainer(accelerator="cpu", logger=False)

    assert Beside(gpus=[3]).gpu(trainer) == 3
    assert Beside().gpu(trainer) is None
    assert trainer_gpu(trainer) is None


def test_an_engine_is_given_a_gpu_that_is_there():
    check_visible(None, 0)
    check_visible(1, 2)
    with pytest.raises(MisconfigurationException, match="names GPU 2, but this process sees 2 GPUs, counted from 0"):
        check_visible(2, 2)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
@pytest.mark.parametrize("placement", [None, Beside()])
def test_a_run_without_vllm_names_what_to_install(tmp_path, tiny_folder, prompt_file, placement):
    trainer = make_trainer(tmp_path, VLLMRollout(placement=placement))

    with pytest.raises(MisconfigurationException, match=r"needs vLLM.*No module named 'vllm'.*HFRollout"):
        trainer.fit(make_ppo(tiny_folder), datamodule=make_prompts(prompt_file))


def test_beside_is_an_old_name_of_a_placement():
    with pytest.warns(FutureWarning, match="`rollout.beside` is `rollout.placement: Beside`"):
        assert VLLMRollout(beside=Beside(gpus=[3])).placement == Beside(gpus=[3])
    with pytest.raises(ValueError, match="`rollout.beside` and `rollout.placement` are one option"):
        VLLMRollout(beside=Beside(), placement=Beside())


def test_engines_are_placed_once():
    with pytest.raises(ValueError, match="`rollout.rollout.placement` and `RayRollout` both place engines"):
        RayRollout(VLLMRollout(placement=RayActors()))
    assert RayRollout(VLLMRollout(canary_limit=1e-9))._canary._limit == 1e-9
