"""Samples responses just before the step that learns from them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from verl_lightning.callbacks.canary import Canary
from verl_lightning.callbacks.engine_callback import EngineCallback
from verl_lightning.callbacks.placement import Placement
from verl_lightning.callbacks.replacements import sum_over_ranks
from verl_lightning.callbacks.rollout_checks import (
    check_adapters,
    check_age,
    check_order,
    check_staleness,
)
from verl_lightning.callbacks.rollout_queue import InFlight
from verl_lightning.callbacks.rollout_requests import batch_requests, batch_rollout, join_parts, own_part
from verl_lightning.callbacks.rollout_supply import CHECKPOINT_KEY, GroupSupply
from verl_lightning.environments.config import Environments, EpisodesConfig, Given
from verl_lightning.environments.runner import EpisodeRequest, EpisodeRunner, episode_requests
from verl_lightning.faults import RunError
from verl_lightning.modules.base import PostTrainingModule
from verl_lightning.modules.sampling import SamplingModule
from verl_lightning.rollout.background import Background
from verl_lightning.rollout.base import Completion, Request, SamplingConfig
from verl_lightning.rollout.completions import Listener, answer, version_message, wait_for
from verl_lightning.rollout.turns import TurnsConfig
from verl_lightning.types import PromptBatch, Rollout

T = TypeVar("T")

JUDGED = ("train", "validate", "test")
"""Purposes of responses that the module judges next."""


class RolloutCallback(EngineCallback):
    """Sets ``batch.rollout`` of each prompt batch and touches nothing else.

    When advantages compare with greedy responses, it sets those too, as ``batch.greedy_rollout``.

    The policy's weights go to the engine whenever an optimizer step has changed them, and before and after each
    validation, so that every response comes from the newest policy.

    With ``max_staleness: k`` prompts are answered while the policy learns from those before, and no token comes from
    weights that are more than ``k`` optimizer steps old. Each prompt is learnt from once. A checkpoint holds the
    finished responses that wait for their step, since the weights that they were sampled with are gone; a resumed run
    asks for the others anew. With `model.dynamic_sampling`, others are asked for in the place of groups without signal.

    Ranks that share a model's work (tensor, pipeline, context or sequence parallelism) see the same prompts: each
    samples a part of the responses, and all learn from the whole.

    Args:
        sampling: Settings by which training responses are sampled.
        val_sampling: Settings by which validation and test responses are sampled.
        turns: Sample conversations with replies of plain text; `environment` can do more. Null samples single
            responses.
        max_staleness: Most optimizer steps by which a token may be older than the policy that learns from it.
        placement: Where engines run, such as `Beside` or `RayActors`; null is in the training processes.
        canary_limit: Largest gap of the canary, in nats per token; null follows the type in which both compute.
        environment: World in which the policy acts turn by turn; see `Environments`. Null samples single responses.
        episodes: Limits of the episodes in environments.
        in_flight: Treatment of responses on their way when new weights come; see `HFRollout`.

    Raises:
        ValueError: If an option is out of its range, or an environment is none.
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
        in_flight: InFlight = "finish",
    ) -> None:
        if turns is not None and environment is not None:
            raise ValueError("`rollout.turns` and `rollout.environment` both name an environment. Leave out `turns`.")
        check_age(max_staleness, in_flight)
        super().__init__(placement, canary_limit)
        self.environment = environment
        self.episodes = episodes
        self._environments = Environments(environment) if environment is not None else turns
        self._runner: EpisodeRunner | None = None
        self.sampling = sampling
        self.val_sampling = val_sampling
        self.turns = turns
        self.max_staleness = max_staleness
        self.in_flight = in_flight
        self._supply: GroupSupply | None = None  # where prompts are not answered batch by batch
        self._saved: dict[str, Any] = {}  # what a checkpoint holds of it, until training starts

    def image_obstacle(self) -> str | None:
        """Return why prompts can't have images, as the end of a sentence; None if they can."""
        if self._environments is not None:
            return "episodes in environments read text alone so far. Take `rollout.environment` or `rollout.turns` out."
        return None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(pl_module, SamplingModule):
            raise MisconfigurationException(
                f"`{type(self).__name__}` samples responses, for which `{type(pl_module).__name__}` has no use."
                " Train a `PPOModule`, or take the rollout callback out (`rollout: null`)."
            )
        are_taken = self.takes_adapters and (self.placement is None or self.placement.takes_adapters)
        check_adapters(pl_module, type(self).__name__, are_taken=are_taken, in_flight=self.in_flight)
        if self.max_staleness and stage == "fit":
            check_staleness(pl_module, self.max_staleness)
        self.place_engine(pl_module)
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

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._make_ready(trainer)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module = cast(SamplingModule, pl_module)
        if self.max_staleness or module.dynamic_sampling is not None or self._saved:
            check_order(trainer, self.max_staleness)
            keeps_order = self.in_flight == "finish"
            self._supply = GroupSupply(self, module, self.max_staleness, keeps_order=keeps_order)
            if self._saved:
                self._supply.restore(self._saved)
                self._weights_version = max(self._weights_version, *self._saved["steps"])
        self._saved = {}

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: PromptBatch, batch_idx: int
    ) -> None:
        module = cast(SamplingModule, pl_module)
        if self._supply is not None:
            self._finish_all(module)
            self._sync(module, batch)
            batch.rollout = self._supply.batch(batch)
        else:
            batch.rollout = self._sample(module, batch, self.sampling, "train")
        if module.needs_greedy_rollout:
            greedy = dataclasses.replace(self.sampling, num_samples=1, temperature=0.0)
            batch.greedy_rollout = self._sample(module, batch, greedy, "greedy")
        if self._canary is not None:
            module.log("rollout/canary_gap", self._canary.gap, batch_size=1)

    def _finish_all(self, module: PostTrainingModule) -> None:
        """Wait for all responses that are on their way, unless new weights may come under them. Collective."""
        if self._supply is not None and self.in_flight == "finish":
            self._settle(module)

    def _settle(self, module: PostTrainingModule) -> None:
        """Wait for all responses that are on their way. Collective."""
        if self._supply is not None and self._supply.background is not None:
            with module.phase("gen"):
                self.attempt(module, self._supply.queue.settle)

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._supply is not None:
            self._finish_all(cast(SamplingModule, pl_module))
            checkpoint[CHECKPOINT_KEY] = self._supply.state_dict()

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._saved = checkpoint.get(CHECKPOINT_KEY, {})

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

    on_predict_start = on_test_start

    @override
    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: PromptBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        module, stage = cast(SamplingModule, pl_module), trainer.state.stage
        purpose = "validate" if trainer.sanity_checking or stage is None else stage.value
        samplings = module.val_samplings if purpose == "validate" else [self.val_sampling]
        sampling = samplings[dataloader_idx if len(samplings) > 1 else 0]  # loaders of the user's own share one
        batch.rollout = self._sample(module, batch, sampling, purpose)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "")

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._supply is not None:
            if self.placement is not None:
                self.placement.abandon(self._engine)
            self._supply.stop()
            self._supply = None
        self.stop_engine()
        if self._runner is not None:
            self._runner.stop()
            self._runner = None

    @property
    @override
    def background(self) -> Background | None:
        return None if self._supply is None else self._supply.background

    @override
    def begin_version(self, module: PostTrainingModule) -> None:
        if self._supply is not None:
            self._supply.queue.begin_version(self._weights_version, module.trainer.global_step)

    @override
    def begin_anew(self) -> None:
        if self._supply is not None:
            self._supply.queue.has_new_engine = True

    def _is_idle(self, module: PostTrainingModule) -> bool:
        """Tell whether no rank waits for responses, behind which a canary would have to wait. Collective."""
        if self.in_flight == "finish" or self._supply is None:
            return True
        return sum_over_ranks(module, int(self._supply.queue.is_busy)) == 0

    @override
    def check_canary(self, module: PostTrainingModule, batch: PromptBatch, canary: Canary) -> None:
        engine = self._engine
        assert engine is not None
        if not self._is_idle(module):
            return
        with module.phase("canary"):
            requests = canary.requests(module.trainer, batch, self.sampling)
            rollout = self._answer(module, requests, requests[0].sampling)
            with self.alone(module):
                self.attempt(module, engine.drop_caches)  # others must find the cache as if there were no canary
            canary.check(module, rollout, self.engine_dtype(module), lambda: self._difference(module, engine))

    def _sample(self, module: SamplingModule, batch: PromptBatch, sampling: SamplingConfig, purpose: str) -> Rollout:
        """Sample responses to a batch from the newest policy; each is judged while others are sampled. Collective."""
        self._settle(module)
        self._sync(module, batch)
        trainer = module.trainer
        turn = trainer.fit_loop.epoch_loop.total_batch_idx if trainer.training else 0
        requests = self.requests_of(module, batch, sampling, purpose, turn)
        # Reward workers are this thread's, and episodes may end as several responses or none.
        is_judged_early = purpose in JUDGED and self._runner is None and self.background is None
        judge = functools.partial(module.begin_judging, batch, sampling.num_samples) if is_judged_early else None
        with module.phase("gen"):
            return self._answer(module, requests, sampling, judge)

    def _answer(
        self,
        module: PostTrainingModule,
        requests: Sequence[Request],
        sampling: SamplingConfig,
        begin: Callable[[], Listener | None] | None = None,
    ) -> Rollout:
        """Answer requests that other ranks may have too: each answers a part, and all get the whole. Collective."""
        part = own_part(requests, sampling, module.contract)
        completions = self.attempt(module, lambda: self.complete(module, part, begin and begin()))
        return batch_rollout(module, requests, join_parts(completions, module.contract), sampling)

    def complete(
        self, module: PostTrainingModule, requests: Sequence[Request], hear: Listener | None = None
    ) -> list[Completion]:
        """Ask the engine for episodes, or for single responses and tell of each as soon as it is finished.

        Raises:
            RunError: If the engine answers with other weights than those that it was sent last, or too many episodes
                fail.
        """
        version, work = self._weights_version, self.ask(requests, hear)
        completions = wait_for(work) if self.background is None else self.background.submit(work).result()
        sampled = [each for each in completions if each.is_own is None or any(each.is_own)]
        if others := {each.weights_version for each in sampled} - {version}:
            raise RunError(version_message(others.pop(), version))
        self.check_errors(completions)
        return completions

    def check_errors(self, completions: Sequence[Completion]) -> None:
        """Refuse answers among which too many episodes failed."""
        if self._runner is not None:
            self._runner.check_errors(completions)

    async def ask(self, requests: Sequence[Request], hear: Listener | None = None) -> list[Completion]:
        """Ask the engine for single responses or episodes."""
        assert self._engine is not None
        episodes = [request for request in requests if isinstance(request, EpisodeRequest)]
        if self._runner is not None and episodes:
            return await self._runner.play(self._engine.generate, episodes)
        return await answer(self._engine.generate, requests, hear)

    def requests_of(
        self, module: PostTrainingModule, batch: PromptBatch, sampling: SamplingConfig, purpose: str, turn: int
    ) -> Sequence[Request]:
        """Return what the engine is asked for a batch; see `batch_requests`."""
        requests = batch_requests(batch, sampling, purpose, turn)
        if self._runner is None:
            return requests
        return episode_requests(requests, batch.rows, num_samples=sampling.num_samples)
