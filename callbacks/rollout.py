"""Samples responses just before the step that learns from them."""

from __future__ import annotations

import dataclasses
import functools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from verl_lightning.callbacks.canary import Canary
from verl_lightning.callbacks.placement import Placement
from verl_lightning.callbacks.replacements import Replacements
from verl_lightning.callbacks.rollout_queue import (
    CHECKPOINT_KEY,
    Ticket,
    check_staleness,
    join_parts,
    own_part,
    restored,
)
from verl_lightning.environments.config import Environments, EpisodesConfig, Given
from verl_lightning.environments.runner import EpisodeRequest, EpisodeRunner, episode_requests
from verl_lightning.faults import RunError
from verl_lightning.modules.base import PostTrainingModule
from verl_lightning.modules.sampling import SamplingModule
from verl_lightning.rollout.base import Completion, Engine, Request, SamplingConfig
from verl_lightning.rollout.completions import answer, make_requests, to_rollout, version_message, wait_for
from verl_lightning.rollout.stepping import SteppingEngine
from verl_lightning.rollout.turns import TurnsConfig
from verl_lightning.rollout.weight_sums import difference_message, weight_sums
from verl_lightning.seeding import derive_seed, run_seed
from verl_lightning.types import PromptBatch, Rollout

T = TypeVar("T")


