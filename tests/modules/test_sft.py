"""SFT under Lightning's automatic optimization: what its options mean, and that they change no gradient by accident."""

from __future__ import annotations

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

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
from tests.tiny import write_uneven_chat_file
from tests.tolerances import assert_near
from verl_lightning.models.config import OptimConfig
from verl_lightning.modules import PPOModule, SFTModule


@pytest.fixture(autouse=True)
def _seed():
    seed_everything(0, verbose=False)


@pytest.fixture
def chats(tmp_path):
    """Chats with answers of unequal lengths."""
    return write_uneven_chat_file(tmp_path / "chats.jsonl", num_rows=40)


class Watch(Callback):
    """Keeps the weights after each batch, and the norm of the gradient that each optimizer step takes."""

    def __init__(self):
        self.weights, self.norms = [], []

    def on_train_start(self, trainer, pl_module):
        (optimizer,) = trainer.optimizers
        optimizer.register_step_post_hook(lambda *_: self.norms.append(self._norm(pl_module)))

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.weights.append({name: weight.clone() for name, weight in pl_module.state_dict().items()})

    @staticmethod
    def _norm(pl_module):
        return float(torch.nn.utils.get_total_norm([p.grad for p in pl_module.parameters() if p.grad is not None]))


def make_config(folder, **optim):
    """An optimizer whose epsilon does not blow up the rounding of gradients near zero."""
    return make_model_config(folder, optim=OptimConfig(**{"lr": 1e-3, "eps": 1e-5} | optim))


def fit(tmp_path, folder, chats, *callbacks, batch_size=4, optim=None, **options):
    """The final weights and what was seen on the way."""
    watch, module = Watch(), make_sft(folder, actor=make_config(folder, **optim or {}))
    trainer = make_trainer(tmp_path, watch, *callbacks, **options)
    trainer.fit(module, datamodule=make_chats(chats, batch_size=batch_size))
    return module.state_dict(), watch


def test_the_loss_is_the_mean_over_supervised_tokens(tmp_path, tiny_folder, chats):
    recorder, module = Recorder(), make_sft(tiny_folder)
    trainer = make_trainer(tmp_path, recorder, max_steps=1)
    data = make_chats(chats)
    trainer.fit(module, datamodule=data)

    data.setup("fit")
    batch = data.on_before_batch_transfer(next(iter(data.train_dataloader())), 0)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    labels = batch.input_ids.clone()
    labels[:, 1:][~batch.response_mask] = -100
    expected = model(batch.input_ids, attention_mask=batch.attention_mask.long(), labels=labels).loss
    assert recorder.column("train/loss") == pytest.approx([expected.item()], rel=1e-4)
    assert recorder.column("train/global_tokens") == [float(batch.response_mask.sum())]


