"""PPO and its family as one LightningModule: one ``training_step`` is one iteration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from torch import Tensor
from typing_extensions import override

from verl_lightning.algorithms.advantages.base import AdvantageEstimator
from verl_lightning.algorithms.corrections.base import RolloutCorrection
from verl_lightning.algorithms.losses.base import PolicyLoss
from verl_lightning.faults import told_of
from verl_lightning.functional.kl import adaptive_kl_coef
from verl_lightning.functional.rewards import overlong_penalty
from verl_lightning.metrics import MetricTable, total
from verl_lightning.models.config import ModelConfig
from verl_lightning.models.scorer import TokenScorer
from verl_lightning.models.size import ModelRole
from verl_lightning.modules.batch_plan import BatchPlan
from verl_lightning.modules.distillation import Distillation, TaughtModule
from verl_lightning.modules.dynamic_sampling import DynamicSampling
from verl_lightning.modules.episodes import episode_metrics
from verl_lightning.modules.experience import ExperienceMaker
from verl_lightning.modules.given import as_advantage, as_corrections, as_model, as_policy_loss, as_reward
from verl_lightning.modules.judge import RewardResult, first_failure
from verl_lightning.modules.learner import Learner, Role
from verl_lightning.modules.micro_batches import BatchSplitter
from verl_lightning.modules.pass_size import planned_tokens
from verl_lightning.modules.ppo_checks import (
    RewardWatch,
    check_options,
    check_parts,
    check_ppo_callback,
    check_sampling,
    check_teacher,
    check_trainer,
)
from verl_lightning.modules.ppo_config import (
    PHASES,
    CriticConfig,
    DynamicSamplingConfig,
    KLConfig,
    ShapingConfig,
    UpdateConfig,
    ValidationConfig,
    ppo_roles,
)
from verl_lightning.modules.run_settings import SETTINGS_KEY
from verl_lightning.modules.sampling import SamplingModule, given_rollout
from verl_lightning.modules.scored_rollout import ScoredRollout
from verl_lightning.modules.teacher import NoAdvantages
from verl_lightning.modules.teacher_config import TeacherConfig
from verl_lightning.modules.timed_saves import TimedSaves
from verl_lightning.modules.trajectories import longest_lengths
from verl_lightning.options import typed
from verl_lightning.rewards.config import RewardConfig
from verl_lightning.telemetry.phases import METRICS
from verl_lightning.telemetry.speed import SQUARED_LENGTHS, Work, scoring_work, speed_metrics, training_work
from verl_lightning.telemetry.step_log import log_step
from verl_lightning.types import Experience, PromptBatch, Rollout


@runtime_checkable
class ExperienceListener(Protocol):
    """A callback that wants to see what an iteration learns from."""

    def on_experience(
        self,
        module: PPOModule,
        scored: ScoredRollout,
        experience: Experience,
        rows: Sequence[Mapping[str, Any]],
    ) -> None:
        """Called on each rank before the updates; rows are those of the prompts."""


class PPOModule(TaughtModule, SamplingModule):
    """Proximal policy optimization of a language model, with a critic (PPO) or with groups (GRPO and its family).

    Args:
        actor: The policy; a text is its ``path``.
        reward: Reward function that judges responses, and its limits; a text is its ``function``. In Python also the
            function itself, wherever it is defined; it goes to the reward workers as it is when the module is made.
            Null judges nothing: for a policy that learns from its ``teacher`` alone.
        advantage: Estimator that turns rewards into advantages, such as ``GAE`` or ``GRPO``; null learns from the
            ``teacher`` alone, and rewards are only measured.
        policy_loss: Loss of each response token.
        critic: The value model; for estimators that need one, null otherwise.
        kl: Penalty for leaving a frozen reference; null needs no reference.
        teacher: A model to whose distributions the policy is drawn at each response token (on-policy distillation).
        corrections: Corrections for the difference between the engine's policy and the trainer's, such as
            ``TruncatedImportanceSampling``; applied side by side.
        shaping: Cost of long responses.
        dynamic_sampling: Train on groups with signal only; null trains on all.
        update: Division of an iteration's responses into optimizer steps.
        validation: Metrics of validation prompts.
        lr: Short for ``actor.optim.lr``.

    Raises:
        ValueError: If the parts don't fit one another.
    """

    @typed("model")
    def __init__(
        self,
        actor: ModelConfig | str,
        reward: RewardConfig | str | Callable[..., Any] | None = None,
        advantage: AdvantageEstimator | str | None = None,
        policy_loss: PolicyLoss | str | None = None,
        critic: CriticConfig | None = None,
        kl: KLConfig | None = None,
        teacher: TeacherConfig | None = None,
        corrections: list[RolloutCorrection | str] | None = None,
        shaping: ShapingConfig = ShapingConfig(),
        dynamic_sampling: DynamicSamplingConfig | None = None,
        update: UpdateConfig = UpdateConfig(),
        validation: ValidationConfig = ValidationConfig(),
        *,
        lr: float | None = None,
    ) -> None:
        super().__init__(actor := as_model(actor, lr), as_reward(reward), validation)
        check_teacher(teacher, reward, advantage, dynamic_sampling)
        advantage = NoAdvantages() if advantage is None else as_advantage(advantage)
        chosen = as_corrections(corrections or [])
        check_parts(advantage, critic, update)
        check_options(advantage, chosen, dynamic_sampling, update, kl, shaping)
        self.automatic_optimization = False
        self.advantage = advantage
        self.policy_loss = as_policy_loss(policy_loss or "PPOClip")
        self.critic_config = critic
        self.kl = kl
        self.kl_coef = kl.coef if kl else 0.0
        self.distillation = Distillation(teacher, actor) if teacher else None
        self.corrections = chosen
        self.shaping = shaping
        self.dynamic_sampling = DynamicSampling(dynamic_sampling) if dynamic_sampling else None
        self.update = update
        self.actor: TokenScorer | None = None
        self.critic: TokenScorer | None = None
        self.plan: BatchPlan | None = None
        self._reward_watch = RewardWatch()
        self._reference: tuple[TokenScorer, ...] = ()  # a tuple hides it from state dicts and optimizers
        self.teacher: TokenScorer | None = None  # an older policy, which checkpoints hold

    @property
    @override
    def policy(self) -> TokenScorer:
        assert self.actor is not None
        return self.actor

    @property
    @override
    def needs_greedy_rollout(self) -> bool:
        """True if the advantages compare with a greedy response to each prompt."""
        return self.advantage.needs_greedy

    @property
    @override
    def roles(self) -> list[ModelRole]:
        others = self.reward_roles + (self.distillation.roles if self.distillation else [])
        return ppo_roles(self.policy_config, self.critic_config, self.kl) + others

    pass_key = "model.update.max_tokens_per_micro_batch"

    @property
    @override
    def tokens_per_pass(self) -> int | None:
        if (sequences := self.update.micro_batch_size) is not None:
            return None if self.max_tokens is None else sequences * self.max_tokens
        return self.update.max_tokens or self._planned_tokens

    @cached_property
    def _planned_tokens(self) -> int:
        """Tokens of a pass, where the memory plan chooses them."""
        return planned_tokens(self)

    @property
    def _sized_update(self) -> UpdateConfig:
        """The update's settings with the size of its passes."""
        if not self.update.sizes_by_plan:
            return self.update
        return replace(self.update, max_tokens_per_micro_batch=self._planned_tokens)

    @property
    @override
    def phases(self) -> tuple[str, ...]:
        used = {
            "old_log_prob": self.update.old_log_probs == "trainer",
            "ref": self.kl is not None,
            "teacher": self.distillation is not None,
            "values": self.critic_config is not None,
            "update_critic": self.critic_config is not None and self.critic_config.model is not None,
        }
        return tuple(name for name in PHASES if used.get(name, True))

    @cached_property
    @override
    def work(self) -> list[Work]:
        """Matrix products of the actor, the reference, the teacher and the critic."""
        reference = self._reference[0] if self._reference else self.policy
        work = [
            training_work("actor", "update_actor", self.policy).times(self.update.epochs),
            scoring_work("actor_infer", "old_log_prob", self.policy),
        ]
        if self.kl is not None:
            work.append(scoring_work("ref", "ref", reference))
        if self.distillation is not None:
            work += self.distillation.work(self.policy)
        if self.critic is not None and self.critic_config is not None:
            work.append(scoring_work("critic_infer", "values", self.critic))
            work.append(training_work("critic", "update_critic", self.critic).times(self.critic_config.epochs))
        return work

    @override
    def check_callback(self, callback: Callback) -> None:
        super().check_callback(callback)
        check_ppo_callback(callback)

    @override
    def configure_callbacks(self) -> list[Callback]:
        check_trainer(self.trainer, self)
        return [*super().configure_callbacks(), TimedSaves()]

    @override
    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit":
            check_sampling(self.rollout_source.sampling, self.advantage, self.corrections, self.shaping, self.update)

    @override
    def configure_model(self) -> None:
        if self.actor is not None:
            return
        if self.distillation is not None:
            self.distillation.check(self)
        models = {}
        self.make_reward_model()
        for role in self.roles:
            if role in self.reward_roles:
                continue
            with told_of(role.key):
                is_kept = role.trainable or role.is_kept
                models[role.name] = self.contract.make_model(role.config, role.head, trainable=is_kept)
                models[role.name].disable_dropout()
        self.actor, self.critic = models["actor"], models.get("critic")
        self._reference = tuple(models[name] for name in models.keys() & {"reference"})
        self.note_start()
        self.actor.scores_squares = self.advantage.needs_sum_squared_probs
        if self.update.router_replay is not None:
            self.actor.router_replay = self.contract.make_router_replay(self.actor)
        if self.distillation is not None:
            self.teacher = self.distillation.take(models, self.actor)

    @property
    @override
    def has_reference(self) -> bool:
        """True with a KL penalty; where the reference is the base of adapters, it is compared with these."""
        return bool(self._reference)

    @override
    def told_settings(self) -> dict[str, Any]:
        kl = {} if self.kl is None else {f"model.kl.{name}": value for name, value in asdict(self.kl).items()}
        return super().told_settings() | kl

    @override
    def configure_optimizers(self) -> Any:
        trained = (role for role in self.roles if role.trainable)
        return [self.optimizer_config(role) for role in trained]

    @override
    def on_train_start(self) -> None:
        loader: Any = self.trainer.train_dataloader
        if not isinstance(getattr(loader, "batch_size", None), int):
            raise MisconfigurationException(
                f"the training loader, a `{type(loader).__name__}`, has no `batch_size`, the prompts of a step on each"
                " rank. Use torch's `DataLoader(rows, batch_size=64, collate_fn=list)` or a `PromptDataModule`."
            )
        ranks = self.contract.data_parallel_size
        self.plan = BatchPlan(
            prompts_per_step=loader.batch_size * ranks,
            num_samples=self.rollout_source.sampling.num_samples,
            data_parallel_size=ranks,
            update=self._sized_update,
            max_tokens=self.max_tokens,
        )
        self.print_table(self.plan.table())

    @override
    def training_step(self, batch: PromptBatch, batch_idx: int) -> dict[str, Tensor]:
        table = MetricTable()
        rollout = given_rollout(batch.rollout, "rollout")
        with self.phase("reward"):
            reward_result, judged = self._reward_results(rollout, batch.rows)
            greedy = self._greedy_result(batch)
        for each in judged:
            table.add(each.scores() | each.failures())
        table.add(episode_metrics(rollout))
        table.add({} if greedy is None else greedy.failures())
        scored = self._shaped(ScoredRollout(rollout=rollout, reward_result=reward_result))
        experience, metrics = self._experience_maker().make(scored.rollout, scored.reward_result, greedy, self.kl_coef)
        lengths = experience.attention_mask.sum(-1).double()
        table.add(metrics | {SQUARED_LENGTHS: total(lengths.square().sum())})
        if self.distillation is not None:
            prompts = scored.rollout.prompt_index.tolist()
            asked = [batch.rows[prompts[row]] for row in experience.episode_index or range(len(prompts))]
            with self.phase("teacher"):
                experience = self.distillation.teach(self, self._splitter(), experience, asked)
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, ExperienceListener):
                callback.on_experience(self, scored, experience, batch.rows)
        self._learner().learn(experience, table)
        if self.policy.router_replay is not None:
            table.add(self.policy.router_replay.metrics(experience.experts))
        return self._finish_iteration(table, first_failure(judged))

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["kl_coef"] = self.kl_coef

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if self.kl is not None and self.kl.target is not None:  # a fixed weight stays the configured one
            saved = checkpoint.get(SETTINGS_KEY, {"model.kl.coef": self.kl.coef})  # an older version kept none
            if saved.get("model.kl.coef") == self.kl.coef:  # so does a new start of an adaptive one
                self.kl_coef = checkpoint["kl_coef"]

    def _reward_results(
        self, rollout: Rollout, rows: Sequence[dict[str, Any]]
    ) -> tuple[RewardResult, list[RewardResult]]:
        """Rewards of the responses, and of all that were judged for this iteration."""
        if self.dynamic_sampling is not None:
            return self.dynamic_sampling.take(rollout)
        result = self.judged(rollout, rows)
        return result, [result]

    def _greedy_result(self, batch: PromptBatch) -> RewardResult | None:
        if not self.needs_greedy_rollout:
            return None
        rollout = given_rollout(batch.greedy_rollout, "greedy_rollout")
        return self._shaped(
            ScoredRollout(rollout=rollout, reward_result=self.judged(rollout, batch.rows))
        ).reward_result

    def _shaped(self, scored: ScoredRollout) -> ScoredRollout:
        """Adds the penalty for long responses to their rewards."""
        if not self.shaping.overlong_buffer:
            return scored
        penalty = overlong_penalty(
            longest_lengths(scored.rollout),
            max_length=self.rollout_source.sampling.max_new_tokens,
            buffer_length=self.shaping.overlong_buffer,
            factor=self.shaping.overlong_penalty,
        )
        return scored.with_penalty(penalty)

    def _experience_maker(self) -> ExperienceMaker:
        return ExperienceMaker(
            contract=self.contract,
            actor=self.policy,
            critic=self.critic,
            reference=self._reference[0] if self._reference else None,
            advantage=self.advantage,
            kl=self.kl,
            splitter=self._splitter(),
            corrections=self.corrections,
            old_log_probs=self.update.old_log_probs,
            mask_truncated=self.shaping.mask_truncated,
            phase=self.phase,
            pad_token_id=self.tokenizer.pad_token_id,
        )

    def _splitter(self) -> BatchSplitter:
        return BatchSplitter(
            contract=self.contract,
            micro_batch_size=self.update.micro_batch_size,
            max_tokens=self._sized_update.max_tokens,
            grows=self.update.sizes_by_plan,
        )

    def _learner(self) -> Learner:
        assert self.plan is not None
        optimizers = self.optimizers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        trained = [role for role in self.roles if role.trainable]
        roles = {
            role.name: Role(getattr(self, role.name), optimizer, role.config.optim.max_grad_norm)
            for role, optimizer in zip(trained, optimizers, strict=True)
        }
        return Learner(
            contract=self.contract,
            splitter=self._splitter(),
            plan=self.plan,
            roles=roles,
            policy_loss=self.policy_loss,
            critic_config=self.critic_config,
            kl=self.kl if self.kl is not None and self.kl.place == "loss" else None,
            kl_coef=self.kl_coef,
            teacher=self.distillation.config if self.distillation else None,
            max_response_length=self.rollout_source.sampling.max_new_tokens,
            warms_up_critic=self.trainer.global_step < (self.critic_config.warmup_steps if self.critic_config else 0),
            phase=self.phase,
        )

    def _finish_iteration(self, table: MetricTable, first_failure: str | None) -> dict[str, Tensor]:
        """Logs the iteration's metrics, then steers the KL weight and the learning rates."""
        with self.phase(METRICS):
            metrics = table.reduce(self.contract.gather_over_data_parallel)
        self._reward_watch.check(metrics, self.trainer.global_step, first_failure)
        metrics |= self.take_timings()
        with self.phase(METRICS):  # of the next iteration
            self._log_iteration(metrics)
        return {"loss": torch.tensor(metrics.get("actor/pg_loss", 0.0))}

    def _log_iteration(self, metrics: dict[str, float]) -> None:
        assert self.plan is not None
        metrics |= {"actor/kl_coef": self.kl_coef, "training/epoch": float(self.trainer.current_epoch)}
        metrics["training/global_step"] = float(self.trainer.global_step)
        for role, optimizer in zip(("actor", "critic"), self.trainer.optimizers, strict=False):
            metrics[f"{role}/lr"] = optimizer.param_groups[0]["lr"]
        metrics = speed_metrics(
            metrics,
            ranks=self.contract.data_parallel_size,
            devices=self.trainer.world_size,
            device=self.device,
            work=self.work,
            peak_memory=self.clock.peak_memory(),
        )
        if self.kl is not None and self.kl.target is not None and "actor/ref_kl" in metrics:
            self.kl_coef = adaptive_kl_coef(
                self.kl_coef,
                metrics["actor/ref_kl"],
                target=self.kl.target,
                num_samples=self.plan.sequences_per_step,
                horizon=self.kl.horizon,
            )
        schedules: Any = self.lr_schedulers()
        for schedule in schedules if isinstance(schedules, list) else [schedules]:
            schedule.step()
        log_step(self, metrics)
        shown = {"reward": metrics.get("critic/score/mean", float("nan")), "tokens/s": metrics["perf/throughput"]}
        log_step(self, shown, prog_bar=True, logger=False)
