"""Whole runs that sample with vLLM: they learn, they are watched by the canary, and they leave nothing behind."""

from __future__ import annotations

from types import SimpleNamespace as Plain

import pytest
import torch
from lightning.pytorch import seed_everything
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from tests.rollout.asking import sample
from tests.rollout.test_turns import Clerk
from tests.rollout.vllm_parts import make_prompts, make_vllm_engine, weights_of, write_sharp_folder
from tests.runs import Recorder, make_model_config, make_ppo, make_trainer
from tests.runs import make_prompts as make_prompt_data
from tests.tiny import write_tiny_folder
from verl_lightning.callbacks import HFRollout, VLLMRollout
from verl_lightning.models.config import LoraConfig
from verl_lightning.modules.ppo_config import UpdateConfig
from verl_lightning.rollout.base import SamplingConfig
from verl_lightning.rollout.turns import TurnsConfig
from verl_lightning.rollout.vllm import VLLMEngine

pytestmark = [pytest.mark.backend, pytest.mark.filterwarnings("ignore")]  # vLLM warns of many things


@pytest.fixture(autouse=True)
def _seed():
    seed_everything(0, verbose=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_sharp_folder(tmp_path_factory.mktemp("sharp"))


def make_vllm_rollout(rollout_class=VLLMRollout, **changes):
    """Four responses of at most six tokens to each prompt."""
    sampling = SamplingConfig(num_samples=4, max_new_tokens=6)
    return rollout_class(**{"sampling": sampling, "val_sampling": sampling, "enforce_eager": True} | changes)


class WrongEngine(VLLMEngine):
    """A sync that gets one weight wrong."""

    def load_weights(self, weights, version):
        sent = ((name, weight * ("layers.0.mlp.down_proj" not in name)) for name, weight in weights)
        super().load_weights(sent, version)


class StaleEngine(VLLMEngine):
    """A sync that works once."""

    def load_weights(self, weights, version):
        if version == 1:
            super().load_weights(weights, version)
        self._version = version


@pytest.mark.parametrize(("engine_class", "step"), [(WrongEngine, 0), (StaleEngine, 1)])
def test_the_canary_stops_a_run_whose_sync_is_broken(tmp_path, folder, prompt_file, engine_class, step):
    class BrokenRollout(VLLMRollout):
        def make_engine(self, module):
            engine = super().make_engine(module)
            engine.__class__ = engine_class
            return engine

    trainer = make_trainer(tmp_path, make_vllm_rollout(BrokenRollout))

    with pytest.raises(RuntimeError, match=rf"at step {step}, engine and trainer differ by .*tied embeddings"):
        trainer.fit(make_ppo(folder), datamodule=make_prompt_data(prompt_file))


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4), LoraConfig(rank=4, merge_for_rollout=False)])
def test_engine_and_trainer_agree_at_each_step(tmp_path, folder, prompt_file, lora):
    recorder = Recorder()
    actor = make_model_config(folder, lr=1e-2, lora=lora)

    trainer = make_trainer(tmp_path, make_vllm_rollout(), recorder)
    trainer.fit(make_ppo(folder, actor=actor), datamodule=make_prompt_data(prompt_file))

    assert len(recorder.steps) == 3
    assert max(recorder.column("rollout/canary_gap")) < 1e-4
    assert min(recorder.column("actor/grad_norm")) > 0
    assert not torch.distributed.is_initialized()


def test_truncated_sampling_reports_log_probs_over_the_whole_vocabulary(folder):
    engine = make_vllm_engine(folder, log_probs_mode="raw_logprobs")
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(3)
    expected_draw = torch.rand(1)
    torch.manual_seed(3)
    engine.start(torch.device("cpu"))
    draw = torch.rand(1)
    engine.load_weights(weights_of(model), 1)

    rollout = sample(engine, make_prompts([8], num_samples=8), SamplingConfig(num_samples=8, max_new_tokens=1, top_k=3))
    engine.stop()

    with torch.no_grad():
        log_probs = model(torch.tensor(make_prompts([8]).tokens)).logits[0, -1].log_softmax(-1)
    assert set(rollout.response_ids.flatten().tolist()) <= set(log_probs.topk(3).indices.tolist())
    assert_close(rollout.rollout_log_probs[:, 0], log_probs[rollout.response_ids[:, 0]], atol=1e-4, rtol=0)
    assert_close(draw, expected_draw)


def make_sleeper(folder, wake_up):
    """An engine asleep, as only one on a GPU can be, and what becomes of it."""
    engine, fates = make_vllm_engine(folder), []
    core = Plain(shutdown=lambda: fates.append("ended"))
    engine._llm = Plain(llm_engine=Plain(engine_core=core), wake_up=lambda tags: wake_up(fates))
    engine._is_asleep, engine._owns_process_group = True, False
    return engine, fates


def test_an_engine_that_sleeps_wakes_before_it_ends(folder):
    """vLLM's allocator frees only memory that is mapped; what it is asked to free else ends in an error of CUDA's."""
    engine, fates = make_sleeper(folder, lambda fates: fates.append("awake"))

    engine.stop()
    engine.stop()

    assert fates == ["awake", "ended"]


def test_an_engine_that_can_not_wake_ends_all_the_same(folder):
    def fail(fates):
        raise torch.OutOfMemoryError("no room")

    engine, fates = make_sleeper(folder, fail)
    with pytest.warns(UserWarning, match=r"could not wake up .*\(no room\)\. Start no other engine"):
        engine.stop()

    assert fates == ["ended"]


@pytest.mark.slow
def test_ppo_learns_from_vllm_as_from_the_hf_engine(tmp_path, prompt_file):
    folder = write_tiny_folder(tmp_path / "model", hidden_size=64)
    sampling = SamplingConfig(num_samples=8, max_new_tokens=6)
    options = {
        "update": UpdateConfig(mini_batch_size=8, micro_batch_size=64),
        "actor": make_model_config(folder, lr=5e-3),
    }
    gains, gaps = [], []
    for rollout in (make_vllm_rollout(sampling=sampling), HFRollout(sampling)):
        recorder = Recorder()
        trainer = make_trainer(tmp_path, rollout, recorder, max_steps=15)
        trainer.fit(make_ppo(folder, **options), datamodule=make_prompt_data(prompt_file, prompts_per_step=8))
        rewards = recorder.column("critic/score/mean")
        gains.append(sum(rewards[-3:]) / 3 - sum(rewards[:3]) / 3)
        gaps += recorder.column("rollout_corr/abs_log_prob_gap")

    assert min(gains) > 0.1
    assert abs(gains[0] - gains[1]) < 0.15  # other noise, the same policy
    assert max(gaps) < 1e-4


@pytest.mark.slow
def test_a_run_learns_from_conversations(tmp_path, folder, prompt_file):
    recorder = Recorder()
    sampling = SamplingConfig(num_samples=4, max_new_tokens=24)
    rollout = make_vllm_rollout(sampling=sampling, turns=TurnsConfig(environment=Clerk(), max_turns=3))

    make_trainer(tmp_path, rollout, recorder).fit(make_ppo(folder), datamodule=make_prompt_data(prompt_file))

    assert len(recorder.steps) == 3
    assert max(recorder.column("rollout/canary_gap")) < 1e-4
    assert recorder.column("rollout_corr/abs_log_prob_gap")[0] < 1e-4
