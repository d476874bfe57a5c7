"""An asynchronous run whose trainer, engine and reward worker are killed learns from each prompt once, in order."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.processes import preload
from tests.resume.campaign import Campaign
from tests.resume.kill_points import Kill, Killer
from tests.rollout.mortal_engine import MortalBeside
from tests.runs import make_model_config, make_ppo, make_prompts, make_trainer
from tests.tiny import write_prompt_file
from verl_lightning.algorithms.advantages.gae import GAE
from verl_lightning.algorithms.corrections.truncated_importance_sampling import TruncatedImportanceSampling
from verl_lightning.callbacks import HFRollout
from verl_lightning.loggers import ResumableCSVLogger
from verl_lightning.modules.last_checkpoint import last_checkpoint
from verl_lightning.modules.ppo_config import CriticConfig, DynamicSamplingConfig
from verl_lightning.rewards.pool import RewardConfig
from verl_lightning.rollout.base import SamplingConfig
from verl_lightning.strategies import FSDPStrategy

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]
preload("tests.resume.campaign")

REWARDS = Path(__file__).with_name("kill_rewards_once.py")
NUM_STEPS, NUM_ROWS = {"ppo": 6, "grpo": 4}, 24
KILLS = [
    Kill(action="]gen", how="stop"),
    Kill(action="]save_checkpoint", how="half"),
    Kill(action="]update_weights", how="within", count=4),
    Kill(action="]update_actor"),
    Kill(action="]gen", how="within", count=4, nth=3),
    Kill(action="]save_checkpoint", how="stop", nth=2),
]


class Witness(Callback):
    """Writes down the prompts of each batch when it is done, before a checkpoint."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        age = float(trainer.callback_metrics["rollout/staleness/max"])
        number = trainer.fit_loop.epoch_loop.total_batch_idx
        learnt = {"batch": number, "rows": batch.row_index.tolist(), "age": age}
        with Path(f"learnt of rank {trainer.global_rank}").open("a") as file:
            file.write(json.dumps(learnt) + "\n")


def train(algorithm: str, strategy: str, model: Path, prompts: Path, kill: Kill | None) -> None:
    """Goes on with what lies in the working directory; each attempt's engine dies once, and its reward worker."""
    seed_everything(3, verbose=False)
    Path("kill a reward worker").touch()
    actor = make_model_config(model)
    parts = {"critic": CriticConfig(model=actor), "advantage": GAE()}
    if algorithm == "grpo":
        parts = {"dynamic_sampling": DynamicSamplingConfig(max_batches=20)}  # half of the groups have no signal
    reward = RewardConfig(function=f"{REWARDS}:same_on_even_rows", num_workers=1, max_error_share=1.0)
    module = make_ppo(model, reward=reward, corrections=[TruncatedImportanceSampling()], **parts)
    sampling = SamplingConfig(num_samples=2, max_new_tokens=8)
    beside = MortalBeside(folder=Path(f"engines of {os.getpid()}"), deaths=["answer 13"])
    trainer = make_trainer(
        Path(),
        HFRollout(sampling, sampling, placement=beside, max_staleness=2, in_flight="continue"),
        Witness(),
        ModelCheckpoint(save_top_k=0, save_last=True, every_n_train_steps=1),
        strategy="auto" if strategy == "auto" else FSDPStrategy(),
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        max_steps=NUM_STEPS[algorithm],
        logger=ResumableCSVLogger("runs", version=0),
        log_every_n_steps=1,
        enable_checkpointing=True,
        profiler=None if kill is None else Killer(kill),
    )
    last = last_checkpoint(trainer)
    data = make_prompts(prompts, shuffle=True)
    trainer.fit(module, datamodule=data, ckpt_path=last and last.path, weights_only=True)


def learnt_rows(folder: Path) -> list[list[int]]:
    """Of each batch, in the last of the lives in which it was done; no token was older than the bound."""
    batches: dict[int, list[int]] = {}
    for file in sorted(folder.glob("learnt of rank *")):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert max(line["age"] for line in lines) <= 2
        for number, rows in {line["batch"]: line["rows"] for line in lines}.items():
            batches.setdefault(number, []).extend(rows)
    assert sorted(batches) == list(range(len(batches)))
    return [batches[number] for number in range(len(batches))]


@pytest.mark.parametrize(("algorithm", "strategy", "ranks"), [("ppo", "auto", [1]), ("grpo", "fsdp", [2])])
def test_each_prompt_is_learnt_from_once_whatever_is_killed(tmp_path, tiny_folder, algorithm, strategy, ranks):
    prompts = write_prompt_file(tmp_path / "prompts.jsonl", num_rows=NUM_ROWS)
    campaign = Campaign(
        folder=tmp_path, attempt=train, arguments=(algorithm, strategy, tiny_folder, prompts), ranks=ranks
    )

    campaign.run("killed", KILLS)

    batches = learnt_rows(tmp_path / "killed")
    assert len(batches) == NUM_STEPS["ppo"] if algorithm == "ppo" else len(batches) > NUM_STEPS["grpo"]
    for epoch in (batches[start : start + 6] for start in range(0, len(batches), 6)):
        rows = [row for batch in epoch for row in batch]
        assert len(set(rows)) == len(rows) == 4 * len(epoch)
    assert {row for batch in batches[:6] for row in batch} == set(range(NUM_ROWS))
