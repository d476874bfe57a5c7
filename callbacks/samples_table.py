"""Shows what the policy says: a table of validation responses after each validation."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from typing_extensions import override

from verl_lightning.modules.judge import Verdict

COLUMNS = ["step", "data_source", "prompt", "response", "reward"]


class SamplesTable(Callback):
    """Writes the first validation responses to ``samples/step=N.jsonl`` in the run's folder.

    Weights & Biases gets them too where its logger is used. The prompts are the same every time, so that tables can be
    compared.

    Args:
        num_rows: Responses in a table.
        max_characters: Longest prompt or response; more is cut and marked.
        folder: Where the tables go; null puts them into ``samples`` beside the first logger's files.
    """

    def __init__(self, num_rows: int = 16, max_characters: int = 4000, folder: str | None = None) -> None:
        if num_rows < 1:
            raise ValueError(f"`num_rows` must be at least 1, got {num_rows}. Take the callback out to have no table.")
        self.num_rows = num_rows
        self.max_characters = max_characters
        self.folder = folder
        self._rows: list[dict[str, Any]] = []

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._rows = []

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: dict[str, Any],
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        verdict: Verdict = outputs["verdict"]
        prompts = batch["rollout"].prompt_index.tolist()
        room = self.num_rows - len(self._rows)
        responses = zip(prompts, verdict.responses, verdict.rewards.tolist(), strict=True)
        for index, response, reward in islice(responses, room):
            row = batch["rows"][index]
            self._rows.append(
                {
                    "step": trainer.global_step,
                    "data_source": row["data_source"],
                    "prompt": self._cut("\n".join(str(message["content"]) for message in row["prompt"])),
                    "response": self._cut(response),
                    "reward": reward,
                }
            )

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folder = Path(self.folder or f"{trainer.log_dir or trainer.default_root_dir}/samples")  # asked on every rank
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        folder.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in self._rows)
        (folder / f"step={trainer.global_step}.jsonl").write_text(lines, encoding="utf-8")
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                table = [[row[name] for name in COLUMNS] for row in self._rows]
                logger.log_table("val/samples", columns=COLUMNS, data=table)

    def _cut(self, text: str) -> str:
        if len(text) <= self.max_characters:
            return text
        return f"{text[: self.max_characters]}... ({len(text) - self.max_characters} more characters)"
