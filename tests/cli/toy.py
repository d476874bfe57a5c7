"""Small parts of each kind that a command line can name, and a command that stops before it trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from verl_lightning.callbacks import RolloutCallback
from verl_lightning.cli.lightning_cli import CLI

BASE = """
trainer: {max_steps: 3, accelerator: cpu, enable_progress_bar: false, enable_model_summary: false}
model: {class_path: ToyModule, init_args: {optim: {lr: 1.0e-3}, judge: {class_path: Strict}}}
data: {class_path: ToyData}
rollout: {class_path: ToyRollout, init_args: {temperature: 0.7}}
"""


@dataclass(frozen=True, kw_only=True)
class ToyOptim:
    """How the toy learns."""

    lr: float = 1e-4
    """How far the toy moves."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Two decay rates."""

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"`optim.lr` must be above 0, got {self.lr}.")


@dataclass(frozen=True, kw_only=True)
class ToyLora:
    """Adapters of the toy."""

    rank: int = 8
    """Rank of the adapters."""


class Judge:
    """What the toy is judged by."""


class Strict(Judge):
    """Few pass.

    Args:
        bar: How high.
    """

    def __init__(self, bar: float = 1.0) -> None:
        self.bar = bar


class Lenient(Judge):
    """Many pass.

    Args:
        smile: How broad.
    """

    def __init__(self, smile: float = 0.5) -> None:
        self.smile = smile


class ToyModule(LightningModule):
    """Learns one number.

    Args:
        optim: How it learns.
        lora: Adapters; null for none.
        judge: What judges it.
        kind: Which toy.
    """

    def __init__(
        self,
        optim: ToyOptim = ToyOptim(),
        lora: ToyLora | None = None,
        judge: Judge | None = None,
        kind: Literal["small", "big"] = "small",
    ) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)
        self.optim, self.lora, self.judge, self.kind = optim, lora, judge, kind

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.linear(batch).mean()
        self.log("loss", loss)
        return loss

    @override
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("reward", self.linear(batch).mean())

    test_step = validation_step

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.optim.lr)


class ToyData(LightningDataModule):
    """Eight equal rows.

    Args:
        batch_size: Rows of a batch.
    """

    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.batch_size = batch_size

    @override
    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.ones(8, 2), self.batch_size)

    val_dataloader = test_dataloader = train_dataloader


class ToyRollout(RolloutCallback):
    """Samples nothing.

    Args:
        temperature: How wild it would.
    """

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        self.temperature = temperature

    @override
    def make_engine(self, module: Any) -> Any:
        raise NotImplementedError

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None: ...

    @override
    def start_engine(self, device: Any) -> None: ...

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None: ...

    @override
    def on_train_batch_start(self, *args: Any) -> None: ...

    @override
    def on_validation_batch_start(self, *args: Any) -> None: ...

    @override
    def on_test_batch_start(self, *args: Any) -> None: ...


class ParsedCLI(CLI):
    """Reads the command line and builds its objects, but runs nothing."""

    @override
    def _run_subcommand(self, subcommand: str) -> None: ...
