"""A resumed run trains with its own optimizer settings from its first step, and says which ones it changes."""

from __future__ import annotations

import logging
import math
from dataclasses import asdict, replace

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping
from torch.testing import assert_close

from tests.processes import on_ranks
from tests.runs import (
    Recorder,
    make_chats,
    make_model_config,
    make_ppo,
    make_prompts,
    make_rollout,
    make_sft,
    make_trainer,
)
from verl_lightning.algorithms.advantages.gae import GAE
from verl_lightning.models.config import LoraConfig, OptimConfig
from verl_lightning.modules.ppo_config import CriticConfig, KLConfig
from verl_lightning.strategies import DDPStrategy, FSDPStrategy

SAVED = OptimConfig(lr=1e-3, schedule="linear", weight_decay=0.1)
SAVED_STEPS = 2
STRATEGIES = {"auto": lambda: "auto", "ddp": DDPStrategy, "fsdp": FSDPStrategy}
CHANGES = {"lr": 5e-4, "betas": (0.5, 0.7), "eps": 1e-3, "weight_decay": 0.0, "schedule": "constant"}


class Watch(Callback):
    """AdamW's settings in the first step of a run, and the weights before and after it."""

    def __init__(self):
        self.settings, self.weights = None, []

    def on_train_start(self, trainer, pl_module):
        self._keep(pl_module)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        names = ("lr", "betas", "eps", "weight_decay")
        self.settings = self.settings or [{name: group[name] for name in names} for group in optimizer.param_groups]

    def on_train_batch_end(self, trainer, pl_module, *args):
        self._keep(pl_module)

    def _keep(self, module):
        named = module.contract.named_weights(module.policy)
        self.weights.append(torch.cat([weight.double().flatten() for _, weight in named]))

    @property
    def change(self):
        """Of all weights in the first step."""
        return self.weights[1] - self.weights[0]


def sft(folder, data, path, *, optim, steps, strategy="auto", ckpt_path=None, lora=None):
    """Runs SFT, leaves a checkpoint of its end at the path unless it has resumed, and returns what was watched."""
    watch, recorder = Watch(), Recorder()
    trainer = make_trainer(path.parent, watch, recorder, strategy=STRATEGIES[strategy](), max_steps=steps)
    module = make_sft(folder, actor=make_model_config(folder, optim=optim, lora=lora))
    trainer.fit(module, datamodule=make_chats(data), ckpt_path=ckpt_path)
    if ckpt_path is None:
        trainer.save_checkpoint(path)
    return {"rates": recorder.column("train/lr"), "settings": watch.settings, "change": watch.change}


def sft_twice(folder, data, path, optim, strategy, lora=None):
    """The resumed one of two runs under one strategy."""
    sft(folder, data, path, optim=SAVED, steps=SAVED_STEPS, strategy=strategy, lora=lora)
    return sft(folder, data, path, optim=optim, steps=3, strategy=strategy, ckpt_path=path, lora=lora)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["full", "lora"])
@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_configured_settings_hold_from_the_first_resumed_step(tmp_path, tiny_folder, chat_file, strategy, lora):
    optim = replace(SAVED, **CHANGES)
    arguments = (tiny_folder, chat_file, tmp_path / "saved.ckpt", optim, strategy, lora)

    resumed = sft_twice(*arguments) if strategy == "auto" else on_ranks(1, sft_twice, *arguments)[0]

    names = ("lr", "betas", "eps", "weight_decay")
    groups = 1 if lora else 2  # norms and biases are a group of their own
    assert resumed["settings"] == [{name: CHANGES[name] for name in names}] * groups
    assert resumed["rates"] == pytest.approx([5e-4])


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tiny_folder, chat_file):
    """A checkpoint of two steps of SFT at the linear schedule's rates 1e-3 and 5e-4."""
    path = tmp_path_factory.mktemp("saved") / "saved.ckpt"
    sft(tiny_folder, chat_file, path, optim=SAVED, steps=SAVED_STEPS)
    return path


