"""The options of PPO that are neither a model, a reward, an estimator nor a loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from verl_lightning.functional.normalizer import Aggregation
from verl_lightning.models.config import ModelConfig, check_no_rollout
from verl_lightning.models.size import ModelRole
from verl_lightning.options import Options
from verl_lightning.telemetry.phases import METRICS, SAVE_CHECKPOINT

PHASES = (
    "update_weights",
    "gen",
    "reward",
    "old_log_prob",
    "ref",
    "values",
    "adv",
    "teacher",
    "update_critic",
    "update_actor",
    METRICS,
    SAVE_CHECKPOINT,
)
"""Phases of an iteration with all its parts, in their order."""

KLEstimator = Literal["k1", "k2", "k3", "abs", "k1_straight_through", "k3_straight_through", "abs_straight_through"]


@dataclass(frozen=True, kw_only=True)
class KLConfig(Options, key="model.kl"):
    """A penalty that keeps the policy near a frozen reference: its own first weights, or itself without adapters."""

    coef: float = 0.001
    """Weight of the penalty; the first weight when ``target`` is given."""

    place: Literal["loss", "reward"] = "loss"
    """Place of the penalty: added to the loss of each token, or taken from the reward of each token."""

    estimator: KLEstimator = "k3_straight_through"
    """Estimates the KL of each token, in nats. In the loss, k1, k3 and abs have wrong gradients; the straight-through
    forms show the named value and have the gradient of k2, which is right."""

    target: float | None = None
    """Steer ``coef`` so that the mean KL comes to this many nats; null keeps ``coef`` as it is."""

    horizon: int = 10000
    """Sequences over which the steering takes effect."""

    def __post_init__(self) -> None:
        if self.coef < 0:
            raise ValueError(f"`model.kl.coef` must not be negative, got {self.coef}.")
        if self.place == "reward" and self.estimator.endswith("straight_through"):
            raise ValueError(
                f"`model.kl.estimator: {self.estimator}` shapes a gradient, and a reward has none."
                " Use `k1`, `k2`, `k3` or `abs` with `model.kl.place: reward`."
            )
        if self.target is not None and self.target <= 0:
            raise ValueError(f"`model.kl.target` must be above 0 nats, got {self.target}.")
        if self.horizon < 1:
            raise ValueError(f"`model.kl.horizon` must be at least 1 sequence, got {self.horizon}.")
        if self.target is None and self.horizon != type(self).horizon:
            raise ValueError(
                "`model.kl.horizon` says how soon `model.kl.coef` is steered to `model.kl.target`: give a target, or"
                " leave it out."
            )


@dataclass(frozen=True, kw_only=True)
class UpdateConfig(Options, key="model.update"):
    """Division of an iteration's responses into optimizer steps."""

    mini_batch_size: int | None = None
    """Prompts of one optimizer step, over all ranks, each with all its responses; null takes all of an iteration's in
    one step."""

    micro_batch_size: int | None = None
    """Sequences of one forward and backward pass on one rank, in the place of ``max_tokens_per_micro_batch``; null
    counts tokens. Changes speed and memory, never the result."""

    max_tokens_per_micro_batch: int | Literal["auto"] | None = "auto"
    """Most tokens of one forward and backward pass on one rank: sequences are divided so that passes take about equal
    compute. ``auto``, or null, takes what the run's memory plan leaves, at most 32,768 on GPUs and 4,096 on CPUs, and
    at least the longest sequence. Changes speed and memory, never the result."""

    epochs: int = 1
    """Passes over the iteration's responses."""

    aggregation: Aggregation = "token-mean"
    """Aggregation of token losses into one number; always over the whole optimizer step on all ranks."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus, which is taken from the loss."""

    old_log_probs: Literal["trainer", "engine"] = "trainer"
    """Source of the log-probs that the ratios compare with: recomputed by the trainer before the first step, or the
    engine's, which saves a pass and leaves the difference between the two to the ratio's clipping."""

    router_replay: Literal["R2"] | None = None
    """``R2`` sends each token of a mixture of experts, in all updates of an iteration, to the experts that the pass for
    ``old_log_probs`` chose; null leaves the choice to the router. It keeps its gradient either way."""

    @property
    def sizes_by_plan(self) -> bool:
        """True if the memory plan says how large a pass is."""
        return self.micro_batch_size is None and not isinstance(self.max_tokens_per_micro_batch, int)

    @property
    def max_tokens(self) -> int | None:
        """Most tokens of a pass, where they are given."""
        return self.max_tokens_per_micro_batch if isinstance(self.max_tokens_per_micro_batch, int) else None

    def __post_init__(self) -> None:
        for name in ("mini_batch_size", "micro_batch_size", "epochs"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"`model.update.{name}` must be at least 1, got {value}.")
        if self.router_replay is not None and self.old_log_probs == "engine":
            raise ValueError(
                "`model.update.router_replay: R2` replays the experts of the trainer's pass over the responses, which"
                " `model.update.old_log_probs: engine` does not make. Take one of the two out."
            )
        budget, key = self.max_tokens_per_micro_batch, "`model.update.max_tokens_per_micro_batch`"
        if self.max_tokens is None:
            return
        if self.max_tokens < 1:
            raise ValueError(f"{key} must be at least 1, got {budget}.")
        if self.micro_batch_size is not None:
            raise ValueError(
                f"`model.update.micro_batch_size` ({self.micro_batch_size}) and {key} ({budget}) both say how large a"
                " micro-batch is. Drop one of them."
            )


