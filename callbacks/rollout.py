"""Samples responses just before the step that learns from them."""

from __future__ import annotations

import dataclasses
import functools
from abc import abstractmethod
from collections.abc import Callable
from typing import cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from verl_lightning.callbacks.shared_rollout import join_parts, own_part
from verl_lightning.modules.base import PostTrainingModule
from verl_lightning.modules.sampling import SamplingModule
from verl_lightning.rollout.base import Prompts, RolloutEngine, SamplingConfig
from verl_lightning.rollout.hf import HFEngine
from verl_lightning.rollout.turns import TurnsConfig, play
from verl_lightning.seeding import derive_seed, run_seed
from verl_lightning.telemetry.memory_plan import EngineMemory
from verl_lightning.types import PromptBatch, Rollout


class RolloutCallback(Callback):
    """Sets ``batch.rollout`` of each prompt batch and touches nothing else.

    When advantages compare with greedy responses, it adds those too, as ``batch.greedy_rollout``.

    The policy's weights go to the engine whenever an optimizer step has changed them, and before and after each
    validation, so that every response comes from the newest policy.

    Ranks that share a model's work (tensor, pipeline, context or sequence parallelism) see the same prompts: each
    samples a part of the responses, and all learn from the whole.

    Args:
        sampling: Settings by which training responses are sampled.
        val_sampling: Settings by which validation and test responses are sampled.
        turns: Sample conversations with an environment, such as a tool; null samples single responses.

    Raises:
        MisconfigurationException: In ``setup``, if the module does not learn from responses.
    """

    def __init__(
        self,
        sampling: SamplingConfig = SamplingConfig(),
        val_sampling: SamplingConfig = SamplingConfig(),
        turns: TurnsConfig | None = None,
    ) -> None:
        self.sampling = sampling
        self.val_sampling = val_sampling
        self.turns = turns
        self._engine: RolloutEngine | None = None
        self._has_started = False
        self._weights_step = -1  # `global_step` of the weights in the engine; -1 before the first

    takes_adapters = False
    """True if the engine takes adapters beside its weights; see `sync_weights`."""

    @abstractmethod
    def make_engine(self, module: PostTrainingModule) -> RolloutEngine:
        """Make an engine for the module's policy, without starting it."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(pl_module, SamplingModule):
            raise MisconfigurationException(
                f"`{type(self).__name__}` samples responses, for which `{type(pl_module).__name__}` has no use."
                " Train a `PPOModule`, or take the rollout callback out (`rollout: null`)."
            )
        if sends_adapters(pl_module) and not self.takes_adapters:
            raise MisconfigurationException(
                f"`lora.merge_for_rollout: false` sends adapters alone, but the engine of `{type(self).__name__}` takes"
                " whole weights only. Set it to true, or sample with `VLLMRollout`."
            )
        self._weights_step = -1
        self._engine, self._has_started = self.make_engine(pl_module), False

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._make_ready(trainer)

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: PromptBatch, batch_idx: int
    ) -> None:
        batch.rollout = self._sample(trainer, pl_module, batch, self.sampling, "train")
        if cast(SamplingModule, pl_module).needs_greedy_rollout:
            greedy = dataclasses.replace(self.sampling, num_samples=1, temperature=0.0)
            batch.greedy_rollout = self._sample(trainer, pl_module, batch, greedy, "greedy")

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._make_ready(trainer)
        self._weights_step = -1  # callbacks such as `EMAWeightAveraging` put other weights in place for a validation

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._weights_step = -1

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._make_ready(trainer)

    @override
    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: PromptBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        batch.rollout = self._sample(trainer, pl_module, batch, self.val_sampling, "validate")

    @override
    def on_test_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: PromptBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        batch.rollout = self._sample(trainer, pl_module, batch, self.val_sampling, "test")

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "")

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._engine is not None:
            self._engine.stop()
            self._engine = None

    def _make_ready(self, trainer: Trainer) -> None:
        """Start the engine unless it runs. Collective.

        Not in ``setup``: after that hook, Lightning frees the workspaces of cuBLAS on the device, into which the CUDA
        graphs of an engine in this process would go on writing.
        """
        if not self._has_started:
            self.start_engine(trainer.strategy.root_device)
            self._has_started = True

    def start_engine(self, device: torch.device) -> None:
        """Start the engine, on a device that the strategy has set up. Collective."""
        assert self._engine is not None
        self._engine.start(device)

    def sync_weights(self, module: PostTrainingModule) -> None:
        """Send the engine the policy as it is now, adapters merged in. Collective."""
        assert self._engine is not None
        self._engine.load_weights(module.contract.named_weights(module.policy, self.weights_type(module)))

    def weights_type(self, module: PostTrainingModule) -> torch.dtype | None:
        """Return the type of the weights that the engine is sent; None where it takes them as they are."""
        return None

    def _sample(
        self, trainer: Trainer, module: LightningModule, batch: PromptBatch, sampling: SamplingConfig, purpose: str
    ) -> Rollout:
        assert isinstance(module, PostTrainingModule)  # checked in `setup`
        self._sync(trainer, module, batch)
        prompts = self._prompts(trainer, batch, sampling, purpose)
        with module.phase("gen"):
            return self._share(module, prompts, functools.partial(self._answer, module, sampling))

    def _share(self, module: PostTrainingModule, prompts: Prompts, answer: Callable[[Prompts], Rollout]) -> Rollout:
        """Answer prompts that other ranks may have too: each answers a part, and all get the whole. Collective."""
        part = answer(own_part(prompts, module.contract))
        return self._join(module, part, len(prompts))

    def _join(self, module: PostTrainingModule, part: Rollout, num_prompts: int) -> Rollout:
        """Join the whole of which each rank with the same data has a part. Collective."""
        pad = module.tokenizer.pad_token_id
        return join_parts(part, module.contract, num_prompts=num_prompts, pad_token_id=pad)

    def _answer(self, module: PostTrainingModule, sampling: SamplingConfig, prompts: Prompts) -> Rollout:
        """Sample single responses or, with `turns`, conversations."""
        if self.turns is None:
            return self._generate(module, prompts, sampling)
        ask = functools.partial(self._generate, module)
        return play(ask, prompts, sampling, self.turns, module.tokenizer)

    def _sync(self, trainer: Trainer, module: PostTrainingModule, batch: PromptBatch) -> None:
        """Bring the engine to the newest policy. Collective."""
        if self._weights_step != trainer.global_step:
            with module.phase("update_weights"):
                self.sync_weights(module)
            self._weights_step = trainer.global_step

    def _prompts(self, trainer: Trainer, batch: PromptBatch, sampling: SamplingConfig, purpose: str) -> Prompts:
        """Return the prompts that the engine is asked, with a seed for each sample."""
        # Validation draws the same noise each time, so that its curve shows the policy and not the dice.
        # Batches, not steps: dynamic sampling may ask a prompt again within a step.
        turn = trainer.fit_loop.epoch_loop.total_batch_idx if trainer.training else 0
        seeds = [
            [derive_seed(run_seed(), purpose, turn, row, sample) for sample in range(sampling.num_samples)]
            for row in batch.row_index.tolist()
        ]
        return Prompts(prompt_ids=batch.prompt_ids, prompt_mask=batch.prompt_mask, seeds=seeds)

    def _generate(self, module: PostTrainingModule, prompts: Prompts, sampling: SamplingConfig) -> Rollout:
        """Return the engine's answers."""
        assert self._engine is not None
        return self._engine.generate(prompts, sampling)


