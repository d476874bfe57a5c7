"""Renamed things still work, and say once what to use."""

from __future__ import annotations

import importlib
import types
import warnings

import pytest
import yaml

from verl_lightning.cli.deprecation import Renamed, renamed_classes, renamed_text

MESSAGE = "`{}` is `New` since version 0.2, and will be gone in 0.4. Use `New`."


def renamed(old: str) -> Renamed:
    return Renamed(old=old, new="New", since="0.2", gone_in="0.4")


def test_the_message_is_shown_once():
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        renamed("option").warn()
        renamed("option").warn()
    assert [str(warning.message) for warning in shown] == [MESSAGE.format("option")]


def test_a_renamed_class_is_lent_under_its_old_name():
    class New:
        pass

    module = types.ModuleType("place")
    module.__getattr__ = renamed_classes("place", {renamed("Old"): New})
    with pytest.warns(FutureWarning, match="`Old` is `New`"):
        assert module.Old is New
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert module.Old is New
    with pytest.raises(AttributeError, match="module 'place' has no attribute 'Other'"):
        module.Other  # noqa: B018


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("modules.policy_losses.PPOClip", "algorithms.losses.PPOClip"),
        ("modules.advantages.GRPO", "algorithms.advantages.GRPO"),
        ("modules.corrections.IcePop", "algorithms.corrections.IcePop"),
    ],
)
def test_a_class_is_found_where_it_was(old, new):
    """Files that a run has saved name classes with their modules."""
    text = f"policy: {{class_path: verl_lightning.{old}}}"
    with pytest.warns(FutureWarning, match=f"`verl_lightning.{new.rpartition('.')[0]}`"):
        assert renamed_text(text) == f"policy: {{class_path: verl_lightning.{new}}}"
    module, _, name = f"verl_lightning.{new}".rpartition(".")
    assert hasattr(importlib.import_module(module), name)


def test_a_module_of_the_users_own_is_left_as_it_is():
    text = "class_path: mine.verl_lightning_modules.policy_losses.PPOClip"
    assert renamed_text(text) == text


def test_overlap_is_a_number_of_steps():
    with pytest.warns(FutureWarning, match=r"`rollout.overlap` is `rollout.max_staleness`"):
        text = renamed_text("rollout: {class_path: RayRollout, init_args: {overlap: true}}")

    assert yaml.safe_load(text)["rollout"]["init_args"] == {"max_staleness": 1}
