"""Asynchronous runs whose trainers, engines, reward and environment workers are killed, and what they have learnt from.

By hand, all chains of kills with all algorithms and strategies, from the root of the repository::

    PYTHONPATH=$PWD python -m tests.resume.exactly_once --out benchmarks/results/kills.json
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import Counter
from pathlib import Path

from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.resume.campaign import Campaign
from tests.resume.kill_points import Kill, Killer
from tests.rollout.mortal_engine import MortalBeside
from tests.runs import make_model_config, make_ppo, make_prompts, make_trainer
from tests.tiny import write_prompt_file, write_tiny_folder
from verl_lightning.algorithms.advantages.gae import GAE
from verl_lightning.algorithms.corrections.truncated_importance_sampling import TruncatedImportanceSampling
from verl_lightning.callbacks import HFRollout
from verl_lightning.environments.config import EpisodesConfig
from verl_lightning.loggers import ResumableCSVLogger
from verl_lightning.modules.last_checkpoint import last_checkpoint
from verl_lightning.modules.ppo_config import CriticConfig, DynamicSamplingConfig
from verl_lightning.rewards.pool import RewardConfig
from verl_lightning.rollout.base import SamplingConfig
from verl_lightning.strategies import FSDPStrategy
from verl_lightning.strategies.checkpoints import read_checkpoint

REWARDS = Path(__file__).with_name("kill_rewards_once.py")
NUM_STEPS, NUM_ROWS, BOUND = 6, 24, 2
ALGORITHMS = ("ppo", "grpo", "agents")
RANKS = {"auto": [1], "fsdp": [2, 2, 1]}
KILLS = [
    Kill(action="]gen", how="stop"),
    Kill(action="]save_checkpoint", how="half"),
    Kill(action="]update_weights", how="within", count=4),
    Kill(action="]update_actor"),
    Kill(action="]gen", how="within", count=4, nth=3),
    Kill(action="]save_checkpoint", how="stop", nth=2),
    Kill(action="]reward", nth=2),
    Kill(action="]save_checkpoint", how="change", count=2),
    Kill(action="]metrics"),
]


class Witness(Callback):
    """Writes down the order of the data, and the prompts of each batch when it is done, before a checkpoint."""

    def on_train_start(self, trainer, pl_module):
        self.life = trainer.strategy.broadcast(time.time_ns())
        loader = trainer.train_dataloader
        Path("order.json").write_text(json.dumps([loader._order(epoch) for epoch in range(8)]))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        age = float(trainer.callback_metrics["rollout/staleness/max"])
        number = trainer.fit_loop.epoch_loop.total_batch_idx
        learnt = {"batch": number, "rows": batch.row_index.tolist(), "age": age}
        with Path(f"learnt in life {self.life} of rank {trainer.global_rank}").open("a") as file:
            file.write(json.dumps(learnt) + "\n")


def make_parts(algorithm: str, model: Path) -> dict:
    """What an algorithm is made of."""
    actor = make_model_config(model)
    reward = RewardConfig(function=f"{REWARDS}:never_same_on_odd_rows", num_workers=1, max_error_share=1.0)
    if algorithm == "ppo":
        return {"critic": CriticConfig(model=actor), "advantage": GAE(), "reward": reward}
    if algorithm == "grpo":
        return {"dynamic_sampling": DynamicSamplingConfig(max_batches=20), "reward": reward}
    return {"reward": "environment"}


def train(algorithm: str, strategy: str, model: Path, prompts: Path, kill: Kill | None) -> None:
    """Goes on with what lies in the working directory.

    An engine, a reward worker and an environment worker die once in each attempt; each third samples in its own
    process instead.
    """
    seed_everything(3, verbose=False)
    for victim in ("a reward worker", "an environment worker"):
        Path(f"kill {victim}").touch()
    module = make_ppo(model, corrections=[TruncatedImportanceSampling()], **make_parts(algorithm, model))
    is_agent = algorithm == "agents"
    sampling = SamplingConfig(num_samples=2, max_new_tokens=40 if is_agent else 8)
    is_beside = len(list(Path().glob("learnt in life * of rank 0"))) % 3 != 2
    beside = MortalBeside(folder=Path(f"engines of {os.getpid()}"), deaths=["answer 13"])
    trainer = make_trainer(
        Path(),
        HFRollout(
            sampling,
            sampling,
            placement=beside if is_beside else None,
            max_staleness=BOUND,
            in_flight="continue",
            environment={"agent": "tests.resume.kill_once.agent"} if is_agent else None,
            episodes=EpisodesConfig(max_error_share=1.0),
        ),
        Witness(),
        ModelCheckpoint(save_top_k=0, save_last=True, every_n_train_steps=1),
        strategy="auto" if strategy == "auto" else FSDPStrategy(),
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        max_steps=NUM_STEPS,
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
    batches: dict[int, tuple[int, list[int]]] = {}
    for file in sorted(folder.glob("learnt in life * of rank *")):
        life = int(file.name.split()[3])
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert max((line["age"] for line in lines), default=0) <= BOUND
        for line in lines:
            known, rows = batches.get(line["batch"], (0, []))
            batches[line["batch"]] = life, [*(rows if known == life else []), *line["rows"]]
    assert sorted(batches) == list(range(NUM_STEPS))
    return [batches[number][1] for number in range(NUM_STEPS)]


def check_once(algorithm: str, folder: Path, run: Path) -> dict[str, int]:
    """What was learnt from and what waits is all that was taken from the data; counts it."""
    saved = read_checkpoint(run / "checkpoints/last.ckpt", weights_only=True)["rollout_queue"]
    order = [row for epoch in json.loads((folder / "order.json").read_text()) for row in epoch]
    taken = Counter(order[: 4 * saved["cursor"][0]])
    learnt = Counter(row for rows in learnt_rows(folder) for row in rows)
    waiting = Counter(row for group in saved["groups"] for *_, row in group["prompts"])
    found = learnt + waiting
    if algorithm == "grpo":  # those without signal are judged and dropped
        assert not [row for row in learnt if row % 2 == 0]
        taken, found = (Counter({row: n for row, n in each.items() if row % 2}) for each in (taken, found))
    lost, twice = taken - found, found - taken
    assert not lost, f"lost: {lost}"
    assert not twice, f"twice: {twice}"
    return {"learnt": learnt.total(), "waiting": waiting.total()}


def run_chain(folder: Path, algorithm: str, strategy: str, model: Path, kills: list[Kill]) -> dict[str, int]:
    """A chain of attempts, each killed but the last; counts what it has learnt from."""
    prompts = write_prompt_file(folder / "prompts.jsonl", num_rows=NUM_ROWS)
    arguments = (algorithm, strategy, model, prompts)
    run = Campaign(folder=folder, attempt=train, arguments=arguments, ranks=RANKS[strategy]).run("killed", kills)
    return check_once(algorithm, folder / "killed", run)


def main() -> None:
    """All chains; writes what was counted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--algorithms", nargs="+", default=ALGORITHMS)
    parser.add_argument("--strategies", nargs="+", default=list(RANKS))
    options = parser.parse_args()
    counts = {}
    for algorithm in options.algorithms:
        for strategy in options.strategies:
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                model = write_tiny_folder(folder / "model")
                counts[f"{algorithm}, {strategy}"] = run_chain(folder, algorithm, strategy, model, KILLS)
            print(f"{algorithm}, {strategy}: {len(KILLS)} kills", counts[f"{algorithm}, {strategy}"], flush=True)  # noqa: T201
    if options.out:
        options.out.write_text(json.dumps({"kills of a chain": len(KILLS), "chains": counts}, indent=1))


if __name__ == "__main__":
    main()