@dataclass(frozen=True, kw_only=True)
class CriticConfig(Options, key="model.critic"):
    """The value model of estimators such as GAE."""

    model: ModelConfig | None = None
    """The critic's own model; null puts a value head on the actor's trunk, trained by the actor's optimizer."""

    value_clip: float = 0.5
    """Most that a value may move from its old one in an iteration, in units of reward; ``.inf`` does not clip."""

    epochs: int = 1
    """Passes over the iteration's responses. On a shared trunk it must equal ``update.epochs``."""

    warmup_steps: int = 0
    """First iterations that train the critic alone. Not with a shared trunk."""

    shared_coef: float = 0.1
    """Weight of the value loss beside the policy loss. With a shared trunk only."""

    def __post_init__(self) -> None:
        if self.value_clip <= 0:
            raise ValueError(f"`model.critic.value_clip` must be above 0, got {self.value_clip}.")
        if self.epochs < 1:
            raise ValueError(f"`model.critic.epochs` must be at least 1, got {self.epochs}.")
        if self.warmup_steps < 0:
            raise ValueError(f"`model.critic.warmup_steps` must not be negative, got {self.warmup_steps}.")
        if self.model is not None:
            check_no_rollout(self.model.lora, "model.critic.model.lora")
        if self.model is None and self.warmup_steps:
            raise ValueError(
                "`model.critic.warmup_steps` needs a critic of its own: set `model.critic.model`, or leave it at 0."
            )
        if self.model is not None and self.shared_coef != type(self).shared_coef:
            raise ValueError(
                "`model.critic.shared_coef` is for a shared trunk: leave it out, or set `model.critic.model: null`."
            )


def ppo_roles(actor: ModelConfig, critic: CriticConfig | None, kl: KLConfig | None) -> list[ModelRole]:
    """The models of a run: the actor, with a value head where the critic shares its trunk, and the others' own."""
    shares_trunk = critic is not None and critic.model is None
    roles = [ModelRole("actor", actor, "policy_and_value" if shares_trunk else "policy", trainable=True)]
    if critic is not None and critic.model is not None:
        roles.append(ModelRole("critic", critic.model, "value", trainable=True, key="model.critic.model"))
    if kl is not None and actor.lora is None:  # with adapters the reference is the actor without them
        roles.append(ModelRole("reference", actor, "policy", trainable=False))
    return roles


@dataclass(frozen=True, kw_only=True)
class ShapingConfig(Options, key="model.shaping"):
    """Cost of long responses, as in DAPO (Yu et al., 2025, https://arxiv.org/abs/2503.14476)."""

    overlong_buffer: int = 0
    """Tokens before ``rollout.sampling.max_new_tokens`` over which a penalty grows to its full size; 0 has none."""

    overlong_penalty: float = 1.0
    """The full penalty, in units of reward."""

    mask_truncated: bool = False
    """True to train on no token of responses that met the length limit. They still count in their group's mean."""

    def __post_init__(self) -> None:
        if self.overlong_buffer < 0:
            raise ValueError(f"`model.shaping.overlong_buffer` must not be negative, got {self.overlong_buffer}.")
        if self.overlong_penalty <= 0:
            raise ValueError(f"`model.shaping.overlong_penalty` must be above 0, got {self.overlong_penalty}.")
        if not self.overlong_buffer and self.overlong_penalty != type(self).overlong_penalty:
            raise ValueError(
                "`model.shaping.overlong_penalty` needs `model.shaping.overlong_buffer`, the tokens over which it"
                " grows."
            )


@dataclass(frozen=True, kw_only=True)
class DynamicSamplingConfig(Options, key="model.dynamic_sampling"):
    """Train on groups with signal only: those whose responses do not all have the same reward.

    Others are sampled in the place of those without, until there are enough for an iteration. Prompts with signal that
    are left over come next, with their responses if these are not too old by then (``rollout.max_staleness``).
    """

    max_batches: int = 10
    """Most prompts that one iteration samples, in batches; then the run stops: the task is too easy or too hard."""

    def __post_init__(self) -> None:
        if self.max_batches < 1:
            raise ValueError(f"`model.dynamic_sampling.max_batches` must be at least 1, got {self.max_batches}.")


@dataclass(frozen=True, kw_only=True)
class ValidationConfig(Options, key="model.validation"):
    """Metrics of validation prompts."""

    success_reward: float = 1.0
    """A response with at least this reward counts as right, for pass@k."""

    pass_k: list[int] = field(default_factory=lambda: [1])
    """The k of pass@k; none may exceed ``rollout.val_sampling.num_samples``."""

    def __post_init__(self) -> None:
        if min(self.pass_k, default=1) < 1:
            raise ValueError(f"`model.validation.pass_k` counts responses, at least 1, got {self.pass_k}.")
