"""Shows what the policy says: tables of validation responses and of those that it learns from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from verl_lightning.callbacks.json_files import to_json, write_whole
from verl_lightning.callbacks.run_phase import first_step
from verl_lightning.callbacks.sample_rows import RowLimits, make_rows, mean_advantages
from verl_lightning.callbacks.samples_page import write_page
from verl_lightning.modules.base import PostTrainingModule
from verl_lightning.modules.sampling import SamplingModule
from verl_lightning.modules.scored_rollout import ScoredRollout
from verl_lightning.run_folders import shared_run_folder
from verl_lightning.types import Experience, PromptBatch

COLUMNS = ["step", "data_source", "prompt", "response", "reward", "ground_truth", "is_truncated"]
TRAIN_COLUMNS = [*COLUMNS, "advantage"]


class SamplesTable(Callback):
    """Writes responses to tables in the run's folder, and to a page that shows them in a browser.

    ``samples/step=N.jsonl`` holds the first responses of a validation, whose prompts are the same every time, so that
    tables can be compared; ``samples/train_step=N.jsonl`` the first ones of a training step on rank 0, with the mean
    advantage of their tokens; ``samples/index.html`` shows both, with ground truth, parts of the reward, and tokens by
    their log-probs. Without a reward, ``reward`` is null. The logger of Weights & Biases gets the tables too.

    Args:
        num_rows: Responses in a table.
        max_characters: Longest prompt or response; more is cut and marked.
        max_tokens: Tokens of a response that are kept with their ids and log-probs; 0 keeps none.
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
        max_tokens: int = 1024,
        train_every_n_steps: int = 10,
        max_tables: int = 50,
        folder: str | None = None,
    ) -> None:
        if num_rows < 1:
            raise ValueError(f"`num_rows` must be at least 1, got {num_rows}. Take the callback out to have no table.")
        if min(train_every_n_steps, max_tokens) < 0 or max_tables < 1:
            raise ValueError(
                "`train_every_n_steps` and `max_tokens` must not be negative and `max_tables` must be at least 1, got"
                f" {train_every_n_steps}, {max_tokens} and {max_tables}."
            )
        self.num_rows = num_rows
        self.train_every_n_steps = train_every_n_steps
        self.max_tables = max_tables
        self.limits = RowLimits(max_characters=max_characters, max_tokens=max_tokens)
        self.folder = folder
        self._rows: list[dict[str, Any]] = []
        self._path = Path()
        self._loaded_step = 0  # finished steps of the run that wrote the loaded checkpoint

    @property
    def page(self) -> Path:
        """The page that shows all tables, once there is one."""
        return self._path / "index.html"

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(pl_module, SamplingModule):
            raise MisconfigurationException(
                f"`SamplesTable` shows responses and their rewards, but `{type(pl_module).__name__}` has none. Train a"
                " `PPOModule`, or take the callback out."
            )
        self._path = Path(self.folder or shared_run_folder(trainer) / "samples")

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._loaded_step = checkpoint.get("global_step", 0)

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
        assert batch.rollout is not None
        assert isinstance(pl_module, SamplingModule)
        room = self.num_rows - len(self._rows)
        self._rows += make_rows(
            pl_module,
            batch.rollout,
            outputs["reward_result"],
            batch.rows,
            step=self._step(trainer),
            count=room,
            limits=self.limits,
        )

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._write(trainer, f"step={self._step(trainer)}", "val/samples", COLUMNS, self._rows)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if trainer.validating and self._rows:  # what was said before it was cut short
            self._write(trainer, f"step={self._step(trainer)}", "val/samples", COLUMNS, self._rows)

    def on_experience(
        self,
        module: PostTrainingModule,
        scored: ScoredRollout,
        experience: Experience,
        rows: Sequence[Mapping[str, Any]],
    ) -> None:
        """Keep the first responses that a step learns from."""
        step = module.trainer.global_step + 1
        if not self.train_every_n_steps or step % self.train_every_n_steps:
            return
        shown = first_step(module.trainer) + step
        table = make_rows(
            module,
            scored.rollout,
            scored.reward_result,
            rows,
            step=shown,
            count=self.num_rows,
            limits=self.limits,
            advantages=mean_advantages(experience),
        )
        self._write(module.trainer, f"train_step={shown}", "train/samples", TRAIN_COLUMNS, table)

    def _step(self, trainer: Trainer) -> int:
        """Finished steps of the weights at hand: an evaluation counts none of its own."""
        is_fit = trainer.state.fn == TrainerFn.FITTING
        return first_step(trainer) + trainer.global_step if is_fit else self._loaded_step

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