class RolloutCallback(Callback):
    """Sets ``batch.rollout`` of each prompt batch and touches nothing else.

    When advantages compare with greedy responses, it sets those too, as ``batch.greedy_rollout``.

    The policy's weights go to the engine whenever an optimizer step has changed them, and before and after each
    validation, so that every response comes from the newest policy.

    With ``max_staleness: 1`` each batch is sampled while the policy learns from the one before. Responses then come
    from the policy of one step ago; their age is logged as ``rollout/staleness``. The first batch is sampled twice, for
    the first two steps. A checkpoint holds the responses that wait for their step, since the weights that they were
    sampled with are gone; a resumed run equals the uninterrupted one.

    Ranks that share a model's work (tensor, pipeline, context or sequence parallelism) see the same prompts: each
    samples a part of the responses, and all learn from the whole.

    Args:
        sampling: Settings by which training responses are sampled.
        val_sampling: Settings by which validation and test responses are sampled.
        turns: Sample conversations with replies of plain text; `environment` can do more. Null samples single
            responses.
        max_staleness: Most optimizer steps by which responses may be older than the policy that learns from them, 0
            or 1.
        placement: Where engines run, such as `Beside` or `RayActors`; null is in the training processes.
        canary_limit: Largest gap of the canary, in nats per token; null follows the type in which both compute.
        environment: World in which the policy acts turn by turn; see `Environments`. Null samples single responses.
        episodes: Limits of the episodes in environments.

    Raises:
        ValueError: If ``max_staleness`` is neither, conversations are to be sampled ahead, or an environment is none.
        MisconfigurationException: In ``setup``, if the module does not learn from responses, or nothing corrects for
            their age.
    """

    def __init__(
        self,
        sampling: SamplingConfig = SamplingConfig(),
        val_sampling: SamplingConfig = SamplingConfig(),
        turns: TurnsConfig | None = None,
        max_staleness: int = 0,
        placement: Placement | None = None,
        canary_limit: float | None = None,
        environment: Given | None = None,
        episodes: EpisodesConfig = EpisodesConfig(),
    ) -> None:
        if max_staleness not in (0, 1):
            raise ValueError(f"`rollout.max_staleness` must be 0 or 1, got {max_staleness}.")
        if turns is not None and environment is not None:
            raise ValueError("`rollout.turns` and `rollout.environment` both name an environment. Leave out `turns`.")
        if max_staleness and (turns is not None or environment is not None):
            given = "environment" if turns is None else "turns"
            raise ValueError(
                f"`rollout.max_staleness: 1` samples single responses. Set it to 0, or take `rollout.{given}` out."
            )
        self.environment = environment
        self.episodes = episodes
        self._environments = Environments(environment) if environment is not None else turns
        self._runner: EpisodeRunner | None = None
        self.sampling = sampling
        self.val_sampling = val_sampling
        self.turns = turns
        if canary_limit is not None and canary_limit <= 0:
            raise ValueError(f"`rollout.canary_limit` must be above 0 nats per token, got {canary_limit}.")
        self.max_staleness = max_staleness
        self.placement = placement
        self._canary: Canary | None = Canary(canary_limit)
        self._replacements: Replacements | None = None
        self._engine: Engine | None = None
        self._has_started = False
        self._weights_step = -1  # `global_step` of the weights in the engine; -1 before the first
        self._weights_version = 0
        self._ahead: Ticket | None = None  # the batch of the next step
        self._saved: list[dict[str, Any]] = []  # of each rank, until training starts

    takes_adapters = False
    """True if the engine takes adapters beside its weights; see `sync_weights`."""

    @abstractmethod
    def make_engine(self, module: PostTrainingModule) -> Engine:
        """Make an engine for the module's policy, without starting it."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(pl_module, SamplingModule):
            raise MisconfigurationException(
                f"`{type(self).__name__}` samples responses, for which `{type(pl_module).__name__}` has no use."
                " Train a `PPOModule`, or take the rollout callback out (`rollout: null`)."
            )
        at_place = self.placement is None or self.placement.takes_adapters
        if sends_adapters(pl_module) and not (self.takes_adapters and at_place):
            raise MisconfigurationException(
                f"`lora.merge_for_rollout: false` sends adapters alone, but the engine of `{type(self).__name__}` takes"
                " whole weights only, as all Ray actors do. Set it to true, or sample with `VLLMRollout`."
            )
        if self.max_staleness and stage == "fit":
            check_staleness(pl_module)
        self._weights_step, self._ahead = -1, None
        if self._canary is not None:
            self._canary.forget()
        self._engine, self._has_started = self._place(pl_module), False
        self._runner = None if self._environments is None else self._make_runner(pl_module, self._environments)

    def _make_runner(self, module: SamplingModule, environments: Environments | TurnsConfig) -> EpisodeRunner:
        """Make what plays episodes, once it has found no fault in the environments."""
        source, config = module.prompt_source, self.episodes
        if isinstance(environments, TurnsConfig):
            config = dataclasses.replace(config, max_turns=environments.max_turns)
        runner = EpisodeRunner(
            environments=environments,
            config=config,
            tokenizer=module.tokenizer,
            eos_token_ids=module.eos_token_ids,
            max_prompt_length=None if source is None else source.max_prompt_length,
            enable_thinking=None if source is None else source.enable_thinking,
        )
        runner.check()
        return runner

    def _place(self, module: PostTrainingModule) -> Engine:
        """Make an engine at its place."""
        engine, placement = self.make_engine(module), self.placement
        if placement is None:
            return engine
        if not isinstance(engine, SteppingEngine):
            kind = type(engine).__name__
            raise MisconfigurationException(f"`rollout.placement` can't place a `{kind}`. Leave it out.")
        placed = placement.place(engine, module)
        if placement.max_restarts is not None:
            self._replacements = Replacements(
                placement.max_restarts,
                replace=lambda module: placed.start(module.device),
                sync_weights=self.sync_weights,
            )
        return placed

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._make_ready(trainer)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.max_staleness and self._saved:
            module = cast(SamplingModule, pl_module)
            self._ahead = restored(self._saved, lambda b: self._requests(module, b, self.sampling, "train"), module)
        self._saved = []

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: PromptBatch, batch_idx: int
    ) -> None:
        module, asked, ahead = cast(SamplingModule, pl_module), dataclasses.replace(batch), self._ahead
        if ahead is None:
            batch.rollout = self._sample(module, batch, self.sampling, "train")
        else:
            self._take_over(module, batch, ahead)
        age = 0 if ahead is None else trainer.global_step - ahead.weights_step
        if module.needs_greedy_rollout:
            greedy = dataclasses.replace(self.sampling, num_samples=1, temperature=0.0)
            batch.greedy_rollout = self._sample(module, batch, greedy, "greedy")
        if self._canary is not None:
            module.log("rollout/canary_gap", self._canary.gap, batch_size=1)
        if self.max_staleness:
            module.log("rollout/staleness", float(age), batch_size=1)
            # At first the same prompts once more, with other noise.
            requests = self._requests(module, asked, self.sampling, "ahead" if ahead is None else "train")
            sample = functools.partial(self._complete, module, own_part(requests, self.sampling, module.contract))
            self._ahead = Ticket(asked, requests, trainer.global_step, sample)

    def _take_over(self, module: PostTrainingModule, batch: PromptBatch, ahead: Ticket) -> None:
        """Put the batch that was sampled meanwhile in this one's place, and send the newest weights. Collective."""
        with module.phase("gen"):
            rollout = self._take(module, ahead)
        self._sync(module, batch)
        batch.take_over(dataclasses.replace(ahead.batch, rollout=rollout))

    def _take(self, module: PostTrainingModule, ahead: Ticket) -> Rollout:
        """Wait for the responses of all ranks with this rank's data, and return them. Collective."""
        if ahead.completions is None:
            part = self._attempt(module, lambda: ahead.result(module.trainer.global_step))
            ahead.completions = join_parts(part, module.contract)
        return self._rollout(module, ahead.requests, ahead.completions, self.sampling)

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._ahead is not None:
            assert isinstance(pl_module, PostTrainingModule)  # checked in `setup`
            self._take(pl_module, self._ahead)
            checkpoint[CHECKPOINT_KEY] = pl_module.contract.gather_over_data_parallel(self._ahead.state_dict())

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._saved = checkpoint.get(CHECKPOINT_KEY, [])

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._make_ready(trainer)
        self._weights_step = -1  # callbacks such as `EMAWeightAveraging` put other weights in place for a validation

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._weights_step = -1
        if self.placement is not None:
            self.placement.leave(trainer)

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.placement is not None:
            self.placement.leave(trainer)

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._make_ready(trainer)

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._make_ready(trainer)

    @override
    def on_predict_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: PromptBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        batch.rollout = self._sample(cast(SamplingModule, pl_module), batch, self.val_sampling, "predict")

    @override
    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: PromptBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        batch.rollout = self._sample(cast(SamplingModule, pl_module), batch, self.val_sampling, "validate")

    @override
    def on_test_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: PromptBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        batch.rollout = self._sample(cast(SamplingModule, pl_module), batch, self.val_sampling, "test")

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "")

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._ahead is not None:
            if self.placement is not None:
                self.placement.abandon(self._engine)
            self._ahead.settle()
            self._ahead = None
        if self._engine is not None:
            self._engine.stop()
            self._engine = None
        if self._runner is not None:
            self._runner.stop()
            self._runner = None

    def _make_ready(self, trainer: Trainer) -> None:
        """Start the engine unless it runs. Collective.

        Not in ``setup``: after that hook, Lightning frees the workspaces of cuBLAS on the device, into which the CUDA
        graphs of an engine in this process would go on writing.
        """
        if not self._has_started:
            module = cast(PostTrainingModule, trainer.lightning_module)
            self._attempt(module, lambda: self.start_engine(trainer.strategy.root_device))
            self._has_started = True

    def start_engine(self, device: torch.device) -> None:
        """Start the engine, on a device that the strategy has set up. Collective."""
        assert self._engine is not None
        self._engine.start(device)

    def sync_weights(self, module: PostTrainingModule) -> None:
        """Send the engine the policy as it is now, adapters merged in. Collective."""
        assert self._engine is not None
        with self._alone(module):
            self._engine.load_weights(self._weights(module), self._weights_version)

    def _alone(self, module: PostTrainingModule) -> AbstractContextManager[None]:
        """Return a context in which no other process asks the same engines. Collective."""
        return nullcontext() if self.placement is None else self.placement.alone(module.trainer)

    def _weights(self, module: PostTrainingModule) -> Iterable[tuple[str, Tensor]]:
        """Yield the weights that the engine is sent. Collective."""
        return module.contract.named_weights(module.policy, self.weights_type(module))

    def weights_type(self, module: PostTrainingModule) -> torch.dtype | None:
        """Return the type of the weights that the engine is sent; None where it takes them as they are."""
        return None

    def _sample(
        self, module: PostTrainingModule, batch: PromptBatch, sampling: SamplingConfig, purpose: str
    ) -> Rollout:
        """Sample responses to a batch from the newest policy. Collective."""
        if self._ahead is not None:
            self._ahead.settle()
        self._sync(module, batch)
        with module.phase("gen"):
            requests: Sequence[Request] = self._requests(module, batch, sampling, purpose)
            if self._runner is not None:
                requests = episode_requests(requests, batch.rows, num_samples=sampling.num_samples)
            return self._answer(module, requests, sampling)

    def _answer(
        self,
        module: PostTrainingModule,
        requests: Sequence[Request],
        sampling: SamplingConfig,
    ) -> Rollout:
        """Answer requests that other ranks may have too: each answers a part, and all get the whole. Collective."""
        part = own_part(requests, sampling, module.contract)
        completions = self._attempt(module, lambda: self._complete(module, part))
        return self._rollout(module, requests, join_parts(completions, module.contract), sampling)

    def _attempt(self, module: PostTrainingModule, work: Callable[[], T]) -> T:
        """Do some work of the engine and return its result; where engines may die, it is done anew. Collective."""
        return work() if self._replacements is None else self._replacements.attempt(module, work)

    def _complete(self, module: PostTrainingModule, requests: Sequence[Request]) -> list[Completion]:
        """Ask the engine for single responses or episodes.

        Raises:
            RunError: If the engine answers with other weights than those that it was sent last, or too many episodes
                fail.
        """
        engine, version = self._engine, self._weights_version
        assert engine is not None
        episodes = [request for request in requests if isinstance(request, EpisodeRequest)]
        if self._runner is not None and episodes:
            completions = wait_for(self._runner.run(engine.generate, episodes))
        else:
            completions = wait_for(answer(engine.generate, requests))
        sampled = [each for each in completions if each.is_own is None or any(each.is_own)]
        if others := {each.weights_version for each in sampled} - {version}:
            raise RunError(version_message(others.pop(), version))
        return completions

    def _sync(self, module: PostTrainingModule, batch: PromptBatch) -> None:
        """Bring the engine to the newest policy. Collective."""
        if self._weights_step != module.trainer.global_step:
            self._weights_version += 1
            with module.phase("update_weights"):
                self._attempt(module, lambda: self.sync_weights(module))
            self._weights_step = module.trainer.global_step
            if self._canary is not None:
                with module.phase("canary"):
                    self._check_canary(module, batch, self._canary)

    def _check_canary(self, module: PostTrainingModule, batch: PromptBatch, canary: Canary) -> None:
        """Compare the engine's and the trainer's log-probs of the engine's own responses. Collective."""
        engine = self._engine
        assert engine is not None
        requests = canary.requests(module.trainer, batch, self.sampling)
        rollout = self._answer(module, requests, requests[0].sampling)
        with self._alone(module):
            self._attempt(module, engine.drop_caches)  # others must find the cache as if there were no canary
        canary.check(module, rollout, self.engine_dtype(module), lambda: self._difference(module, engine))

    def _difference(self, module: PostTrainingModule, engine: Engine) -> str:
        """Say which weights of the engine are not those that it was sent. Collective."""
        if sends_adapters(module):
            return "Adapters alone were sent, whose sums the engine does not tell."
        dtype = self.weights_type(module)
        sent = weight_sums((name, weight.to(dtype or weight.dtype)) for name, weight in self._weights(module))
        return difference_message(sent, engine.weight_sums())

    def engine_dtype(self, module: PostTrainingModule) -> str:
        """Name the type in which trainer and engine compute: of ``trainer.precision``, else that of the weights."""
        name = (module.trainer.precision or "").partition("-")[0]
        return {"bf16": "bfloat16", "16": "float16"}.get(name, module.policy_config.dtype)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self._canary is None else {"canary": self._canary.state()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._canary is not None and "canary" in state_dict:  # else the run that saved had none
            self._canary.restore(state_dict["canary"])

    def _requests(
        self, module: PostTrainingModule, batch: PromptBatch, sampling: SamplingConfig, purpose: str
    ) -> list[Request]:
        """Return what the engine is asked, with a seed for each sample."""
        # Validation draws the same noise each time, so that its curve shows the policy and not the dice.
        # Batches, not steps: dynamic sampling may ask a prompt again within a step.
        trainer = module.trainer
        turn = trainer.fit_loop.epoch_loop.total_batch_idx if trainer.training else 0
        seeds = [
            [derive_seed(run_seed(), purpose, turn, row, sample) for sample in range(sampling.num_samples)]
            for row in batch.row_index.tolist()
        ]
        return make_requests(batch.prompts(), seeds, sampling)

    def _rollout(
        self,
        module: PostTrainingModule,
        requests: Sequence[Request],
        completions: Sequence[Completion],
        sampling: SamplingConfig,
    ) -> Rollout:
        return to_rollout(
            requests,
            completions,
            num_samples=sampling.num_samples,
            pad_token_id=module.tokenizer.pad_token_id,
            device=module.device,
        )


def sends_adapters(module: PostTrainingModule) -> bool:
    """Tell whether the policy's adapters go to the engine by themselves."""
    lora = module.policy_config.lora
    return lora is not None and not lora.merge_for_rollout
