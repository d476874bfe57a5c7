"""What goes wrong is said once, or ends the run."""

from __future__ import annotations

import math
import warnings

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback

from tests.runs import make_chats, make_sft, make_trainer
from verl_lightning.callbacks import HealthCheck, HealthMonitor

QUIET = dict.fromkeys(("finite", "entropy", "kl", "reward", "mismatch"), HealthCheck(level="off"))


class Says(Callback):
    """Puts other values into the metrics of each step, before the monitor reads them."""

    def __init__(self, **columns):
        self.columns = columns

    def on_train_batch_end(self, trainer, *_):
        for name, values in self.columns.items():
            pl_name = name.replace("__", "/")
            if trainer.global_step <= len(values):
                trainer.lightning_module.log(pl_name, values[trainer.global_step - 1])


@pytest.fixture
def run(tmp_path, tiny_folder, chat_file):
    def fit(monitor, **columns):
        trainer = make_trainer(tmp_path, Says(**columns), monitor, max_steps=4, log_every_n_steps=1)
        trainer.fit(make_sft(tiny_folder), datamodule=make_chats(chat_file))
        return trainer.global_step

    return fit


CASES = [  # of which steps 2 and 3 or step 2 alone are wrong
    ("entropy", {"actor__entropy": [0.5, 0.05, 0.04, 0.03]}, 0.1, "`actor/entropy` is 0.05 nats, below 0.1"),
    ("kl", {"actor__ref_kl": [0.5, 2.0, 3.0, 3.0]}, 1.0, "`actor/ref_kl` is 2 nats, above 1"),
    ("kl", {"actor__ppo_kl": [0.5, 2.0, 3.0, 3.0]}, 1.0, "`actor/ppo_kl` is 2 nats, above 1"),
    ("mismatch", {"rollout_corr__abs_log_prob_gap": [0.0, 2.0, 0.0, 0.0]}, 1.0, "abs_log_prob_gap` is 2 nats"),
    ("finite", {"actor__pg_loss": [0.0, math.nan, 0.0, 0.0]}, 0.0, "`actor/pg_loss` is nan"),
    ("finite", {"actor__grad_norm": [0.0, math.inf, 0.0, 0.0]}, 0.0, "`actor/grad_norm` is inf"),
    ("finite", {"actor__skipped_updates": [0, 2.0, 0, 0]}, 0.0, r"2 updates had .* \(`actor/skipped_updates`\)"),
    ("reward", {"critic__score__min": [0, 1, 0, 0], "critic__score__max": [2, 1, 2, 2]}, 0.0, "within 1 and 1"),
]


@pytest.mark.parametrize(("name", "columns", "limit", "message"), CASES)
def test_each_check_stops_at_the_step_that_is_wrong(run, name, columns, limit, message):
    monitor = HealthMonitor(**QUIET | {name: HealthCheck(level="stop", limit=limit)})

    with pytest.warns(UserWarning, match=f"Step 2: .*{message}.*Training stops here .*`{name}.level: stop`"):
        assert run(monitor, **columns) == 2


@pytest.mark.parametrize(("name", "columns", "limit", "message"), CASES)
def test_each_check_can_warn_only(run, name, columns, limit, message):
    monitor = HealthMonitor(**QUIET | {name: HealthCheck(level="warn", limit=limit)})

    with pytest.warns(UserWarning, match=message) as caught:
        assert run(monitor, **columns) == 4
    [warning] = [warning for warning in caught if "Step " in str(warning.message)]
    assert str(warning.message).startswith("Step 2: ")
    assert "Training stops" not in str(warning.message)


def test_what_is_off_is_not_looked_at(run):
    columns = {name: values for _, case, _, _ in CASES for name, values in case.items()}

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Step ")
        assert run(HealthMonitor(**QUIET), **columns) == 4


def test_patience_counts_steps_in_a_row(run):
    """Wrong in steps 1, 3 and 4."""
    monitor = HealthMonitor(**QUIET | {"kl": HealthCheck(level="stop", limit=1.0, patience=2)})

    with pytest.warns(UserWarning, match="Step 4: .* for 2 logged steps"):
        run(monitor, actor__ref_kl=[2.0, 0.0, 2.0, 2.0])


def test_constant_rewards_stop_the_run(run):
    """Constant within each step, but not from step 1 to 2."""
    monitor = HealthMonitor(**QUIET | {"reward": HealthCheck(level="stop", patience=2)})
    scores = [0.0, 1.0, 1.0, 1.0]

    with pytest.warns(UserWarning, match="Step 3: all rewards lie within 1 and 1 .* for 2 logged steps"):
        run(monitor, critic__score__min=scores, critic__score__max=scores)


def test_rewards_that_differ_are_healthy(run):
    monitor = HealthMonitor(**QUIET | {"reward": HealthCheck(level="stop")})

    assert run(monitor, critic__score__min=[0.0] * 4, critic__score__max=[1.0] * 4) == 4


def test_a_check_without_its_metric_is_refused(run):
    monitor = HealthMonitor(**QUIET | {"entropy": HealthCheck(level="stop")})

    with pytest.raises(MisconfigurationException, match="does not log `actor/entropy`. Set `entropy.level` to off"):
        run(monitor)


def test_counts_survive_a_resume():
    first, second = HealthMonitor(), HealthMonitor()
    first._bad_steps["kl"] = 2
    first._lowest = 0.5

    second.load_state_dict(first.state_dict())

    assert second.state_dict() == first.state_dict()


@pytest.mark.parametrize("options", [{"level": "loud"}, {"patience": 0}])
def test_settings_without_sense_are_refused(options):
    with pytest.raises(ValueError, match=f"`{next(iter(options))}` must be"):
        HealthCheck(**options)
