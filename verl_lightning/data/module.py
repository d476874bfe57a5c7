"""The common base of the data modules: files, tokenised once in ``setup``, dealt out to the ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, cast

from lightning.fabric.utilities import rank_zero_info
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, Trainer
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from verl_lightning.data.curriculum import FollowCurriculum
from verl_lightning.data.files import Row
from verl_lightning.data.image_files import ImageFile, ImagesConfig
from verl_lightning.data.loader import BatchSource, EvalLoader, TrainLoader
from verl_lightning.data.mixture import Mixture
from verl_lightning.data.resumed_epoch import ResumeEpoch
from verl_lightning.faults import told_of
from verl_lightning.needs import no_files
from verl_lightning.pictures import ImageReader
from verl_lightning.seeding import run_seed

VALIDATION_KEY = "validation_rows"


class TokenizedDataModule(LightningDataModule):
    """Reads and tokenises its files in ``setup`` with the tokenizer of the module in training.

    The order of the training rows is drawn from the run's seed (``seed_everything``) and the epoch.

    Args:
        train_files: Files of the training rows.
        val_files: Files of the rows of ``validate`` and of validation during ``fit``; may be empty.
        test_files: Files of the rows of ``test``; may be empty.
        images: Places where images may be, and frames of videos.
        shuffle: True shuffles the training rows anew in each epoch; never under ``Trainer(overfit_batches=...)``.
    """

    def __init__(
        self,
        train_files: str | Sequence[str],
        val_files: str | Sequence[str],
        test_files: str | Sequence[str],
        *,
        images: ImagesConfig,
        shuffle: bool,
    ) -> None:
        super().__init__()
        self.train_files = train_files
        self.val_files = val_files
        self.test_files = test_files
        self.images = images
        self.shuffle = shuffle
        self._loaders: dict[str, TrainLoader | EvalLoader] = {}
        self._num_embeddings: int | None = None
        self.processor: ImageReader | None = None

    @abstractmethod
    def read(self, files: str | Sequence[str], tokenizer: PreTrainedTokenizerBase) -> BatchSource[object]:
        """Reads, checks and tokenises files."""

    def mixture_of(self, source: BatchSource[object]) -> Mixture | None:
        """Returns the shares of several kinds of training rows; None takes rows as they come."""
        del source
        return None

    @property
    def val_parts(self) -> dict[str, str | Sequence[str]]:
        """Files of each set of validation rows: ``val``, or several that begin with it."""
        return {"val": self.val_files} if self.val_files else {}

    @abstractmethod
    def train_batch_size(self, world_size: int) -> int:
        """Returns the number of training rows in a batch of one rank."""

    @abstractmethod
    def eval_batch_size(self, world_size: int) -> int:
        """Returns the number of validation or test rows in a batch of one rank."""

    @override
    def setup(self, stage: str) -> None:
        trainer, tokenizer = self._trainer(), self._tokenizer()
        self._num_embeddings = getattr(trainer.lightning_module, "num_embeddings", None)
        self.processor = getattr(trainer.lightning_module, "processor", None)
        self._check_images_config()
        predicted = "test_files" if self.test_files else "val_files"
        name = {"validate": "val_files", "test": "test_files", "predict": predicted}.get(stage, "train_files")
        if not (self.val_parts if name == "val_files" else getattr(self, name)):
            raise MisconfigurationException(no_files(name))
        if stage == "fit":
            with told_of("data.train_files"):
                self._loaders["train"] = loader = self._train_loader(trainer, tokenizer)
            self._follow(loader, trainer)
        if stage == "fit" and not self.val_parts:
            trainer.limit_val_batches = 0  # else Lightning takes no loader for an empty one, and warns
        elif stage in ("fit", "validate"):
            for part, files in self.val_parts.items():
                with told_of("data.val_files" if part == "val" else f"data.val_sets.{part.partition('/')[2]}"):
                    self._loaders[part] = self._eval_loader(files, trainer, tokenizer)
        if stage == "test":
            with told_of("data.test_files"):
                self._loaders["test"] = self._eval_loader(self.test_files, trainer, tokenizer)
        if stage == "predict":
            with told_of(f"data.{predicted}"):
                self._loaders["predict"] = self._eval_loader(getattr(self, predicted), trainer, tokenizer)
        for name, loaded in self._loaders.items():
            check_share(trainer, name, len(loaded))
        if "val" in self._loaders and stage == "fit":
            check_interval(trainer, loader.used_batches)

    def _follow(self, loader: TrainLoader, trainer: Trainer) -> None:
        """Adds the callbacks that count what a loader has handed out, in the place of those of an earlier run."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined] # set by a connector
        own = (ResumeEpoch, FollowCurriculum)
        callbacks[:] = [callback for callback in callbacks if not isinstance(callback, own)]
        callbacks.append(ResumeEpoch(loader))
        if (mixture := loader.mixture) is not None and (curriculum := mixture.config.curriculum) is not None:
            callbacks.append(FollowCurriculum(loader, mixture, curriculum))

    def _train_loader(self, trainer: Trainer, tokenizer: PreTrainedTokenizerBase) -> TrainLoader:
        rank, world_size = data_parallel_rank_and_size(trainer)
        shuffle = self.shuffle and not trainer.overfit_batches  # type: ignore[attr-defined] # set by a connector
        if shuffle != self.shuffle:
            rank_zero_info("`overfit_batches` is set: training rows are not shuffled.")
        source = self.read(self.train_files, tokenizer)
        return TrainLoader(
            source,
            mixture=self.mixture_of(source),
            batch_size=self.train_batch_size(world_size),
            rank=rank,
            world_size=world_size,
            shuffle=shuffle,
            seed=run_seed(),
            limit_batches=trainer.limit_train_batches,
        )

    def _eval_loader(
        self, files: str | Sequence[str], trainer: Trainer, tokenizer: PreTrainedTokenizerBase
    ) -> EvalLoader:
        rank, world_size = data_parallel_rank_and_size(trainer)
        source = self.read(files, tokenizer)
        return EvalLoader(source, batch_size=self.eval_batch_size(world_size), rank=rank, world_size=world_size)

    @property
    def sources(self) -> dict[str, BatchSource[object]]:
        """The rows that `setup` has read: ``train``, ``val`` and ``test``, as far as the stage needs them."""
        return {name: loader.source for name, loader in self._loaders.items()}

    @override
    def train_dataloader(self) -> TrainLoader:
        if "train" not in self._loaders:
            raise RuntimeError(
                f"`{type(self).__name__}.train_dataloader` comes after `setup`, which needs the tokenizer of the module"
                " in training: `trainer.fit(module, datamodule=...)` calls both."
            )
        return cast(TrainLoader, self._loaders["train"])

    @override
    def val_dataloader(self) -> EvalLoader | list[EvalLoader]:
        loaders = [cast(EvalLoader, self._loaders[part]) for part in self.val_parts if part in self._loaders]
        return loaders[0] if len(loaders) == 1 else loaders

    @override
    def test_dataloader(self) -> EvalLoader | list[EvalLoader]:
        return cast(EvalLoader, self._loaders.get("test", []))

    @override
    def predict_dataloader(self) -> EvalLoader | list[EvalLoader]:
        return cast(EvalLoader, self._loaders.get("predict", []))

    @override
    def state_dict(self) -> dict[str, Any]:
        return {VALIDATION_KEY: self._validation_rows}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved, ours = state_dict.get(VALIDATION_KEY), self._validation_rows
        if saved and ours and saved != ours and self._trainer().training:
            rank_zero_info(
                "The validation rows are not those of the checkpoint: metrics and best checkpoints from before were"
                f" measured on others (the rows' digests are {saved} and {ours})."
            )

    @property
    def _validation_rows(self) -> str:
        """Digest that tells the validation rows from others; empty without them."""
        loaders = [self._loaders[part] for part in self.val_parts if part in self._loaders]
        return " ".join(str(getattr(loader.source, "fingerprint", "")) for loader in loaders)

    @override
    def teardown(self, stage: str) -> None:
        self._loaders = {}

    def check_tokens(
        self, ids: Sequence[Sequence[int]], names: Sequence[str], tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Checks that the model in training has an embedding of each token.

        Args:
            ids: Tokens of each row.
            names: Name of each row, for messages.
            tokenizer: Tokenizer that made the tokens.

        Raises:
            ValueError: If the model lacks one: the tokenizer has more tokens than the model.
        """
        limit = self._num_embeddings
        for row_ids, name in zip(ids, names, strict=True):
            largest = max(row_ids, default=0)
            if limit is not None and largest >= limit:
                raise ValueError(
                    f"The token {tokenizer.convert_ids_to_tokens(largest)!r} in {name} has the number {largest}, but"
                    f" the model has embeddings of {limit} tokens: its tokenizer is another model's, or tokens were"
                    " added to it alone. Save the model anew after `model.resize_token_embeddings(len(tokenizer))`."
                )

    def check_images(self, images: Sequence[Sequence[ImageFile]], lengths: Sequence[int], rows: Sequence[Row]) -> None:
        """Checks that what is run takes images, if rows have some, and that none would be cut off.

        Args:
            images: Images of each row.
            lengths: Tokens of each row.
            rows: Rows, whose names are for messages.

        Raises:
            MisconfigurationException: If the strategy or another part of the run does not take images.
            ValueError: If a row would be cut that has images.
        """
        first = next((row for row, own in zip(rows, images, strict=True) if own), None)
        if first is None:
            return
        obstacle = getattr(self._trainer().lightning_module, "image_obstacle", None)
        if obstacle is not None and (complaint := obstacle()) is not None:
            raise MisconfigurationException(f"There are images in {first.name}, but {complaint}")
        limit = getattr(self, "max_length", None) or getattr(self, "max_prompt_length", None)
        for row, own, length in zip(rows, images, lengths, strict=True):
            if own and limit is not None and length > limit and getattr(self, "overlong", "") == "truncate":
                raise ValueError(
                    f"There are {length} tokens in {row.name}, over the limit of {limit}, and `overlong: truncate` may"
                    ' cut through its images. Raise the limit, or set `overlong` to "drop".'
                )

    def _check_images_config(self) -> None:
        if self.processor is None and self.images != ImagesConfig():
            raise MisconfigurationException("`data.images` is set, but the policy reads no images. Take it out.")

    def _trainer(self) -> Trainer:
        if self.trainer is None:
            raise RuntimeError(
                f"`{type(self).__name__}.setup` needs the `Trainer`: pass the data module to one,"
                " `trainer.fit(module, datamodule=...)`, and let it call `setup`."
            )
        return self.trainer

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        module = self._trainer().lightning_module
        tokenizer = getattr(module, "tokenizer", None)
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise MisconfigurationException(
                f"`{type(self).__name__}` tokenises with the tokenizer of the module in training, but"
                f" `{type(module).__name__}` has no attribute `tokenizer`. Set it in the module's `__init__`, with"
                " `verl_lightning.models.tokenizer.load_tokenizer`."
            )
        return tokenizer


def check_share(trainer: Trainer, loader: str, length: int) -> None:
    """Refuses a share of batches that is none of them, before models are built.

    Args:
        trainer: Trainer of the run.
        loader: Name of the loader, such as ``train`` or ``val/sums``.
        length: Number of its batches.

    Raises:
        MisconfigurationException: If not even one batch is used, though 0 was not asked for.
    """
    stage, _, part = loader.partition("/")
    limit = getattr(trainer, f"limit_{stage}_batches")
    if isinstance(limit, float) and 0 < limit * length < 1:
        overfits = stage in ("train", "val") and bool(trainer.overfit_batches)  # type: ignore[attr-defined]
        name = "overfit_batches" if overfits else f"limit_{stage}_batches"
        files = f"val_sets.{part}" if part else f"{stage}_files"
        raise MisconfigurationException(
            f"`trainer.{name}` is {limit:g} of the {length} batches of `data.{files}`, which is less than one."
            " Give a whole number of batches, such as 1, or a larger share."
        )


def check_interval(trainer: Trainer, num_batches: int) -> None:
    """Refuses a validation after more batches than an epoch has, before models are built.

    Args:
        trainer: Trainer of the run.
        num_batches: Number of training batches of an epoch.

    Raises:
        MisconfigurationException: If there would never be one.
    """
    interval = trainer.val_check_interval
    counts_in_epoch = trainer.check_val_every_n_epoch is not None
    if type(interval) is int and counts_in_epoch and trainer.limit_val_batches > 0 and interval > num_batches:
        raise MisconfigurationException(
            f"`trainer.val_check_interval` is {interval} batches, but an epoch has {num_batches}. Lower it, or set"
            " `trainer.check_val_every_n_epoch: null` to count batches over all epochs."
        )


def data_parallel_rank_and_size(trainer: Trainer) -> tuple[int, int]:
    """Returns rank and number of the processes that read different rows; under model parallelism fewer than all."""
    kwargs = trainer.distributed_sampler_kwargs
    return (0, 1) if kwargs is None else (kwargs["rank"], kwargs["num_replicas"])