def sends_adapters(module: PostTrainingModule) -> bool:
    """Tell whether the policy's adapters go to the engine by themselves."""
    lora = module.policy_config.lora
    return lora is not None and not lora.merge_for_rollout


class HFRollout(RolloutCallback):
    """Samples with a copy of the policy in the training process: no extra package, any device, not fast.

    Args:
        sampling: Settings by which training responses are sampled.
        val_sampling: Settings by which validation and test responses are sampled.
        batch_size: Most sequences sampled at once; bounds the memory of the key-value cache.
        turns: Sample conversations with an environment, such as a tool; null samples single responses.

    Raises:
        ValueError: If an option of the sampling needs vLLM.
    """

    memory_key = "rollout.batch_size"

    def __init__(
        self,
        sampling: SamplingConfig = SamplingConfig(),
        val_sampling: SamplingConfig = SamplingConfig(),
        batch_size: int = 1024,
        turns: TurnsConfig | None = None,
    ) -> None:
        super().__init__(sampling, val_sampling, turns)
        for name, each in {"sampling": sampling, "val_sampling": val_sampling}.items():
            if each.stop or each.guide is not None:
                raise ValueError(
                    f"`rollout.{name}` sets `stop` or `guide`, which `HFRollout` doesn't know. Take it out, or sample"
                    " with `VLLMRollout`."
                )
        self.batch_size = batch_size
        self._most = 0, 0  # sequences of an iteration on this rank, and tokens of each, where they are known

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        module = cast(SamplingModule, pl_module)
        prompts = 0 if module.prompt_source is None else module.prompt_source.prompts_per_step
        sequences = -(-prompts // module.contract.data_parallel_size) * self.sampling.num_samples
        self._most = sequences, module.max_tokens or 0

    def engine_memory(self, device_bytes: int) -> EngineMemory:
        """Return the engine's memory on a training device: a whole policy always, its cache while it samples."""
        del device_bytes
        if not isinstance(self._engine, HFEngine):
            return EngineMemory()
        weights = self._engine.weight_bytes
        return EngineMemory(sampling=weights + self._engine.cache_bytes(*self._most), learning=weights)

    @override
    def make_engine(self, module: PostTrainingModule) -> HFEngine:
        config = module.policy_config
        return HFEngine(
            config,
            eos_token_ids=module.eos_token_ids,
            pad_token_id=module.tokenizer.pad_token_id,
            batch_size=self.batch_size,
        )
