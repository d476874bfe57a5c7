"""Types of options that are given in Python: refused by their full key when an object is made."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from verl_lightning import (
    GRPO,
    ChatDataModule,
    HFRollout,
    ModelConfig,
    OptimConfig,
    PPOModule,
    PromptDataModule,
    RewardConfig,
    SamplingConfig,
    SFTModule,
    VLLMRollout,
)
from verl_lightning.options import fits, take


def reward(sample: Any) -> float:
    return float(len(sample.response))


def ppo(**changes: Any) -> PPOModule:
    return PPOModule(**{"actor": "folder", "reward": reward, "advantage": "GRPO"} | changes)


def test_what_must_be_given_is_told_by_its_full_key():
    with pytest.raises(TypeError, match=r"`PromptDataModule` needs `data\.prompts_per_step`, which you have not given"):
        PromptDataModule("rows.jsonl")


def test_short_forms_make_the_same_parts_as_long_ones():
    short = ppo(policy_loss="PPOClip", corrections=["IcePop"], lr=3e-6, actor=Path("folder"))

    assert short.policy_config == ModelConfig(path="folder", optim=OptimConfig(lr=3e-6))
    assert type(short.advantage) is GRPO
    assert [type(part).__name__ for part in (short.policy_loss, *short.corrections)] == ["PPOClip", "IcePop"]
    assert ppo(reward="exact_match").reward_config == RewardConfig(function="exact_match")
    assert SFTModule("folder", lr=3e-6).policy_config == short.policy_config


def test_mappings_make_groups():
    module = ppo(actor={"path": "folder", "optim": {"lr": 1e-5, "betas": [0.9, 0.95]}}, update={"epochs": 2})

    assert module.policy_config.optim == OptimConfig(lr=1e-5, betas=(0.9, 0.95))
    assert module.update.epochs == 2


@pytest.mark.parametrize("kind", [HFRollout, VLLMRollout])
def test_a_rollout_takes_the_commonest_settings_directly(kind):
    rollout = kind(num_samples=8, max_new_tokens=7, temperature=0.9)

    assert rollout.sampling == SamplingConfig(num_samples=8, max_new_tokens=7, temperature=0.9)
    assert rollout.val_sampling == SamplingConfig(max_new_tokens=7)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: ppo(actor=3), "`model.actor`: expected ModelConfig or str, got 3 (int)"),
        (lambda: ppo(reward=3), "`model.reward`: expected RewardConfig or str or a function or None, got 3 (int)"),
        (lambda: ppo(reward=dict), "`model.reward`: expected a function, got the class `builtins.dict`"),
        (lambda: ppo(advantage=3), "`model.advantage`: expected AdvantageEstimator or str or None, got 3 (int)"),
        (lambda: ppo(lr="1e-6"), "`model.lr`: expected float or None, got '1e-6' (str)"),
        (lambda: ppo(learning_rate=1.0), "`model.learning_rate` is not an option of `PPOModule`"),
        (lambda: ppo(update={"epoch": 3}), "`model.update.epoch` is not an option of `UpdateConfig`. Did you mean"),
        (lambda: ppo(actor={"path": "x", "optim": {"lr": "a"}}), "`model.actor.optim.lr`: expected float, got 'a'"),
        (lambda: ppo(actor={"optim": {}}), "`model.actor` needs `model.actor.path`"),
        (lambda: ppo(corrections="IcePop"), "`model.corrections`: expected"),
        (lambda: HFRollout(num_samples="8"), "`rollout.num_samples`: expected int or None, got '8' (str)"),
        (lambda: HFRollout(SamplingConfig(top_k=True)), "`sampling.top_k`: expected int, got True (bool)"),
        (lambda: PromptDataModule("a", prompts_per_step=6.4), "`data.prompts_per_step`: expected int, got 6.4"),
        (lambda: ChatDataModule(["a", 3]), "`data.train_files[1]`: expected str, got 3"),
        (lambda: SFTModule(None), "`model.actor`: expected ModelConfig or str, got None"),
        (lambda: OptimConfig(schedule="sine"), "`optim.schedule`: expected one of 'constant', 'linear', 'cosine'"),
    ],
)
def test_a_wrong_type_is_told_by_its_full_key(make, sentence):
    with pytest.raises(TypeError) as error:
        make()
    assert str(error.value).startswith(sentence)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: ppo(advantage="GRPOO"), "`model.advantage` has no choice 'GRPOO'. Did you mean `GRPO`?"),
        (lambda: ppo(policy_loss="PPO"), "`model.policy_loss` has no choice 'PPO'. Did you mean"),
        (lambda: ppo(lr=-1.0), "`model.actor.optim.lr` must be above 0"),
        (
            lambda: ppo(actor=ModelConfig(path="x", optim=OptimConfig(lr=1.0)), lr=2.0),
            "`model.lr` (2.0) and `model.actor.optim.lr` (1.0) are both set",
        ),
        (
            lambda: HFRollout(SamplingConfig(num_samples=2), num_samples=4),
            "`rollout.num_samples` (4) and `rollout.sampling.num_samples` (2) are both set",
        ),
    ],
)
def test_a_wrong_value_is_told_by_its_full_key(make, sentence):
    with pytest.raises(ValueError) as error:  # noqa: PT011 # the text is compared below
        make()
    assert str(error.value).startswith(sentence)


@pytest.mark.parametrize(
    ("value", "hint", "is_fit"),
    [
        (1, float, True),
        (True, float, False),
        (1.0, int, False),
        (None, int | None, True),
        ("a", Literal["a", "b"], True),
        ("c", Literal["a", "b"] | int, False),
        ([1, 2], list[int], True),
        ([1, "2"], list[int], False),
        ((0.9, 1), tuple[float, float], True),
        ((0.9,), tuple[float, float], False),
        ((1, 2, 3), tuple[int, ...], True),
        ({}, dict[str, Any], True),
        (len, Callable[..., Any], True),
        (object(), Any, True),
    ],
)
def test_values_fit_their_types(value, hint, is_fit):
    assert fits(value, hint) is is_fit


def test_numbers_of_numpy_are_numbers():
    numpy = pytest.importorskip("numpy")
    assert take(numpy.int64(3), int, "key") == 3
    assert take(numpy.float32(0.5), float, "key") == 0.5


def test_a_given_function_is_a_name_wherever_settings_are_shown():
    config = RewardConfig(function=reward)  # type: ignore[arg-type]

    assert config.function.endswith("test_options.reward")
    assert type(str(config.function)) is str
    assert dataclasses.replace(config, timeout=3.0).function.pickled == config.function.pickled
    assert pickle.loads(pickle.dumps(config)).function.pickled == config.function.pickled


def test_a_function_that_holds_what_no_process_can_be_sent_is_refused():
    import threading

    lock = threading.Lock()

    def locked(sample: Any) -> float:
        with lock:
            return 0.0

    with pytest.raises(
        TypeError, match=r"`model\.reward`: the function `.*locked` can't be sent to the reward workers"
    ):
        ppo(reward=locked)


@pytest.mark.parametrize("options", [{"lr": float("nan")}, {"lr": float("inf")}, {"betas": (0.9, 1.0)}, {"eps": -1.0}])
def test_numbers_that_no_optimizer_can_take_are_refused(options):
    (name,) = options
    with pytest.raises(ValueError, match=rf"`optim.{name}` must"):
        OptimConfig(**options)
