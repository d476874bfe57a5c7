"""Log-probs of responses under a frozen reference: made once, and kept on disk for other runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from lightning.fabric.utilities import rank_zero_info
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from safetensors.torch import save_file
from torch import Tensor

from verl_lightning.models.config import ModelConfig
from verl_lightning.models.digests import DamagedFileError
from verl_lightning.models.scorer import TokenScorer
from verl_lightning.models.torch_files import open_safetensors
from verl_lightning.modules.micro_batches import BatchSplitter
from verl_lightning.modules.resume_checks import digest_of, meaningful
from verl_lightning.strategies.base import as_contract
from verl_lightning.types import PreferenceBatch

NAME = "ref_log_probs"


@runtime_checkable
class PreferenceSource(Protocol):
    """Examples of two sequences each, as `PreferenceDataModule` reads them."""

    ref_log_probs: Tensor | None
    """Log-probability of each response under the reference, in nats, two an example; None until it is known."""

    def __len__(self) -> int:
        """Number of examples."""

    def digest(self) -> str:
        """Returns a short text that tells the tokens from others."""

    def share(self, *, batch_size: int, rank: int, world_size: int) -> Iterator[PreferenceBatch]:
        """Yields the examples of one of several ranks: every ``world_size``-th, as many on each."""


def preference_sources(module: LightningModule) -> tuple[list[PreferenceSource], int]:
    """Returns the examples that the data module of a run has read, and their number in a batch of one rank.

    Raises:
        MisconfigurationException: If the data are no preferences.
    """
    data: Any = getattr(module.trainer, "datamodule", None)
    sources = list(getattr(data, "sources", {}).values())
    if not sources or not all(isinstance(source, PreferenceSource) for source in sources):
        raise MisconfigurationException(
            f"`{type(module).__name__}` learns from preferences, but `data` is"
            f" {'nothing' if data is None else f'a `{type(data).__name__}`'}. Use `PreferenceDataModule`."
        )
    return sources, int(data.batch_size)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A policy before its training, without its adapters if it has any."""

    trainer: Trainer
    """Trainer whose strategy runs the model."""

    model: Callable[[], TokenScorer]
    """Lends the model, if log-probs must be computed. Collective."""

    config: ModelConfig
    """Settings of the policy."""

    fingerprint: str
    """Text that tells the reference's weights from others."""

    architecture: str
    """Text of the model's ``config.json``."""

    folder: Path
    """Folder of the files that keep log-probs."""

    max_tokens: int | None
    """Most tokens of one forward pass; None scores batches whole."""

    def log_probs(self, data: PreferenceSource, batch_size: int) -> Float[Tensor, "examples 2"]:
        """Reads the log-probability of each response from its file, or computes and keeps it. Collective.

        Args:
            data: Examples to score.
            batch_size: Examples of a batch of one rank.
        """
        file = self.folder / f"{self._key(data)}.safetensors"
        found = self.trainer.strategy.broadcast(self._read(file, len(data)))
        if found is None:
            rank_zero_info(
                f"The reference scores {len(data)} examples, once: `{file}` keeps its log-probs for other runs."
            )
            found = self._scored(data, batch_size)
            if self.trainer.is_global_zero:
                self._write(file, found)
        return found

    def _key(self, data: PreferenceSource) -> str:
        """Digest of all that the numbers depend on: the model, the types that it computes in, and the tokens."""
        config = meaningful(self.architecture)
        return digest_of(self.fingerprint, config, self.config.dtype, str(self.trainer.precision), data.digest())

    def _read(self, file: Path, count: int) -> Tensor | None:
        if not self.trainer.is_global_zero or not file.is_file():
            return None
        try:
            with open_safetensors(file) as stored:
                found = stored.get_tensor(NAME)
        except DamagedFileError as error:
            rank_zero_info(f"{error} Its log-probs are computed anew.")
            return None
        return found if found.shape == (count, 2) else None

    def _write(self, file: Path, log_probs: Tensor) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(".partial")
        described = {"reference": self.fingerprint, "path": self.config.path}
        save_file({NAME: log_probs}, draft, metadata={"about": json.dumps(described)})
        draft.replace(file)

    def _scored(self, data: PreferenceSource, batch_size: int) -> Tensor:
        contract = as_contract(self.trainer.strategy)
        rank, ranks = contract.data_parallel_rank, contract.data_parallel_size
        model = self.model()
        with model.without_adapters():
            batches = data.share(batch_size=batch_size, rank=rank, world_size=ranks)
            own = torch.cat([self._score(model, batch.to(self.trainer.strategy.root_device)) for batch in batches])
        shares = contract.gather_over_data_parallel(own.cpu())
        scored = torch.zeros(len(data), 2, dtype=torch.float32, device="cpu")
        for index, share in enumerate(shares):
            positions = range(index, len(data), ranks)
            scored[index::ranks] = share[: len(positions)]
        return scored

    def _score(self, model: TokenScorer, batch: PreferenceBatch) -> Float[Tensor, "examples 2"]:
        contract = as_contract(self.trainer.strategy)
        splitter = BatchSplitter(contract=contract, micro_batch_size=len(batch), max_tokens=self.max_tokens)
        (split,) = splitter.split(model, [batch])
        scores = split.join(contract.forward(model, split.parts))
        assert scores.log_probs is not None
        return torch.where(batch.response_mask, scores.log_probs, 0.0).sum(-1).view(-1, 2)
