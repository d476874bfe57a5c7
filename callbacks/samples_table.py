"""Shows what the policy says: tables of validation responses and of those that it learns from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from typing_extensions import override

from verl_lightning.callbacks.json_files import to_json, write_whole
from verl_lightning.callbacks.samples_page import write_page
from verl_lightning.modules.base import PostTrainingModule
from verl_lightning.modules.judge import RewardResult
from verl_lightning.modules.sampling import SamplingModule
from verl_lightning.modules.scored_rollout import ScoredRollout
from verl_lightning.run_folders import shared_run_folder
from verl_lightning.types import Experience, PromptBatch, Rollout

COLUMNS = ["step", "data_source", "prompt", "response", "reward"]
TRAIN_COLUMNS = [*COLUMNS, "advantage"]


class SamplesTable(Callback):
    """Writes responses to tables in the run's folder, and to a page that shows them in a browser.

    ``samples/step=N.jsonl`` holds the first responses of a validation, whose prompts are the same every time, so that
    tables can be compared; ``samples/train_step=N.jsonl`` the first ones of a training step on rank 0, with the mean
    advantage of their tokens; ``samples/index.html`` shows both. Without a reward, ``reward`` is null. Weights & Biases
    gets the tables too where its logger is used.

    Args:
        num_rows: Responses in a table.
        max_characters: Longest prompt or response; more is cut and marked.
        train_every_n_steps: Training steps from one table to the next; 0 makes none.
        max_tables: Newest tables on the page; older ones stay in their files.
        folder: Folder for the tables; null puts them into ``samples`` beside the first logger's files.

    Raises:
        ValueError: If there is nothing to show.
        MisconfigurationException: In ``setup``, if the module has no responses.
    """

    def __init__(
        self,
        num_rows: int = 16,
        max_characters: int = 4000,
        train_every_n_steps: int = 10,
        max_tables: int = 50,
        folder: str | None = None,
    ) -> None:
        if num_rows < 1:
            raise ValueError(f"`num_rows` must be at least 1, got {num_rows}. Take the callback out to have no table.")
        if train_every_n_steps < 0 or max_tables < 1:
            raise ValueError(
                "`train_every_n_steps` must not be negative and `max_tables` must be at least 1, got"
                f" {train_every_n_steps} and {max_tables}."
            )
        self.num_rows = num_rows
        self.train_every_n_steps = train_every_n_steps
        self.max_tables = max_tables
        self.max_characters = max_characters
        self.folder = folder
        self._rows: list[dict[str, Any]] = []
        self._path = Path()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(pl_module, SamplingModule):
            raise MisconfigurationException(
                f"`SamplesTable` shows responses and their rewards, but `{type(pl_module).__name__}` has none. Train a"
                " `PPOModule`, or take the callback out."
            )
        self._path = Path(self.folder or shared_run_folder(trainer) / "samples")

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._rows = []

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: PromptBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        reward_result: RewardResult = outputs["reward_result"]
        assert batch.rollout is not None
        prompts = batch.rollout.prompt_index.tolist()
        room = self.num_rows - len(self._rows)
        responses = zip(prompts, reward_result.responses, reward_result.known_rewards, strict=True)
        for index, response, reward in islice(responses, room):
            row = batch.rows[index]
            self._rows.append(
                {
                    "step": trainer.global_step,
                    "data_source": row["data_source"],
                    "prompt": self._cut(_said(row)),
                    "response": self._cut(response),
                    "reward": reward,
                }
            )

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._write(trainer, f"step={trainer.global_step}", "val/samples", COLUMNS, self._rows)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if trainer.validating and self._rows:  # what was said before it was cut short
            self._write(trainer, f"step={trainer.global_step}", "val/samples", COLUMNS, self._rows)

    def on_experience(
        self,
        module: PostTrainingModule,
        scored: ScoredRollout,
        experience: Experience,
        rows: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        """Keep the first responses that a step learns from."""
        step = module.trainer.global_step + 1
        if not self.train_every_n_steps or step % self.train_every_n_steps:
            return
        mask = experience.response_mask
        advantages = (experience.advantages * mask).sum(-1) / mask.sum(-1).clamp(min=1)
        rewards = scored.reward_result.known_rewards
        table = []
        for index in range(min(self.num_rows, len(scored.rollout))):
            row = None if rows is None else rows[int(scored.rollout.prompt_index[index])]
            table.append(
                {
                    "step": step,
                    "data_source": None if row is None else row["data_source"],
                    "prompt": self._cut(_prompt(module, scored.rollout, index) if row is None else _said(row)),
                    "response": self._cut(scored.reward_result.responses[index]),
                    "reward": rewards[index],
                    "advantage": float(advantages[index]),
                }
            )
        self._write(module.trainer, f"train_step={step}", "train/samples", TRAIN_COLUMNS, table)

    def _write(self, trainer: Trainer, name: str, key: str, columns: list[str], rows: list[dict[str, Any]]) -> None:
        """Write a table into a file, onto the page and to Weights & Biases; on rank 0."""
        if not trainer.is_global_zero:
            return
        folder = self._path
        folder.mkdir(parents=True, exist_ok=True)
        lines = "".join(to_json(row) + "\n" for row in rows)
        write_whole(folder / f"{name}.jsonl", lines)
        write_page(folder, max_tables=self.max_tables)
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_table(key, columns=columns, data=[[row[name] for name in columns] for row in rows])

    def _cut(self, text: str) -> str:
        if len(text) <= self.max_characters:
            return text
        return f"{text[: self.max_characters]}... ({len(text) - self.max_characters} more characters)"


def _said(row: Mapping[str, Any]) -> str:
    """The messages of a prompt."""
    return "\n".join(str(message["content"]) for message in row["prompt"])


def _prompt(module: PostTrainingModule, rollout: Rollout, index: int) -> str:
    """The prompt of a response, from its tokens."""
    width = rollout.response_mask.shape[1]
    ids = rollout.input_ids[index, :-width][rollout.attention_mask[index, :-width]]
    return str(module.tokenizer.decode(ids))
