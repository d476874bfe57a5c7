"""A run gone on with from any of its checkpoints ends as if it had never stopped, bit for bit."""

from __future__ import annotations

import functools
import json
import shutil

import pytest

from tests.environments.worlds import Counting
from tests.resume.experiment import NUM_STEPS, Experiment, assert_same_state
from tests.runs import make_chats, make_model_config, make_ppo, make_prompts, make_rollout, make_sft
from tests.tiny import write_chat_file, write_prompt_file
from verl_lightning.algorithms.advantages.gae import GAE
from verl_lightning.models.config import LoraConfig, OptimConfig
from verl_lightning.modules.ppo_config import CriticConfig, KLConfig

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed")  # each run here has a folder of its own
OPTIM = OptimConfig(lr=1e-3, schedule="cosine", warmup_steps=2)
VALIDATES = {"val_check_interval": 1, "check_val_every_n_epoch": None}


@pytest.fixture(scope="module")
def files(tmp_path_factory, tiny_folder):
    """Three batches of prompts, five of chats, and a model with dropout."""
    folder = tmp_path_factory.mktemp("resume")
    dropout = folder / "dropout"
    shutil.copytree(tiny_folder, dropout)
    config = json.loads((dropout / "config.json").read_text())
    (dropout / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.3}))
    return {
        "folder": folder,
        "tiny": tiny_folder,
        "dropout": dropout,
        "prompts": write_prompt_file(folder / "prompts.jsonl", num_rows=12),
        "chats": write_chat_file(folder / "chats.jsonl", num_rows=20),
    }


def ppo_experiment(files, name, model="tiny", actor=None, rollout=None, **changes):
    actor = make_model_config(files[model], optim=OPTIM, **actor or {})
    return Experiment(
        folder=files["folder"] / name,
        make_module=lambda: make_ppo(files[model], actor=actor, **changes),
        make_data=lambda: make_prompts(files["prompts"], files["prompts"], shuffle=True),
        make_callbacks=lambda: [make_rollout(**rollout or {})],
        trainer=VALIDATES,
    )


def sft_experiment(files, name, model="tiny", optim=OPTIM, **trainer):
    return Experiment(
        folder=files["folder"] / name,
        make_module=lambda: make_sft(files[model], actor=make_model_config(files[model], optim=optim)),
        make_data=lambda: make_chats(files["chats"], files["chats"], shuffle=True),
        make_callbacks=list,
        trainer=trainer,
    )


def critic(files):
    return {"advantage": GAE(), "critic": CriticConfig(model=make_model_config(files["tiny"], optim=OPTIM))}


EXPERIMENTS = {
    "grpo": lambda files: ppo_experiment(files, "grpo"),
    "critic": lambda files: ppo_experiment(
        files, "critic", kl=KLConfig(coef=0.1, target=0.01, horizon=100), **critic(files)
    ),
    "trunk": lambda files: ppo_experiment(files, "trunk", advantage=GAE(), critic=CriticConfig()),
    "lora": lambda files: ppo_experiment(files, "lora", actor={"lora": LoraConfig(rank=2, dropout=0.3)}),
    "dropout": lambda files: ppo_experiment(files, "dropout_ppo", model="dropout"),
    "episodes": lambda files: ppo_experiment(
        files, "episodes", reward="environment", rollout={"environment": Counting, "max_new_tokens": 40}
    ),
    "sft": lambda files: sft_experiment(files, "sft", model="dropout", accumulate_grad_batches=2),
    "epochs": lambda files: sft_experiment(files, "epochs", optim=OptimConfig(), max_steps=-1, max_epochs=1),
}


FAST = {("grpo", "early"), ("episodes", "early"), ("critic", "early"), ("sft", "early"), ("epochs", "early")}
CASES = [
    pytest.param(kind, killed, marks=[] if (kind, killed) in FAST else pytest.mark.slow)
    for kind in EXPERIMENTS
    for killed in ("early", "late")
]


@pytest.fixture(scope="module")
def whole(files):
    """Each experiment, run from start to end once."""

    @functools.cache
    def run(kind):
        experiment = EXPERIMENTS[kind](files)
        return experiment, experiment.run("whole")

    return run


@pytest.mark.parametrize("step", range(1, NUM_STEPS + 1))
@pytest.mark.parametrize(("kind", "killed"), CASES)
def test_resumed_run_equals_the_uninterrupted_one(whole, kind, step, killed):
    """Three steps are an epoch, so that checkpoints lie before, on and behind its end."""
    experiment, expected = whole(kind)

    resumed = experiment.resume(step, killed)

    assert resumed.trainer.global_step == NUM_STEPS
    num_done = len(expected.order.rows) - len(resumed.order.rows)
    assert resumed.order.rows == expected.order.rows[num_done:]
    assert resumed.order.tokens == expected.order.tokens[num_done:]
    assert_same_state(resumed.module.state_dict(), expected.module.state_dict())
    for ours, theirs in zip(resumed.trainer.optimizers, expected.trainer.optimizers, strict=True):
        assert_same_state(ours.state_dict(), theirs.state_dict())
    for ours, theirs in zip(resumed.trainer.lr_scheduler_configs, expected.trainer.lr_scheduler_configs, strict=True):
        assert_same_state(ours.scheduler.state_dict(), theirs.scheduler.state_dict())
    assert resumed.metrics == expected.metrics
