"""Notices runs that have gone wrong: their metrics, checked in every step that is logged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from lightning.fabric.utilities import rank_zero_warn
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from verl_lightning.processes.exit_codes import Ending, ExitCode

Level = Literal["off", "warn", "stop"]

LOSSES = ("train/loss", "actor/pg_loss", "critic/vf_loss")
NORMS = ("train/grad_norm", "actor/grad_norm", "critic/grad_norm")
SKIPPED = ("train/skipped_updates", "actor/skipped_updates", "critic/skipped_updates")
ENTROPY = ("actor/entropy",)
KL = ("actor/ref_kl", "actor/ppo_kl")
SCORES = ("critic/score/min", "critic/score/max")
MISMATCH = ("rollout_corr/abs_log_prob_gap",)


@dataclass(frozen=True, kw_only=True)
class HealthCheck:
    """Condition under which a metric counts as wrong, and what is done then."""

    level: Level = "warn"
    """``off`` does not look, ``warn`` says it once until it is over, ``stop`` ends the run after the step."""

    limit: float = 0.0
    """Largest allowed value of the metric; for the entropy, the smallest; for rewards, the range taken as constant."""

    patience: int = 1
    """Logged steps in a row that must be wrong."""

    def __post_init__(self) -> None:
        if self.level not in ("off", "warn", "stop"):
            raise ValueError(f"`level` must be off, warn or stop, got {self.level!r}.")
        if self.patience < 1:
            raise ValueError(f"`patience` must be at least 1, got {self.patience}. Use `level: off` to look away.")


class Finding(NamedTuple):
    """Description of what is wrong, in words that follow the number of the step."""

    text: str
    advice: str


class HealthMonitor(Callback):
    """Warns, or stops the run, when training has gone wrong.

    Steps whose gradient is not finite change no weight in any case. Metrics are those of all ranks, so that all ranks
    decide alike. A run that is stopped ends as if it had reached its last step, but for its exit code: what callbacks
    save at the end, they save.

    Args:
        finite: A loss or gradient norm is not finite, or an update was skipped for that; ``limit`` is unused.
        entropy: ``actor/entropy`` falls below the limit, in nats: the policy always says the same.
        kl: ``actor/ref_kl`` or ``actor/ppo_kl`` rises above the limit, in nats.
        reward: Rewards stay within a range of the limit for ``patience`` steps: there is nothing to learn from.
        mismatch: ``rollout_corr/abs_log_prob_gap``, of the engine's log-probs and the trainer's, rises above the
            limit, in nats.

    Raises:
        MisconfigurationException: In the first logged step, if a check may stop the run but its metric is not logged.
    """

    def __init__(
        self,
        finite: HealthCheck = HealthCheck(level="stop", patience=3),
        entropy: HealthCheck = HealthCheck(limit=0.001, patience=3),
        kl: HealthCheck = HealthCheck(limit=10.0, patience=3),
        reward: HealthCheck = HealthCheck(patience=20),
        mismatch: HealthCheck = HealthCheck(limit=0.5, patience=3),
    ) -> None:
        self.checks = {"finite": finite, "entropy": entropy, "kl": kl, "reward": reward, "mismatch": mismatch}
        self._bad_steps = dict.fromkeys(self.checks, 0)
        self._lowest, self._highest = math.inf, -math.inf  # rewards while they are constant
        self._knows_metrics = False
        self._stopped_for = ""  # a check's name

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stopped_for = ""

    @property
    def ending(self) -> Ending | None:
        """Reason and exit code of a run that the monitor has stopped; None if it has stopped none."""
        says = f"stopped by HealthMonitor ({self._stopped_for})"
        return Ending(says, ExitCode.UNHEALTHY) if self._stopped_for else None

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        log_every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not log_every or trainer.global_step == 0 or trainer.global_step % log_every:
            return
        wanted = {*LOSSES, *NORMS, *SKIPPED, *ENTROPY, *KL, *SCORES, *MISMATCH}
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name in wanted}
        if metrics:
            self._require(metrics)
        for name, check in self.checks.items():
            if check.level != "off":
                self._judge(trainer, name, check, self._finding(name, metrics, check))

    def _require(self, metrics: Mapping[str, float]) -> None:
        """Refuses, in the first logged step, a check that may stop the run for a metric that is not logged."""
        if self._knows_metrics:
            return
        self._knows_metrics = True
        needs: dict[str, Sequence[str]] = {"entropy": ENTROPY, "kl": KL, "reward": SCORES, "mismatch": MISMATCH}
        for name, names in needs.items():
            if self.checks[name].level == "stop" and not any(metric in metrics for metric in names):
                raise MisconfigurationException(
                    f"`HealthMonitor` may stop the run for `{name}`, but this training does not log"
                    f" {' or '.join(f'`{metric}`' for metric in names)}. Set `{name}.level` to off."
                )

    def _judge(self, trainer: Trainer, name: str, check: HealthCheck, finding: Finding | None) -> None:
        self._bad_steps[name] = 0 if finding is None else self._bad_steps[name] + 1
        if finding is None or self._bad_steps[name] != check.patience:
            return
        steps = f" for {check.patience} logged steps" if check.patience > 1 else ""
        says = f"Step {trainer.global_step}: {finding.text}{steps}. {finding.advice}"
        if check.level == "stop":
            trainer.should_stop, self._stopped_for = True, name
            says += f" Training stops here (`HealthMonitor`, `{name}.level: stop`)."
        rank_zero_warn(says)

    def _finding(self, name: str, metrics: Mapping[str, float], check: HealthCheck) -> Finding | None:
        if name == "finite":
            return _not_finite(metrics)
        if name == "reward":
            return self._constant_reward(metrics, check.limit)
        if name == "entropy":
            entropy = metrics.get(ENTROPY[0], math.inf)
            if entropy >= check.limit:
                return None
            text = f"`actor/entropy` is {entropy:.4g} nats, below {check.limit:g}"
            return Finding(text, "Raise `model.update.entropy_coef` or the temperature, or lower the learning rate.")
        names = KL if name == "kl" else MISMATCH
        high = next((metric for metric in names if metrics.get(metric, -math.inf) > check.limit), None)
        if high is None:
            return None
        advice = {
            "kl": "Lower the learning rate, or raise `model.kl.coef`.",
            "mismatch": "Compare the engine's precision and settings with the trainer's, or add `model.corrections`.",
        }[name]
        return Finding(f"`{high}` is {metrics[high]:.4g} nats, above {check.limit:g}", advice)

    def _constant_reward(self, metrics: Mapping[str, float], limit: float) -> Finding | None:
        if not all(name in metrics for name in SCORES):
            return None
        lowest, highest = (metrics[name] for name in SCORES)
        self._lowest, self._highest = min(self._lowest, lowest), max(self._highest, highest)
        if self._highest - self._lowest > limit:  # a constant time may begin with this step
            self._lowest, self._highest = lowest, highest
            self._bad_steps["reward"] = 0
        if highest - lowest > limit:
            return None
        text = f"all rewards lie within {self._lowest:.4g} and {self._highest:.4g} (`critic/score/*`)"
        return Finding(text, "Check the reward function and the answers that it compares with.")

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"bad_steps": self._bad_steps, "lowest": self._lowest, "highest": self._highest}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._bad_steps = dict.fromkeys(self.checks, 0) | state_dict["bad_steps"]
        self._lowest, self._highest = state_dict["lowest"], state_dict["highest"]


def _not_finite(metrics: Mapping[str, float]) -> Finding | None:
    advice = "Lower the learning rate, or find the data that causes it."
    for name in (*LOSSES, *NORMS):
        if not math.isfinite(metrics.get(name, 0.0)):
            return Finding(f"`{name}` is {metrics[name]}", advice)
    for name in SKIPPED:
        if metrics.get(name, 0.0) > 0:
            return Finding(f"{metrics[name]:g} updates had a gradient that is not finite (`{name}`)", advice)
    return None
