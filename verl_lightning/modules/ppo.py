"""PPO and its family as one LightningModule: one ``training_step`` is one iteration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from typing_extensions import override

from verl_lightning.functional.kl import adaptive_kl_coef
from verl_lightning.functional.rewards import overlong_penalty
from verl_lightning.metrics import MetricTable, mean, total
from verl_lightning.models.config import ModelConfig
from verl_lightning.models.scorer import Head, TokenScorer
from verl_lightning.modules.advantages import AdvantageEstimator
from verl_lightning.modules.base import PostTrainingModule
from verl_lightning.modules.batch_plan import BatchPlan
from verl_lightning.modules.experience import ExperienceMaker
from verl_lightning.modules.corrections import RolloutCorrection
from verl_lightning.modules.judge import Judge, Verdict
from verl_lightning.modules.micro_batches import split_micro_batches
from verl_lightning.modules.objectives import Normalizer, PolicyObjective, SharedObjective, ValueObjective
from verl_lightning.modules.policy_losses import PolicyLoss, PPOClip
from verl_lightning.modules.ppo_config import (
    CriticConfig,
    DynamicSamplingConfig,
    KLConfig,
    ShapingConfig,
    UpdateConfig,
    ValidationConfig,
)
from verl_lightning.modules.scored_rollout import ScoredRollout, join_rollouts
from verl_lightning.modules.validation import ScoredResponse, scored_responses, validation_metrics
from verl_lightning.rewards.pool import RewardConfig
from verl_lightning.rollout.base import SamplingConfig
from verl_lightning.types import Experience, Rollout

Update = Callable[[bool], None]
"""One optimizer step; its argument says whether it moves ``trainer.global_step``."""


@runtime_checkable
class RolloutSource(Protocol):
    """What this module must know of the callback that adds ``batch["rollout"]``."""

    sampling: SamplingConfig
    val_sampling: SamplingConfig


class PPOModule(PostTrainingModule):
    """Proximal policy optimization of a language model, with a critic (PPO) or with groups (GRPO and its family).

    Args:
        actor: The policy.
        reward: What judges responses.
        advantage: How rewards become advantages, such as ``GAE`` or ``GRPO``.
        policy_loss: Loss of each response token.
        critic: The value model; for estimators that need one, null otherwise.
        kl: Penalty for leaving a frozen reference; null needs no reference.
        corrections: For the difference between the engine's policy and the trainer's, such as
            ``TruncatedImportanceSampling``; applied side by side.
        shaping: What long responses cost.
        dynamic_sampling: Train on groups with signal only; null trains on all.
        update: How responses become optimizer steps.
        validation: What is measured on validation prompts.

    Raises:
        ValueError: If the parts don't fit one another.
    """

    def __init__(
        self,
        actor: ModelConfig,
        reward: RewardConfig,
        advantage: AdvantageEstimator,
        policy_loss: PolicyLoss | None = None,
        critic: CriticConfig | None = None,
        kl: KLConfig | None = None,
        corrections: list[RolloutCorrection] | None = None,
        shaping: ShapingConfig = ShapingConfig(),
        dynamic_sampling: DynamicSamplingConfig | None = None,
        update: UpdateConfig = UpdateConfig(),
        validation: ValidationConfig = ValidationConfig(),
    ) -> None:
        super().__init__(actor)
        check_parts(advantage, critic, update)
        check_options(advantage, corrections, dynamic_sampling, update)
        self.automatic_optimization = False
        self.reward_config = reward
        self.advantage = advantage
        self.policy_loss = policy_loss or PPOClip()
        self.critic_config = critic
        self.kl = kl
        self.kl_coef = kl.coef if kl else 0.0
        self.corrections = corrections or []
        self.shaping = shaping
        self.dynamic_sampling = dynamic_sampling
        self._gathered: list[ScoredRollout] = []  # groups with signal that still wait for enough others
        self.update = update
        self.validation = validation
        self.actor: TokenScorer | None = None
        self.critic: TokenScorer | None = None
        self.plan: BatchPlan | None = None
        self._reference: tuple[TokenScorer, ...] = ()  # a tuple hides it from state dicts and optimizers
        self._judge: Judge | None = None
        self._scored: list[ScoredResponse] = []

    @property
    @override
    def policy(self) -> TokenScorer:
        assert self.actor is not None
        return self.actor

    @property
    def needs_greedy_rollout(self) -> bool:
        """Whether the advantages compare with a greedy response to each prompt."""
        return self.advantage.needs_greedy

    @override
    def check_callback(self, callback: Callback) -> None:
        super().check_callback(callback)
        if isinstance(callback, GradientAccumulationScheduler):
            raise MisconfigurationException(
                "`GradientAccumulationScheduler` has no effect on PPO, which cuts its batches itself."
                " Set `update.mini_batch_size` (prompts of one optimizer step) and `update.micro_batch_size`."
            )
        if isinstance(callback, ModelCheckpoint) and callback._train_time_interval is not None:
            raise MisconfigurationException(
                "`ModelCheckpoint(train_time_interval=...)` never saves under manual optimization."
                " Use `every_n_train_steps`, which counts PPO iterations."
            )

    @override
    def configure_callbacks(self) -> list[Callback]:
        if self.trainer.gradient_clip_val:
            raise MisconfigurationException(
                f"`trainer.gradient_clip_val` ({self.trainer.gradient_clip_val}) does not reach PPO's models."
                " Set `actor.optim.max_grad_norm` and `critic.model.optim.max_grad_norm`."
            )
        if self.trainer.accumulate_grad_batches != 1:
            raise MisconfigurationException(
                f"`trainer.accumulate_grad_batches` ({self.trainer.accumulate_grad_batches}) does not apply to PPO,"
                " which cuts its batches itself. Set `update.mini_batch_size` and `update.micro_batch_size`."
            )
        return list(super().configure_callbacks())

    @override
    def setup(self, stage: str) -> None:
        super().setup(stage)
        source = self._rollout_source()
        if stage == "fit":
            self._check_sampling(source.sampling)
        if (largest := max(self.validation.pass_k, default=1)) > source.val_sampling.num_samples:
            raise ValueError(
                f"`validation.pass_k` asks for pass@{largest}, but `rollout.val_sampling.num_samples` is"
                f" {source.val_sampling.num_samples}. Sample at least {largest} responses, or ask for a smaller k."
            )
        self._judge = Judge(self.reward_config, self.tokenizer)
        self._judge.start()

    @override
    def configure_model(self) -> None:
        if self.actor is not None:
            return
        shares_trunk = self.critic_config is not None and self.critic_config.model is None
        head: Head = "policy_and_value" if shares_trunk else "policy"
        make = self.contract.make_model
        self.actor = make(self.policy_config, head, trainable=True)
        self.actor.scores_squares = self.advantage.needs_sum_squared_probs
        if self.critic_config is not None and self.critic_config.model is not None:
            self.critic = make(self.critic_config.model, "value", trainable=True)
        if self.kl is not None and self.policy_config.lora is None:
            self._reference = (make(self.policy_config, "policy", trainable=False),)

    @override
    def configure_optimizers(self) -> Any:
        configs = [self.optimizer_config("actor", self.policy, self.policy_config)]
        if self.critic is not None and self.critic_config is not None and self.critic_config.model is not None:
            configs.append(self.optimizer_config("critic", self.critic, self.critic_config.model))
        return configs

    @override
    def on_train_start(self) -> None:
        loader: Any = self.trainer.train_dataloader
        ranks = self.contract.data_parallel_size
        sampling = self._rollout_source().sampling
        max_prompt = getattr(getattr(self.trainer, "datamodule", None), "max_prompt_length", None)
        self.plan = BatchPlan(
            prompts_per_step=loader.batch_size * ranks,
            num_samples=sampling.num_samples,
            data_parallel_size=ranks,
            update=self.update,
            max_tokens=None if max_prompt is None else max_prompt + sampling.max_new_tokens,
        )
        self._check_length(self.plan.max_tokens)
        if self.trainer.is_global_zero:
            self.print_table(self.plan.table())

    @override
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Tensor]:
        table = MetricTable()
        rollout = self._rollout(batch, "rollout")
        with self.phase("reward"):
            verdict = self.judge.score(rollout, batch["rows"])
            greedy = self._greedy_verdict(batch)
        table.add(verdict.metrics())
        table.add({} if greedy is None else greedy.failures())
        scored = self._with_signal(ScoredRollout(rollout=rollout, verdict=verdict))
        if scored is None:
            return {"loss": torch.tensor(0.0)}
        scored = self._shaped(scored)
        experience, metrics = self._experience_maker().make(scored.rollout, scored.verdict, greedy, self.kl_coef)
        table.add(metrics)
        self._learn(experience, table)
        return self._finish_iteration(table)

    @override
    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        return self._evaluate(batch, dataloader_idx)

    @override
    def on_validation_epoch_start(self) -> None:
        self._scored = []

    @override
    def on_validation_epoch_end(self) -> None:
        self._log_evaluation("val")

    @override
    def test_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        return self._evaluate(batch, dataloader_idx)

    @override
    def on_test_epoch_start(self) -> None:
        self._scored = []

    @override
    def on_test_epoch_end(self) -> None:
        self._log_evaluation("test")

    @override
    def teardown(self, stage: str) -> None:
        if self._judge is not None:
            self._judge.stop()
            self._judge = None

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["kl_coef"] = self.kl_coef

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if self.kl is not None and self.kl.target is not None:  # a fixed weight stays the configured one
            self.kl_coef = checkpoint["kl_coef"]

    @property
    def judge(self) -> Judge:
        """What scores responses, from ``setup`` to ``teardown``."""
        assert self._judge is not None
        return self._judge

    def _rollout_source(self) -> RolloutSource:
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, RolloutSource):
                return callback
        raise MisconfigurationException(
            "`PPOModule` learns from sampled responses, but no callback samples any."
            " Add one: `rollout: HFRollout` in the config, or `Trainer(callbacks=[HFRollout(...)])`."
        )

    def _check_sampling(self, sampling: SamplingConfig) -> None:
        if sampling.temperature == 0:
            raise ValueError("`rollout.sampling.temperature` is 0: greedy responses teach nothing. Set it above 0.")
        if self.corrections and sampling.is_truncated:
            raise ValueError(
                "`corrections` weigh tokens by their probability over the whole vocabulary, but `rollout.sampling.top_p`"
                " or `top_k` samples from a part of it. Set `top_p: 1.0` and `top_k: 0`, or take `corrections` out."
            )
        if self.shaping.overlong_buffer >= sampling.max_new_tokens:
            raise ValueError(
                f"`shaping.overlong_buffer` ({self.shaping.overlong_buffer}) must be below"
                f" `rollout.sampling.max_new_tokens` ({sampling.max_new_tokens})."
            )
        if self.advantage.needs_groups and sampling.num_samples < 2:
            raise ValueError(
                f"`{type(self.advantage).__name__}` compares responses to the same prompt and needs at least 2, but"
                f" `rollout.sampling.num_samples` is {sampling.num_samples}."
            )

    def _check_length(self, max_tokens: int | None) -> None:
        limit = getattr(self.policy.backbone.config, "max_position_embeddings", None)
        if limit is not None and max_tokens is not None and max_tokens > limit:
            raise ValueError(
                f"`data.max_prompt_length` and `rollout.sampling.max_new_tokens` add up to {max_tokens} tokens, but the"
                f" model reads at most {limit}. Shorten one of them."
            )

    def _rollout(self, batch: dict[str, Any], key: str) -> Rollout:
        if key not in batch:
            raise RuntimeError(
                f'the batch holds no `{key}`: the rollout callback must add `batch["{key}"]` before each step.'
            )
        rollout: Rollout = batch[key]
        return rollout

    def _greedy_verdict(self, batch: dict[str, Any]) -> Verdict | None:
        if not self.needs_greedy_rollout:
            return None
        return self.judge.score(self._rollout(batch, "greedy_rollout"), batch["rows"])

    def _with_signal(self, scored: ScoredRollout) -> ScoredRollout | None:
        """The rollout of the iteration; None while groups with signal are still being gathered."""
        if self.dynamic_sampling is None:
            return scored
        assert self.plan is not None
        needed = self.plan.prompts_per_step // self.plan.data_parallel_size
        self._gathered.append(scored.groups_with_signal())
        found = sum(part.num_groups for part in self._gathered)
        if min(self.contract.gather_over_data_parallel(found)) >= needed:
            joined = join_rollouts(self._gathered, pad_token_id=self.tokenizer.pad_token_id)
            self._gathered = []
            return joined.first_groups(needed)
        if len(self._gathered) >= self.dynamic_sampling.max_batches:
            raise RuntimeError(
                f"`dynamic_sampling` found {found} of {needed} prompts with both good and bad responses in"
                f" {len(self._gathered)} batches (`dynamic_sampling.max_batches`): the task is too easy or too hard."
                " Choose other prompts, sample more responses to each, or allow more batches."
            )
        return None

    def _shaped(self, scored: ScoredRollout) -> ScoredRollout:
        """The rollout with what its length costs."""
        if not self.shaping.overlong_buffer:
            return scored
        penalty = overlong_penalty(
            scored.rollout.response_mask.sum(-1),
            max_length=self._rollout_source().sampling.max_new_tokens,
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
            micro_batch_size=self.update.micro_batch_size,
            corrections=self.corrections,
            old_log_probs=self.update.old_log_probs,
            mask_truncated=self.shaping.mask_truncated,
            phase=self.phase,
        )

    def _learn(self, experience: Experience, table: MetricTable) -> None:
        """All optimizer steps of the iteration; the last one is counted."""
        mini_batches = list(self._mini_batches(experience))
        updates = [*self._critic_updates(mini_batches, table), *self._actor_updates(mini_batches, table)]
        for index, update in enumerate(updates):
            update(index + 1 == len(updates))

    def _mini_batches(self, experience: Experience) -> Iterator[tuple[Experience, Normalizer]]:
        """This rank's share of each mini-batch: the same prompts together for any number of ranks."""
        assert self.plan is not None
        size = self.plan.mini_batch_sequences_per_rank
        parts = [experience.select(slice(start, start + size)) for start in range(0, len(experience), size)]
        masks = [part.response_mask for part in parts]
        counts = torch.stack([torch.stack([mask.sum(), mask.any(-1).sum()]) for mask in masks])
        totals = self.contract.sum_over_data_parallel(counts)
        for part, (num_tokens, num_sequences) in zip(parts, totals, strict=True):
            yield (
                part,
                Normalizer(
                    aggregation=self.update.aggregation,
                    num_tokens=num_tokens,
                    num_sequences=num_sequences,
                    max_response_length=self._rollout_source().sampling.max_new_tokens,
                ),
            )

    def _actor_updates(self, mini_batches: list[tuple[Experience, Normalizer]], table: MetricTable) -> Iterator[Update]:
        if self._warms_up_critic:
            return
        for epoch in range(self.update.epochs):
            for index, (part, normalizer) in enumerate(mini_batches):
                objective = self._policy_objective(normalizer, is_first=epoch == index == 0)
                yield partial(self._step, "actor", part, objective, table)

    def _critic_updates(
        self, mini_batches: list[tuple[Experience, Normalizer]], table: MetricTable
    ) -> Iterator[Update]:
        if self.critic is None or self.critic_config is None:
            return
        for _ in range(self.critic_config.epochs):
            for part, normalizer in mini_batches:
                objective = ValueObjective(normalizer=normalizer, clip=self.critic_config.value_clip)
                yield partial(self._step, "critic", part, objective, table)

    @property
    def _warms_up_critic(self) -> bool:
        return self.critic_config is not None and self.trainer.global_step < self.critic_config.warmup_steps

    def _policy_objective(self, normalizer: Normalizer, *, is_first: bool) -> PolicyObjective | SharedObjective:
        policy = PolicyObjective(
            policy_loss=self.policy_loss,
            normalizer=normalizer,
            kl=self.kl if self.kl is not None and self.kl.place == "loss" else None,
            kl_coef=self.kl_coef,
            entropy_coef=self.update.entropy_coef,
            is_on_policy=is_first,
        )
        if self.critic_config is None or self.critic is not None:
            return policy
        value = ValueObjective(normalizer=normalizer, clip=self.critic_config.value_clip)
        return SharedObjective(policy=policy, value=value, coef=self.critic_config.shared_coef)

    def _step(self, role: str, part: Experience, objective: Any, table: MetricTable, count: bool) -> None:
        """One optimizer step of one role on its mini-batch."""
        model = self.policy if role == "actor" else self.critic
        config = self.policy_config if role == "actor" else self.critic_config.model  # type: ignore[union-attr]
        assert model is not None
        assert config is not None
        with self.phase(f"update_{role}"):
            micro_batches = split_micro_batches(part, self.update.micro_batch_size)
            with_entropy = role == "actor" and self.update.entropy_coef != 0
            for metrics in self.contract.forward_backward(model, micro_batches, objective, with_entropy=with_entropy):
                table.add(metrics)
            norm = self.contract.clip_and_step(self._optimizer(role), config.optim.max_grad_norm, count=count)
        is_finite = norm.isfinite()
        table.add(
            {
                f"{role}/grad_norm": mean(norm.nan_to_num(posinf=0.0), is_finite),
                f"{role}/skipped_updates": total(~is_finite / self.contract.data_parallel_size),
                "train/empty_batches": total((~part.response_mask.any()) / self.contract.data_parallel_size),
            }
        )

    def _optimizer(self, role: str) -> LightningOptimizer:
        optimizers = self.optimizers()
        if not isinstance(optimizers, list):
            return optimizers
        return optimizers[0 if role == "actor" else 1]

    def _schedules(self) -> list[Any]:
        schedules = self.lr_schedulers()
        return schedules if isinstance(schedules, list) else [schedules]

    def _finish_iteration(self, table: MetricTable) -> dict[str, Tensor]:
        """Log what happened, then steer the KL weight and the learning rates."""
        assert self.plan is not None
        metrics = table.reduce(self.contract.gather_over_data_parallel) | self.take_timings()
        metrics |= {"actor/kl_coef": self.kl_coef, "training/epoch": float(self.trainer.current_epoch)}
        metrics["training/global_step"] = float(self.trainer.global_step)
        for role, optimizer in zip(("actor", "critic"), self.trainer.optimizers, strict=False):
            metrics[f"{role}/lr"] = optimizer.param_groups[0]["lr"]
        seconds, tokens = metrics["timing_s/step"], metrics["perf/total_num_tokens"]
        metrics["perf/time_per_step"] = seconds
        metrics["perf/throughput"] = tokens / seconds / self.contract.data_parallel_size
        if self.kl is not None and self.kl.target is not None and "actor/ref_kl" in metrics:
            self.kl_coef = adaptive_kl_coef(
                self.kl_coef,
                metrics["actor/ref_kl"],
                target=self.kl.target,
                num_samples=self.plan.sequences_per_step,
                horizon=self.kl.horizon,
            )
        for schedule in self._schedules():
            schedule.step()
        self.log_dict(metrics, batch_size=1)
        shown = {"reward": metrics.get("critic/score/mean", float("nan")), "tokens/s": metrics["perf/throughput"]}
        self.log_dict(shown, prog_bar=True, logger=False, batch_size=1)
        return {"loss": torch.tensor(metrics.get("actor/pg_loss", 0.0))}

    def _evaluate(self, batch: dict[str, Any], loader: int) -> dict[str, Any]:
        rollout = self._rollout(batch, "rollout")
        with self.phase("reward"):
            verdict = self.judge.score(rollout, batch["rows"])
        self._scored += scored_responses(batch, verdict, loader)
        return {"verdict": verdict}

    def _log_evaluation(self, stage: str) -> None:
        responses = [r for rank in self.contract.gather_over_data_parallel(self._scored) for r in rank]
        if not responses:
            raise RuntimeError(
                f"no {stage} response could be scored: the loader was empty, or the reward function always failed."
            )
        num_samples = self._rollout_source().val_sampling.num_samples
        metrics = validation_metrics(responses, self.validation, num_samples=num_samples, stage=stage)
        metrics["timing_s/testing"] = self.take_timings()["timing_s/step"]
        self.log(f"{stage}/reward", metrics.pop(f"{stage}/reward"), prog_bar=True, batch_size=1)
        self.log_dict(metrics, batch_size=1)


