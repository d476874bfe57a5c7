"""Checks before PPO's first step: refuse parts that don't fit one another, and options without effect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler

from verl_lightning.algorithms.advantages.base import AdvantageEstimator
from verl_lightning.algorithms.corrections.base import RolloutCorrection
from verl_lightning.faults import RunError
from verl_lightning.modules.judge import told_failure
from verl_lightning.modules.ppo_config import CriticConfig, DynamicSamplingConfig, KLConfig, ShapingConfig, UpdateConfig
from verl_lightning.modules.teacher_config import TeacherConfig
from verl_lightning.rollout.base import SamplingConfig


def check_parts(advantage: AdvantageEstimator, critic: CriticConfig | None, update: UpdateConfig) -> None:
    """Refuse a critic that nothing uses, and the lack of one that is needed.

    Raises:
        ValueError: With what to change.
    """
    name = type(advantage).__name__
    if advantage.needs_critic and critic is None:
        raise ValueError(
            f"`{name}` needs values: set `model.critic`, or use an estimator without a critic, such as `GRPO`."
        )
    if critic is not None and not advantage.needs_critic:
        raise ValueError(f"`{name}` uses no critic: set `model.critic: null`, or use an estimator such as `GAE`.")
    if critic is not None and critic.model is None and critic.epochs != update.epochs:
        raise ValueError(
            f"a critic on the actor's trunk learns with it: `model.critic.epochs` ({critic.epochs}) must equal"
            f" `model.update.epochs` ({update.epochs})."
        )


def check_options(
    advantage: AdvantageEstimator,
    corrections: Sequence[RolloutCorrection],
    dynamic_sampling: DynamicSamplingConfig | None,
    update: UpdateConfig,
    kl: KLConfig | None,
    shaping: ShapingConfig,
) -> None:
    """Refuse options that would have no effect.

    Raises:
        ValueError: With what to change.
    """
    name = type(advantage).__name__
    if update.old_log_probs == "engine" and corrections:
        raise ValueError(
            "`model.corrections` weigh the engine's log-probs against the trainer's, which"
            " `model.update.old_log_probs: engine` does not compute. Take one of the two out."
        )
    if update.old_log_probs == "engine" and advantage.needs_sum_squared_probs:
        raise ValueError(f"`{name}` reads the trainer's distributions: set `model.update.old_log_probs: trainer`.")
    if dynamic_sampling is not None and not advantage.needs_groups:
        raise ValueError(
            f"`model.dynamic_sampling` drops groups without signal, but `{name}` has no groups. Take it out."
        )
    if not advantage.reads_score and shaping.overlong_buffer:
        raise ValueError(
            f"`model.shaping.overlong_buffer` lowers the score, which `{name}` does not read. Take it out, and have the"
            " reward function return a penalty of its own beside `reward`."
        )
    if not advantage.reads_score and kl is not None and kl.place == "reward":
        raise ValueError(
            f"`model.kl.place: reward` lowers the score, which `{name}` does not read. Set `model.kl.place: loss`, or"
            " `model.kl: null`."
        )


def check_teacher(
    teacher: TeacherConfig | None,
    reward: Any,
    advantage: AdvantageEstimator | str | None,
    dynamic_sampling: DynamicSamplingConfig | None,
) -> None:
    """Refuse a policy that learns from nothing, and a teacher whose responses are dropped.

    Raises:
        ValueError: With what to change.
    """
    if teacher is None and advantage is None:
        raise ValueError(
            "`PPOModule` needs `model.advantage`, such as `GRPO`, or a `model.teacher`: there is nothing to learn from."
        )
    if reward is None and advantage is not None:
        raise ValueError(
            "`PPOModule` needs `model.reward`, which `model.advantage` turns into advantages. Set it, or"
            " `model.advantage: null` to learn from `model.teacher` alone."
        )
    if teacher is not None and dynamic_sampling is not None:
        raise ValueError(
            "`model.dynamic_sampling` drops groups without signal, from which `model.teacher` could still teach. Take"
            " one of them out."
        )


def check_sampling(
    sampling: SamplingConfig,
    advantage: AdvantageEstimator,
    corrections: Sequence[RolloutCorrection],
    shaping: ShapingConfig,
    update: UpdateConfig,
) -> None:
    """Refuse responses that could teach nothing, or that the options can't handle.

    Raises:
        ValueError: With what to change.
    """
    if sampling.temperature == 0:
        raise ValueError("`rollout.sampling.temperature` is 0: greedy responses teach nothing. Set it above 0.")
    if corrections and sampling.is_truncated:
        raise ValueError(
            "`model.corrections` weigh tokens by their probability over the whole vocabulary, but"
            " `rollout.sampling.top_p`, `top_k` or `guide` samples from a part of it. Set `top_p: 1.0` and `top_k: 0`"
            " and no `guide`, or take `model.corrections` out."
        )
    if update.old_log_probs == "engine" and sampling.is_truncated:
        raise ValueError(
            "`model.update.old_log_probs: engine` compares with the engine's probabilities, which are of a part of the"
            " vocabulary where `rollout.sampling.top_p`, `top_k` or `guide` is set. Set `top_p: 1.0` and `top_k: 0` and"
            " no `guide`, or `model.update.old_log_probs: trainer`."
        )
    if shaping.overlong_buffer >= sampling.max_new_tokens:
        raise ValueError(
            f"`model.shaping.overlong_buffer` ({shaping.overlong_buffer}) must be below"
            f" `rollout.sampling.max_new_tokens` ({sampling.max_new_tokens})."
        )
    if advantage.needs_groups and sampling.num_samples < 2:
        raise ValueError(
            f"`{type(advantage).__name__}` compares responses to the same prompt and needs at least 2, but"
            f" `rollout.sampling.num_samples` is {sampling.num_samples}."
        )


class RewardWatch:
    """Ends a run that learns nothing, as no response has a reward: at once if none had before, else at the third step.

    Failures of a part of each batch are limited by ``max_error_share``.
    """

    PATIENCE = 3
    """Steps in a row, since a service that judges may be away for a while."""

    def __init__(self) -> None:
        self._num_without = self.PATIENCE - 1  # a function that was never right is not waited for

    def check(self, metrics: Mapping[str, float], step: int, first_failure: str | None) -> None:
        """Takes the outcome of an iteration.

        Args:
            metrics: Metrics of the iteration, over all ranks.
            step: Number of the iteration.
            first_failure: Traceback of the first failure on this rank; None if there was none.

        Raises:
            RunError: If too many iterations in a row had no reward.
        """
        errors, late, none = (metrics.get(f"reward/{name}", 0.0) for name in ("errors", "timeouts", "none"))
        has_none = "critic/score/mean" not in metrics and errors + late + none > 0
        self._num_without = self._num_without + 1 if has_none else 0
        if self._num_without < self.PATIENCE:
            return
        hint = " None leaves a response out: does the function lack a `return`?" if none else ""
        raise RunError(
            f"no response of step {step} has a reward, so nothing is learnt: `model.reward` failed on {errors:.0f} of"
            f" them, ran out of time on {late:.0f} and returned None for {none:.0f}.{hint}{told_failure(first_failure)}"
        )


UNCALLED_HOOKS = {
    "optimizer_step": "`on_before_optimizer_step`, which is called before each optimizer step",
    "optimizer_zero_grad": "`on_before_optimizer_step`, which is called before each optimizer step",
    "on_before_zero_grad": "`on_before_optimizer_step`, which is called before each optimizer step",
    "lr_scheduler_step": "`model.actor.optim.schedule`, or a schedule in `configure_optimizers`",
    "configure_gradient_clipping": "`model.actor.optim.max_grad_norm`",
}
"""Hooks of a module that Lightning does not call under manual optimization, and what to use."""


def check_hooks(module: LightningModule) -> None:
    """Refuse hooks of a subclass that manual optimization would never call.

    Raises:
        MisconfigurationException: With what to use.
    """
    for name, instead in UNCALLED_HOOKS.items():
        if getattr(type(module), name) is not getattr(LightningModule, name):
            raise MisconfigurationException(
                f"`{type(module).__name__}.{name}` would never be called: PPO makes its optimizer steps itself, several"
                f" in a `training_step`. Use {instead}."
            )


def check_trainer(trainer: Trainer, module: LightningModule) -> None:
    """Refuse Trainer options and hooks of the module that manual optimization leaves without effect.

    Raises:
        MisconfigurationException: With our option for the purpose.
    """
    check_hooks(module)
    if trainer.gradient_clip_val:
        raise MisconfigurationException(
            f"`trainer.gradient_clip_val` ({trainer.gradient_clip_val}) does not reach PPO's models."
            " Set `model.actor.optim.max_grad_norm` and `model.critic.model.optim.max_grad_norm`."
        )
    if trainer.gradient_clip_algorithm is not None:
        raise MisconfigurationException(
            f"`trainer.gradient_clip_algorithm` ({trainer.gradient_clip_algorithm.value}) does not reach PPO's models,"
            " whose gradients are clipped by their global norm. Set `model.actor.optim.max_grad_norm`."
        )
    if trainer.accumulate_grad_batches != 1:
        raise MisconfigurationException(
            f"`trainer.accumulate_grad_batches` ({trainer.accumulate_grad_batches}) does not apply to PPO,"
            " which cuts its batches itself. Set `model.update.mini_batch_size` and `model.update.micro_batch_size`."
        )


def check_ppo_callback(callback: Callback) -> None:
    """Refuse callbacks that manual optimization leaves without effect.

    Raises:
        MisconfigurationException: With our option for the purpose.
    """
    if isinstance(callback, GradientAccumulationScheduler):
        raise MisconfigurationException(
            "`GradientAccumulationScheduler` has no effect on PPO, which cuts its batches itself."
            " Set `model.update.mini_batch_size` (prompts of one optimizer step) and `model.update.micro_batch_size`."
        )
    if isinstance(callback, BatchSizeFinder):
        raise MisconfigurationException(
            "`BatchSizeFinder` tries sizes of one `batch_size`, which PPO does not have. The memory plan that a run"
            " prints at its start says what fits: set `model.update.micro_batch_size` or"
            " `model.update.max_tokens_per_micro_batch`."
        )