@pytest.mark.parametrize("accumulated", [2, 4])
def test_accumulation_changes_no_gradient(tmp_path, tiny_folder, chats, accumulated):
    """Batches of unequal token counts must weigh as in one large batch."""
    expected, watch = fit(tmp_path, tiny_folder, chats, batch_size=8, optim={"max_grad_norm": 0.0})
    options = {"batch_size": 8 // accumulated, "accumulate_grad_batches": accumulated, "optim": {"max_grad_norm": 0.0}}
    actual, other_watch = fit(tmp_path, tiny_folder, chats, **options)

    assert_near((other_watch.norms, actual), (watch.norms, expected))


def test_an_epochs_last_accumulation_may_be_short(tmp_path, tiny_folder, chats, caplog):
    """Three batches of four, two at a time: the last makes a step of its own, as an epoch of one such batch does."""
    options = {"max_steps": -1, "max_epochs": 1, "optim": {"lr": 1e-12, "max_grad_norm": 0.0}}
    _, watch = fit(tmp_path, tiny_folder, chats, accumulate_grad_batches=2, limit_train_batches=3, **options)
    assert "an epoch has 3 batches on each rank: the last optimizer step of an epoch takes 1." in caplog.text
    _, single = fit(tmp_path, tiny_folder, chats, limit_train_batches=3, **options)

    assert len(watch.norms) == 2
    assert watch.norms[1] == pytest.approx(single.norms[2], rel=1e-4)


def test_an_accumulation_that_is_longer_than_an_epoch_is_warned_of_once(tmp_path, tiny_folder, chats):
    """Four batches of two make the step that one batch of eight makes."""
    options = {"limit_train_batches": 4, "max_steps": 3, "batch_size": 2}
    expected, _ = fit(tmp_path, tiny_folder, chats, limit_train_batches=1, batch_size=8)

    with pytest.warns(UserWarning, match="rank: every optimizer step takes 4. Set it to 4 at the most") as told:
        actual, _ = fit(tmp_path, tiny_folder, chats, GradientAccumulationScheduler({0: 8}), **options)

    assert sum("every optimizer step" in str(each.message) for each in told) == 1
    assert_close(actual, expected, rtol=1e-4, atol=1e-6)


def test_gradient_accumulation_scheduler_works(tmp_path, tiny_folder, chats):
    options = {"max_steps": 3, "batch_size": 4}
    expected, _ = fit(tmp_path, tiny_folder, chats, accumulate_grad_batches=2, **options)
    actual, _ = fit(tmp_path, tiny_folder, chats, GradientAccumulationScheduler({0: 2}), **options)
    assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "optim", "largest"),
    [
        ({}, {"max_grad_norm": 0.5}, 0.5),
        ({"gradient_clip_val": 0.25}, {"max_grad_norm": 0.5}, 0.25),  # the trainer's, when given, takes its place
        ({}, {"max_grad_norm": 0.0}, None),
        ({"gradient_clip_val": 0.0}, {"max_grad_norm": 0.5}, None),
    ],
)
def test_gradients_are_clipped(tmp_path, tiny_folder, chats, options, optim, largest):
    recorder = Recorder()
    _, watch = fit(tmp_path, tiny_folder, chats, recorder, optim=optim, **options)
    logged = recorder.column("train/grad_norm")
    assert min(logged) > 1  # before clipping
    assert watch.norms == pytest.approx(logged if largest is None else [largest] * 3, rel=1e-4)


@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback")  # of sharded models
def test_ema_weight_averaging_works(tmp_path, tiny_folder, chats):
    final, watch = fit(tmp_path, tiny_folder, chats, EMAWeightAveraging(decay=0.5))

    first, second, third = watch.weights
    expected = {name: 0.25 * first[name] + 0.25 * second[name] + 0.5 * third[name] for name in first}
    assert_close(final, expected)
    assert not torch.equal(
        final["actor.backbone.model.embed_tokens.weight"], first["actor.backbone.model.embed_tokens.weight"]
    )


@pytest.mark.parametrize(
    ("callback", "way_out"),
    [
        (StochasticWeightAveraging(swa_lrs=1e-3), r"would average nothing\. Use Lightning's `EMAWeightAveraging`"),
        (LearningRateFinder(), r"each model here has its own `optim\.lr`\. Compare short runs"),
    ],
)
def test_callbacks_that_need_another_kind_of_module_are_refused(tmp_path, tiny_folder, chats, callback, way_out):
    with pytest.raises(MisconfigurationException, match=way_out):
        fit(tmp_path, tiny_folder, chats, callback)


class Skipping(SFTModule):
    """Returns None for chosen batches, after or in the place of the loss."""

    def __init__(self, *args, skipped, makes_loss):
        super().__init__(*args)
        self.skipped, self.makes_loss = skipped, makes_loss

    def training_step(self, batch, batch_idx):
        if batch_idx not in self.skipped:
            return super().training_step(batch, batch_idx)
        if self.makes_loss:
            super().training_step(batch, batch_idx)
        return None


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("makes_loss", [False, True])
def test_a_batch_for_which_a_subclass_returns_none_is_left_out(tmp_path, tiny_folder, chats, makes_loss):
    """Of four batches, two a step, the last three: the first step is that of the first batch, the second is none."""
    options = {"max_steps": 2, "limit_train_batches": 4, "accumulate_grad_batches": 2}
    watch, module = Watch(), Skipping(make_config(tiny_folder), skipped={1, 2, 3}, makes_loss=makes_loss)
    make_trainer(tmp_path, watch, **options).fit(module, datamodule=make_chats(chats))

    expected, _ = fit(tmp_path, tiny_folder, chats, max_steps=1)
    assert_close(dict(module.state_dict()), dict(expected), rtol=1e-4, atol=1e-6)
    assert module.trainer.global_step == 2


