"""The warning that weights in 16 bits round small updates away, and when there is none."""

from __future__ import annotations

import re
import warnings

import pytest
import torch

from tests.runs import make_chats, make_model_config, make_ppo, make_prompts, make_rollout, make_sft, make_trainer
from verl_lightning.algorithms.advantages.gae import GAE
from verl_lightning.models.config import OptimConfig
from verl_lightning.modules.lost_updates import changeable_share
from verl_lightning.modules.ppo_config import CriticConfig

DTYPE = {"dtype": "bfloat16"}


def warnings_of(fit):
    """What a run warns of, as far as it is about lost updates."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit()
    return [str(each.message) for each in caught if "rounded away" in str(each.message)]


def fit_sft(tmp_path, folder, chats, *, lr, strategy="auto", model=None, **options):
    """Two steps; returns the warnings, and the share of weights that changed."""
    module = make_sft(folder, actor=make_model_config(folder, lr=lr, **model or {}))
    trainer = make_trainer(tmp_path, strategy=strategy, max_steps=2, **options)
    told = warnings_of(lambda: trainer.fit(module, datamodule=make_chats(chats)))
    before = make_sft(folder, actor=module.policy_config)
    make_trainer(tmp_path, limit_val_batches=1, **options if strategy == "auto" else {}).validate(
        before, datamodule=make_chats(chats, chats), verbose=False
    )
    pairs = [
        (new.full_tensor() if hasattr(new, "full_tensor") else new) != old
        for new, old in zip(module.parameters(), before.parameters(), strict=True)
    ]
    return told, sum(int(pair.sum()) for pair in pairs) / sum(pair.numel() for pair in pairs)


@pytest.mark.parametrize(
    ("strategy", "options", "model", "cause", "way_out"),
    [
        ("auto", {"precision": "bf16-true"}, {}, "`trainer.precision: bf16-true`", "`trainer.precision: bf16-mixed`"),
        ("ddp", {}, DTYPE, "`model.actor.dtype: bfloat16`", "`model.actor.dtype: float32` and `trainer.prec"),
        ("fsdp", {}, DTYPE, "`model.actor.dtype: bfloat16`", "`model.actor.dtype: float32` and `trainer.prec"),
    ],
)
def test_most_updates_are_lost_and_said_to_be(
    tmp_path, tiny_folder, chat_file, strategy, options, model, cause, way_out
):
    (told,), changed = fit_sft(tmp_path, tiny_folder, chat_file, lr=1e-6, strategy=strategy, model=model, **options)

    assert told.startswith(cause)
    assert way_out in told
    share = float(re.search(r"`model\.actor\.optim\.lr` \(1e-06\) changes about ([\d.]+)%", told)[1]) / 100
    assert share == pytest.approx(changed, abs=0.03)


@pytest.mark.parametrize(
    ("lr", "options", "model"),
    [
        (1e-6, {"precision": "bf16-mixed"}, {}),
        (1e-6, {}, {}),
        (1e-2, {"precision": "bf16-true"}, {}),
        (1e-2, {}, DTYPE),
    ],
)
def test_updates_that_are_stored_are_not_warned_of(tmp_path, tiny_folder, chat_file, lr, options, model):
    told, changed = fit_sft(tmp_path, tiny_folder, chat_file, lr=lr, model=model, **options)

    assert told == []
    assert changed > 0.5


def test_each_model_of_ppo_is_looked_at(tmp_path, tiny_folder, prompt_file):
    critic = make_model_config(tiny_folder, optim=OptimConfig(lr=1e-7), **DTYPE)
    module = make_ppo(tiny_folder, advantage=GAE(), critic=CriticConfig(model=critic))
    trainer = make_trainer(tmp_path, make_rollout(), max_steps=1)

    (told,) = warnings_of(lambda: trainer.fit(module, datamodule=make_prompts(prompt_file)))

    assert "`model.critic.model.dtype: bfloat16` stores the critic's weights" in told
    assert "`model.critic.model.optim.lr` (1e-07)" in told


def test_the_share_is_of_what_the_type_tells_apart():
    """Bfloat16 has steps of 1/128 above 1, and of a 256th part of that above 1/256."""
    weights = torch.tensor([1.0, 1 / 256, 0.0, 1 / 1024], dtype=torch.bfloat16)
    assert changeable_share([weights], 1e-4) == 0.75
    assert changeable_share([weights.float()], 1e-20) == changeable_share([], 1.0) == 1.0