def check_parts(advantage: AdvantageEstimator, critic: CriticConfig | None, update: UpdateConfig) -> None:
    """Refuse a critic that nothing uses, and the lack of one that is needed.

    Raises:
        ValueError: With what to change.
    """
    name = type(advantage).__name__
    if advantage.needs_critic and critic is None:
        raise ValueError(f"`{name}` needs values: set `critic`, or use an estimator without a critic, such as `GRPO`.")
    if critic is not None and not advantage.needs_critic:
        raise ValueError(f"`{name}` uses no critic: set `critic: null`, or use an estimator such as `GAE`.")
    if critic is not None and critic.model is None and critic.epochs != update.epochs:
        raise ValueError(
            f"a critic on the actor's trunk learns with it: `critic.epochs` ({critic.epochs}) must equal"
            f" `update.epochs` ({update.epochs})."
        )


def check_options(
    advantage: AdvantageEstimator,
    corrections: list[RolloutCorrection] | None,
    dynamic_sampling: DynamicSamplingConfig | None,
    update: UpdateConfig,
) -> None:
    """Refuse options that would have no effect.

    Raises:
        ValueError: With what to change.
    """
    name = type(advantage).__name__
    if update.old_log_probs == "engine" and corrections:
        raise ValueError(
            "`corrections` weigh the engine's log-probs against the trainer's, which `update.old_log_probs: engine` does"
            " not compute. Take one of the two out."
        )
    if update.old_log_probs == "engine" and advantage.needs_sum_squared_probs:
        raise ValueError(f"`{name}` reads the trainer's distributions: set `update.old_log_probs: trainer`.")
    if dynamic_sampling is not None and not advantage.needs_groups:
        raise ValueError(f"`dynamic_sampling` drops groups without signal, but `{name}` has no groups. Take it out.")