@pytest.mark.parametrize("kind", [SFTModule, PPOModule])
def test_what_lightning_has_and_we_have_not_names_the_way_out(tmp_path, tiny_folder, chats, kind):
    with pytest.raises(
        MisconfigurationException, match=r"validate\(module, data, ckpt_path='last.ckpt'\)`.*`verl-export`"
    ):
        kind.load_from_checkpoint("last.ckpt")
    if kind is PPOModule:  # which predicts
        return
    with pytest.raises(MisconfigurationException, match=r"`predict` is not offered\. Sample with transformers or vLLM"):
        make_trainer(tmp_path).predict(make_sft(tiny_folder), datamodule=make_chats(chats, chats))


class Spoil(Callback):
    """Makes the second step's gradient infinite."""

    def on_after_backward(self, trainer, pl_module):
        if trainer.global_step == 1:
            next(pl_module.parameters()).grad[0, 0] = float("inf")


def test_an_infinite_gradient_is_skipped_and_counted(tmp_path, tiny_folder, chats):
    recorder = Recorder()
    _, watch = fit(tmp_path, tiny_folder, chats, Spoil(), recorder)

    assert recorder.column("train/skipped_updates") == [0.0, 1.0, 0.0]
    first, second, third = watch.weights
    assert_close(second, first, rtol=0, atol=0)
    name = "actor.backbone.model.embed_tokens.weight"
    assert not torch.equal(third[name], second[name])
    assert third[name].isfinite().all()


def test_validation_loss_weighs_tokens_not_batches(tmp_path, tiny_folder, chats):
    losses = []
    for batch_size in (40, 7):
        trainer = make_trainer(tmp_path)
        data = make_chats(chats, chats, batch_size=batch_size)
        (metrics,) = trainer.validate(make_sft(tiny_folder), datamodule=data, verbose=False)
        losses.append(metrics["val/loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_the_learning_rate_schedule_counts_optimizer_steps(tmp_path, tiny_folder, chats):
    recorder = Recorder()
    optim = {"warmup_steps": 2, "schedule": "cosine", "min_lr_ratio": 0.1}
    fit(tmp_path, tiny_folder, chats, recorder, optim=optim, max_steps=4, accumulate_grad_batches=2)
    # Warm-up 1/2, 2/2, then half a cosine to a tenth over two steps.
    assert [step["train/lr"] for step in recorder.steps[1::2]] == pytest.approx([0.5e-3, 1e-3, 1e-3, 0.55e-3])


@pytest.mark.parametrize("name", ["limit_train_batches", "max_epochs", "max_steps"])
@pytest.mark.parametrize("kind", [SFTModule, PPOModule])
def test_a_run_without_batches_is_refused(tmp_path, tiny_folder, chats, prompt_file, kind, name):
    if kind is SFTModule:
        module, data, callbacks = make_sft(tiny_folder), make_chats(chats), []
    else:
        module, data, callbacks = make_ppo(tiny_folder), make_prompts(prompt_file), [make_rollout()]
    with pytest.raises(MisconfigurationException, match=rf"`trainer\.{name}` is 0, so there is nothing to train on"):
        make_trainer(tmp_path, *callbacks, **{name: 0}).fit(module, datamodule=data)


def test_a_rate_that_is_hardly_meant_is_asked_about(tmp_path, tiny_folder, chats):
    module = make_sft(tiny_folder, actor=make_model_config(tiny_folder, lr=5.0))
    with (
        pytest.warns(UserWarning, match=r"`model\.actor\.optim\.lr` is 5: AdamW would move each weight by about that"),
        pytest.raises(MisconfigurationException, match="is 0"),
    ):
        make_trainer(tmp_path, max_steps=0).fit(module, datamodule=make_chats(chats))


@pytest.mark.parametrize("passes", [0, -1])
def test_a_step_without_a_batch_is_refused(passes, tmp_path, tiny_folder, chats):
    with pytest.raises(
        MisconfigurationException, match=f"`trainer.accumulate_grad_batches` must be at least 1, got {passes}"
    ):
        fit(tmp_path, tiny_folder, chats, accumulate_grad_batches=passes)
