"""Writes the policy as a Hugging Face folder while training goes on, and at its end."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Literal

import torch
from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from safetensors import SafetensorError
from typing_extensions import override

from verl_lightning.callbacks.hub import HubRepository
from verl_lightning.compat.lightning import FolderCheckpoint
from verl_lightning.faults import RunError
from verl_lightning.models.classifier import classifier_of
from verl_lightning.models.digests import write_digests
from verl_lightning.models.hf_folder import (
    atomic_folder,
    clear_partial_folders,
    remove_folder,
    write_model,
    write_value_head,
)
from verl_lightning.models.lora import has_adapters, write_adapter
from verl_lightning.models.pretrained import copy_processor
from verl_lightning.models.scorer import TokenScorer
from verl_lightning.models.weights import value_head_weights
from verl_lightning.modules.base import PostTrainingModule
from verl_lightning.modules.monitors import unknown_monitor
from verl_lightning.modules.weight_averaging import averaged_weights


class HFCheckpoint(FolderCheckpoint):
    """Writes folders that `from_pretrained` loads: at chosen steps, at the best metric, and at the end of training.

    The folder ``last`` is written when training has ended; it exists only then. Others are named after ``filename``.
    A folder appears when it is complete and on the disk: a kill leaves the previous ones as they were. Nothing in it
    can resume training: keep a `ModelCheckpoint` in ``trainer.callbacks`` for that.

    With LoRA a folder is a PEFT adapter: `PeftModel.from_pretrained` puts it on the base model. With a
    `WeightAveraging` callback its averaged weights are written, which are those that are validated.

    Args:
        dirpath: Parent of the folders; null takes ``hf`` beside Lightning's ``checkpoints``.
        filename: Name of a folder, with metrics in braces.
        monitor: Metric that ranks the folders; without ``every_n_train_steps`` it is looked at after each validation.
            Null keeps the newest.
        mode: Whether the metric should be large or small.
        save_top_k: Folders to keep besides ``last``; -1 keeps all.
        every_n_train_steps: Write a folder every so many steps (of PPO: iterations); null writes none in between,
            unless there is a ``monitor``.
        role: Model to write; ``critic`` needs a critic with a trunk of its own.
        merge_adapters: True writes whole models with LoRA's adapters merged in.
        dtype: Stored type of the weights; null leaves them as they are trained.
        max_shard_gib: Largest size of one file of weights, in GiB; as much memory is needed while saving.
        push_to_hub: Repository on the Hugging Face hub, such as ``me/my-model``, that gets the folder ``last`` when
            training has ended; it is made before training begins, unless it is there. Null sends nothing.
        hub_private: Have a new repository be private.

    Raises:
        ValueError: If a validation metric is to be looked at between validations, or more folders are to be kept than
            are ever written.
    """

    FILE_EXTENSION = ""

    def __init__(
        self,
        dirpath: str | None = None,
        filename: str = "{step}",
        monitor: str | None = None,
        mode: Literal["min", "max"] = "max",
        save_top_k: int = 1,
        every_n_train_steps: int | None = None,
        role: Literal["actor", "critic"] = "actor",
        merge_adapters: bool = False,
        dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        max_shard_gib: float = 5.0,
        push_to_hub: str | None = None,
        hub_private: bool = True,
    ) -> None:
        if monitor is not None and monitor.startswith("val/") and every_n_train_steps is not None:
            raise ValueError(
                f"`monitor: {monitor}` is measured at validations, so a folder written `every_n_train_steps` would be"
                " ranked by weights from before. Leave `every_n_train_steps` out."
            )
        saves_between = monitor is not None or every_n_train_steps is not None
        if save_top_k not in (0, 1) and not saves_between:
            raise ValueError(
                f"`save_top_k: {save_top_k}` has nothing to choose from: without `monitor` and `every_n_train_steps` no"
                " folder but `last` is written. Set one of them, or leave `save_top_k` out."
            )
        if max_shard_gib <= 0:
            raise ValueError(f"`max_shard_gib` must be above 0, got {max_shard_gib}.")
        super().__init__(
            dirpath=dirpath,
            filename=filename,
            monitor=monitor,
            mode=mode,
            save_top_k=save_top_k if saves_between else 0,
            every_n_train_steps=every_n_train_steps,
            save_on_train_epoch_end=False,  # ranking needs the validation that ends the epoch
            enable_version_counter=False,  # a resumed run writes its steps again, to the same place
        )
        self.role = role
        self.merge_adapters = merge_adapters
        self.dtype = None if dtype is None else getattr(torch, dtype)
        self.max_shard_bytes = int(max_shard_gib * 2**30)
        self.hub = None if push_to_hub is None else HubRepository(push_to_hub, private=hub_private)

    @property
    @override
    def state_key(self) -> str:
        # Lightning's key leaves the class out: a `ModelCheckpoint` with the same trigger would share our state.
        return f"{super().state_key}{self.role, self.merge_adapters, str(self.dtype)}"

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(pl_module, PostTrainingModule):
            raise MisconfigurationException(
                f"`HFCheckpoint` writes a module's policy, but `{type(pl_module).__name__}` has none."
                " Train a `PPOModule`, an `SFTModule`, a `DPOModule` or a `RewardModule`, or take the callback out."
            )
        is_default = self.dirpath is None
        self._check_hub(trainer, stage)
        super().setup(trainer, pl_module, stage)
        assert self.dirpath is not None  # Lightning has filled it in
        if is_default:
            self.dirpath = str(Path(self.dirpath).with_name("hf"))

    def _check_hub(self, trainer: Trainer, stage: str) -> None:
        """Refuse a repository that can't be written to, on all ranks, before models are built. Collective."""
        if self.hub is None or stage != "fit" or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        problem = trainer.strategy.broadcast(self.hub.prepare() if trainer.is_global_zero else None)
        if problem is not None:
            raise MisconfigurationException(problem)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.merge_adapters and not has_adapters(self._model(pl_module).backbone):
            raise MisconfigurationException(
                f"`HFCheckpoint(merge_adapters=True)`: the {self.role} has no adapters. Set its `lora`, or drop this."
            )
        model = self._model(pl_module)
        if self.role == "actor" and model.head == "value" and has_adapters(model.backbone) and not self.merge_adapters:
            raise MisconfigurationException(
                "`HFCheckpoint` writes a reward model as a whole, of which an adapter is a part only. Set"
                " `merge_adapters: true`."
            )
        if trainer.is_global_zero:
            clear_partial_folders(self._folder)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self.write(trainer, self._folder / "last")
        if self.hub is not None and trainer.is_global_zero:
            self._push(trainer, self.hub)

    def _push(self, trainer: Trainer, hub: HubRepository) -> None:
        """Send the folder ``last``; a hub that does not take it must not fail a run that is over."""
        step = f"Step {trainer.global_step} of {type(trainer.lightning_module).__name__}, by verl-lightning"
        try:
            rank_zero_info(f"`{self._folder / 'last'}` is on the hub: {hub.upload(self._folder / 'last', step)}")
        except RunError as error:
            rank_zero_warn(str(error))

    @override
    def write(self, trainer: Trainer, path: Path) -> None:
        """Write the model to a folder, in place of what is there. Collective.

        Raises:
            RunError: On every rank, if the one that writes can't.
        """
        with averaged_weights(trainer):
            self._write(trainer, path)

    def _write(self, trainer: Trainer, path: Path) -> None:
        module = trainer.lightning_module
        assert isinstance(module, PostTrainingModule)  # checked in `setup`
        model = self._model(module)
        writes_adapter = has_adapters(model.backbone) and not self.merge_adapters
        adapter = module.contract.adapter_weights(model) if writes_adapter else {}
        weights = iter(()) if writes_adapter else module.contract.named_weights(model)
        value_head = value_head_weights(model.value_head)
        classifier = classifier_of(self.role, model.head, value_head, module.tokenizer.pad_token_id)
        fingerprint = module.base_fingerprints.get(self.role, "")
        problem = None
        if trainer.is_global_zero:
            try:
                with atomic_folder(path) as folder:
                    module.tokenizer.save_pretrained(folder)
                    if module.processor is not None:
                        copy_processor(module.processor.path, folder)
                    write_value_head(folder, {} if classifier else value_head)
                    if writes_adapter:
                        write_adapter(folder, model.backbone, adapter, fingerprint, self.dtype)
                    else:
                        write_model(
                            folder, model.backbone, weights, self.dtype, self.max_shard_bytes, classifier=classifier
                        )
                    write_digests(folder)
            except (OSError, SafetensorError) as error:
                problem = f"{type(error).__name__}: {error}"
        for _ in weights:  # collective: the ranks that don't write take part, and the writer after a failure
            pass
        problem = trainer.strategy.broadcast(problem)
        if problem is not None:
            raise RunError(f"`HFCheckpoint` could not write `{path}` ({problem}).")

    @property
    def _folder(self) -> Path:
        assert self.dirpath is not None  # `setup` has filled it in
        return Path(self.dirpath)

    def _model(self, module: LightningModule) -> TokenScorer:
        assert isinstance(module, PostTrainingModule)  # checked in `setup`
        model = module.policy if self.role == "actor" else getattr(module, "critic", None)
        if model is None:
            raise MisconfigurationException(
                "`HFCheckpoint(role='critic')`: the module has no critic with a trunk of its own."
                " Use `role: actor`, which writes a value head on the actor's trunk too."
            )
        return model

    @override
    def remove(self, path: Path) -> None:
        remove_folder(path)

    @override
    def refuse_monitor(self, metrics: Collection[str]) -> None:
        raise MisconfigurationException(unknown_monitor(self, str(self.monitor), metrics))
