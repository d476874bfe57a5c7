"""The canary: how far apart engine and trainer may be, and what it says in a resumed run."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
import torch

from tests.resume.experiment import Experiment
from tests.rollout.mortal_engine import MortalBeside
from tests.runs import make_ppo, make_trainer
from tests.runs import make_prompts as make_prompt_data
from tests.tiny import write_prompt_file
from verl_lightning.callbacks import HFRollout
from verl_lightning.callbacks.canary import Canary, default_limit
from verl_lightning.rollout.base import SamplingConfig
from verl_lightning.rollout.hf import HFEngine

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning")  # a resumed run's own folder

CPU, GPU = torch.device("cpu"), torch.device("cuda")


class InexactEngine(HFEngine):
    """Its weights are a fiftieth too large."""

    def load_weights(self, weights, version):
        super().load_weights(((name, weight * 1.02) for name, weight in weights), version)


class ForgetfulEngine(HFEngine):
    """It takes no new values for one matrix."""

    def load_weights(self, weights, version):
        lost = "model.layers.1.mlp.down_proj.weight"
        super().load_weights(((name, torch.zeros_like(w) if name == lost else w) for name, w in weights), version)


class OtherEngine(HFEngine):
    """It has the policy's weights, but computes something else."""

    def start(self, device):
        super().start(device)
        self._running.lm_head.register_forward_hook(lambda module, inputs, logits: logits * 1.5)


def make_rollout(folder, engine_class=HFEngine, **options):
    sampling = SamplingConfig(num_samples=4, max_new_tokens=6)
    placement = MortalBeside(folder=folder, engine_class=engine_class)
    return HFRollout(sampling, sampling, placement=placement, **options)


def test_the_limit_follows_the_type_in_which_both_compute():
    limits = [default_limit(dtype, CPU) for dtype in ("float32", "float16", "bfloat16")]

    assert limits == sorted(limits)
    assert default_limit("bfloat16", GPU) == default_limit("bfloat16", CPU) == 0.05
    assert default_limit("float32", CPU) < default_limit("float32", GPU) < 0.05


def test_two_percent_on_every_weight_stop_a_run_in_float32(tmp_path, tiny_folder, prompt_file):
    rollout = make_rollout(tmp_path / "events", InexactEngine)

    with pytest.raises(
        RuntimeError, match="at step 0, engine and trainer differ by .* `rollout.canary_limit` is 0.0005"
    ):
        make_trainer(tmp_path, rollout).fit(make_ppo(tiny_folder), make_prompt_data(prompt_file))


@pytest.mark.parametrize(
    ("engine_class", "said"),
    [
        (ForgetfulEngine, "other weights than it was sent in 1 of 10 blocks: `model.layers.1.mlp`"),
        (OtherEngine, "all weights in the engine are those that it was sent"),
    ],
)
def test_a_gap_is_told_with_the_weights_that_differ(tmp_path, tiny_folder, prompt_file, engine_class, said):
    rollout = make_rollout(tmp_path / "events", engine_class)

    with pytest.raises(RuntimeError, match=said):
        make_trainer(tmp_path, rollout).fit(make_ppo(tiny_folder), make_prompt_data(prompt_file))


def test_a_given_limit_counts(tmp_path, tiny_folder, prompt_file):
    rollout = make_rollout(tmp_path / "events", InexactEngine, canary_limit=0.1)

    make_trainer(tmp_path, rollout, max_steps=1).fit(make_ppo(tiny_folder), make_prompt_data(prompt_file))

    assert 0.0005 < rollout._canary.gap < 0.1


def test_a_resumed_run_measures_the_same(tmp_path, tiny_folder):
    """Its first batch is another one than that from which the canary's prompts were taken."""
    prompts = write_prompt_file(tmp_path / "prompts.jsonl", num_rows=12)

    def make_callbacks():
        shutil.rmtree(tmp_path / "events", ignore_errors=True)
        return [make_rollout(tmp_path / "events")]

    experiment = Experiment(
        folder=tmp_path,
        make_module=lambda: make_ppo(tiny_folder),
        make_data=lambda: make_prompt_data(prompts, shuffle=True),
        make_callbacks=make_callbacks,
        trainer={},
    )
    whole = experiment.run("whole")

    resumed = experiment.resume(2, "early")

    gaps = [[row.get("rollout/canary_gap") for row in run.metrics] for run in (whole, resumed)]
    assert gaps[0] == gaps[1]
    assert None not in gaps[0]


def test_all_ranks_ask_the_prompts_of_the_first():
    told = [[5, 6], [7]]
    trainer = SimpleNamespace(strategy=SimpleNamespace(broadcast=lambda own: (told, None)))
    batch = SimpleNamespace(prompts=lambda: [[9], [8, 9]], images=None)

    requests = Canary(None).requests(trainer, batch, SamplingConfig(num_samples=4, max_new_tokens=99))

    assert [request.prompt_ids for request in requests] == told
    assert {request.sampling.max_new_tokens for request in requests} == {16}