def by_hand(schedule, step, *, lr, warmup, steps, floor):
    """The rate of a step that begins after so many others."""
    if step < warmup:
        return lr * (step + 1) / warmup
    done = (step - warmup) / (steps - warmup)
    decay = {"constant": 1, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[schedule]
    return lr * (floor + (1 - floor) * decay)


@pytest.mark.parametrize("warmup", [0, 1, 2, 4])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_rates_are_the_new_schedules_at_each_step(tiny_folder, chat_file, saved, schedule, warmup):
    """Also of the same schedule with a later end: `linear` without warm-up."""
    optim = replace(SAVED, schedule=schedule, warmup_steps=warmup, min_lr_ratio=0.1)

    resumed = sft(tiny_folder, chat_file, saved, optim=optim, steps=5, ckpt_path=saved)

    steps = range(SAVED_STEPS, 5)
    expected = [by_hand(schedule, step, lr=1e-3, warmup=warmup, steps=5, floor=0.1) for step in steps]
    assert resumed["rates"] == pytest.approx(expected)


def test_half_the_rate_moves_the_weights_half_as_far(tiny_folder, chat_file, saved):
    """What AdamW does, not what it says."""
    whole, half = (
        sft(tiny_folder, chat_file, saved, optim=replace(SAVED, lr=lr, schedule="constant"), steps=3, ckpt_path=saved)
        for lr in (1e-3, 5e-4)
    )
    assert_close(half["change"] * 2, whole["change"], rtol=0, atol=1e-3 * float(whole["change"].abs().max()))


def test_changes_are_told_by_the_users_keys(tiny_folder, chat_file, saved, caplog):
    with caplog.at_level(logging.INFO):
        sft(tiny_folder, chat_file, saved, optim=replace(SAVED, lr=5e-4, max_grad_norm=2.0), steps=3, ckpt_path=saved)
    told = [record.getMessage() for record in caplog.records if "optim" in record.getMessage()]
    assert sorted(told) == [
        "`model.actor.optim.lr`: 0.001 in the checkpoint, 0.0005 now.",
        "`model.actor.optim.max_grad_norm`: 1.0 in the checkpoint, 2.0 now.",
    ]


def test_nothing_is_told_of_settings_that_stay(tiny_folder, chat_file, saved, caplog):
    with caplog.at_level(logging.INFO):
        sft(tiny_folder, chat_file, saved, optim=OptimConfig(**asdict(SAVED)), steps=3, ckpt_path=saved)
    assert "optim" not in caplog.text


def test_patience_is_the_resumed_runs(tmp_path, tiny_folder, chat_file, caplog):
    """Lightning restores that of the checkpoint, with the count that it limits; no validation here is better by 10."""

    def fit(patience, steps, ckpt_path=None):
        stopping = EarlyStopping("val/loss", min_delta=10, patience=patience)
        trainer = make_trainer(tmp_path, stopping, max_steps=steps, val_check_interval=1, check_val_every_n_epoch=None)
        trainer.fit(make_sft(tiny_folder), datamodule=make_chats(chat_file, chat_file), ckpt_path=ckpt_path)
        return trainer, stopping

    fit(patience=9, steps=3)[0].save_checkpoint(tmp_path / "saved.ckpt")
    with caplog.at_level(logging.INFO):
        trainer, stopping = fit(patience=3, steps=9, ckpt_path=tmp_path / "saved.ckpt")

    assert (stopping.patience, trainer.global_step) == (3, 4)
    assert "`EarlyStopping.patience`: 9 in the checkpoint, 3 now." in caplog.text


@pytest.mark.parametrize(
    ("changes", "first"), [({"coef": 0.1}, 0.3), ({"coef": 0.5}, 0.5), ({"coef": 0.1, "target": None}, 0.1)]
)
def test_an_adaptive_kl_weight_goes_on_unless_its_start_is_another(tmp_path, tiny_folder, prompt_file, changes, first):
    def fit(kl, steps, ckpt_path=None):
        recorder, module = Recorder(), make_ppo(tiny_folder, kl=kl)
        trainer = make_trainer(tmp_path, make_rollout(), recorder, max_steps=steps)
        trainer.fit(module, datamodule=make_prompts(prompt_file), ckpt_path=ckpt_path)
        return trainer, module, recorder

    kl = KLConfig(coef=0.1, target=0.01)
    trainer, module, _ = fit(kl, steps=1)
    module.kl_coef = 0.3  # what it has been steered to
    trainer.save_checkpoint(tmp_path / "saved.ckpt")

    assert fit(replace(kl, **changes), 2, tmp_path / "saved.ckpt")[2].column("actor/kl_coef") == [pytest.approx(first)]


def ppo(folder, prompts, critic_optim, *, steps, ckpt_path=None):
    """PPO whose actor trains as it was saved, and its recorder."""
    recorder = Recorder()
    trainer = make_trainer(folder.parent, make_rollout(), recorder, max_steps=steps)
    critic = CriticConfig(model=make_model_config(folder, optim=critic_optim))
    module = make_ppo(folder, actor=make_model_config(folder, optim=SAVED), advantage=GAE(), critic=critic)
    trainer.fit(module, datamodule=make_prompts(prompts), ckpt_path=ckpt_path)
    return trainer, recorder


def test_a_critics_settings_are_its_own(tmp_path, tiny_folder, prompt_file, caplog):
    ppo(tiny_folder, prompt_file, SAVED, steps=SAVED_STEPS)[0].save_checkpoint(tmp_path / "ppo.ckpt")

    with caplog.at_level(logging.INFO):
        _, recorder = ppo(tiny_folder, prompt_file, replace(SAVED, lr=1e-2), steps=4, ckpt_path=tmp_path / "ppo.ckpt")

    assert recorder.column("actor/lr") == pytest.approx([0.5e-3, 0.25e-3])  # of four steps
    assert recorder.column("critic/lr") == pytest.approx([0.5e-2, 0.25e-2])
    assert "`model.critic.model.optim.lr`: 0.001 in the checkpoint, 0.01 now." in caplog.text
    assert "model.actor" not in caplog.text
