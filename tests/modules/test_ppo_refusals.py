"""Settings that PPO refuses before the first step, each with the way out; and what a failed run leaves behind."""

from __future__ import annotations

import psutil
import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from transformers import AutoTokenizer

from tests.runs import (
    Recorder,
    make_chats,
    make_model_config,
    make_ppo,
    make_prompts,
    make_reward,
    make_rollout,
    make_sft,
    make_trainer,
)
from tests.tiny import write_tiny_folder
from verl_lightning.algorithms.advantages.gae import GAE
from verl_lightning.algorithms.advantages.gdpo import GDPO
from verl_lightning.faults import RunError
from verl_lightning.models.config import OptimConfig
from verl_lightning.modules import PPOModule
from verl_lightning.modules.ppo_checks import RewardWatch
from verl_lightning.modules.ppo_config import CriticConfig, KLConfig, ShapingConfig, UpdateConfig, ValidationConfig
from verl_lightning.rollout.base import SamplingConfig


@pytest.mark.parametrize(
    ("options", "way_out"),
    [
        ({"gradient_clip_val": 1.0}, r"Set `model\.actor\.optim\.max_grad_norm`"),
        ({"gradient_clip_algorithm": "value"}, r"Set `model\.actor\.optim\.max_grad_norm`"),
        ({"accumulate_grad_batches": 2}, r"Set `model\.update\.mini_batch_size` and `model\.update\.micro_batch_size`"),
    ],
)
def test_trainer_options_that_do_not_reach_ppo(tmp_path, tiny_folder, prompt_file, options, way_out):
    trainer = make_trainer(tmp_path, make_rollout(), **options)
    with pytest.raises(MisconfigurationException, match=way_out):
        trainer.fit(make_ppo(tiny_folder), datamodule=make_prompts(prompt_file))


@pytest.mark.parametrize(
    ("make_callback", "way_out"),
    [
        (lambda: GradientAccumulationScheduler({0: 2}), r"Set `model\.update\.mini_batch_size`"),
        (BatchSizeFinder, r"The memory plan .* set `model\.update\.micro_batch_size`"),
        (lambda: StochasticWeightAveraging(swa_lrs=1e-3), r"Use Lightning's `EMAWeightAveraging`"),
        (LearningRateFinder, r"Compare short runs"),
    ],
)
def test_callbacks_that_do_nothing_under_ppo(tmp_path, tiny_folder, prompt_file, make_callback, way_out):
    trainer = make_trainer(tmp_path, make_rollout(), make_callback())
    with pytest.raises(MisconfigurationException, match=way_out):
        trainer.fit(make_ppo(tiny_folder), datamodule=make_prompts(prompt_file))


@pytest.mark.parametrize(
    ("sampling", "parts", "message"),
    [
        ({"num_samples": 1}, {}, r"`GRPO` compares responses.*`rollout\.sampling\.num_samples` is 1"),
        ({"temperature": 0.0}, {}, r"`rollout\.sampling\.temperature` is 0: greedy responses teach nothing"),
        (
            {},
            {"validation": ValidationConfig(pass_k=[1, 4])},
            r"asks for pass@4, but.* is 1\. Sample at least 4",
        ),
        (
            {},
            {"update": UpdateConfig(mini_batch_size=3)},
            r"`model\.update\.mini_batch_size` \(3 prompts\) must divide",
        ),
        ({"top_p": 0.9}, {"update": UpdateConfig(old_log_probs="engine")}, r"a part of the vocabulary where"),
    ],
)
def test_parts_that_do_not_fit(tmp_path, tiny_folder, prompt_file, sampling, parts, message):
    options = {"num_samples": 4, "max_new_tokens": 4} | sampling
    trainer = make_trainer(tmp_path, make_rollout(sampling=SamplingConfig(**options)))
    with pytest.raises(ValueError, match=message):
        trainer.fit(make_ppo(tiny_folder, **parts), datamodule=make_prompts(prompt_file))


@pytest.mark.parametrize("hook", ["optimizer_step", "lr_scheduler_step", "on_before_zero_grad"])
def test_hooks_that_nothing_would_call(tmp_path, tiny_folder, prompt_file, hook):
    module = make_ppo(tiny_folder)
    module.__class__ = type("Own", (PPOModule,), {hook: lambda self, *args, **kwargs: None})
    with pytest.raises(MisconfigurationException, match=rf"`Own\.{hook}` would never be called.*Use `"):
        make_trainer(tmp_path, make_rollout()).fit(module, datamodule=make_prompts(prompt_file))


@pytest.mark.parametrize("callback", [BackboneFinetuning(), ModelPruning("l1_unstructured", amount=0.5)])
@pytest.mark.parametrize("make", [make_ppo, make_sft])
def test_callbacks_that_look_for_layers_before_there_are_any(tmp_path, tiny_folder, chat_file, make, callback):
    with pytest.raises(MisconfigurationException, match=r"would find none\. Train a part of a model with"):
        make_trainer(tmp_path, callback).fit(make(tiny_folder), datamodule=make_chats(chat_file))


@pytest.mark.parametrize("name", ["sampling", "val_sampling"])
def test_responses_beyond_the_models_positions_before_it_is_built(tmp_path, tiny_folder, prompt_file, name):
    rollout, module = make_rollout(**{name: SamplingConfig(num_samples=4, max_new_tokens=2048)}), make_ppo(tiny_folder)
    with pytest.raises(ValueError, match=rf"`rollout\.{name}\.max_new_tokens` add up to 2080 tokens, but the model r"):
        make_trainer(tmp_path, rollout).fit(module, datamodule=make_prompts(prompt_file, prompt_file))
    assert module.actor is None

    if name == "val_sampling":  # nothing is sampled so
        make_trainer(tmp_path, rollout, max_steps=1).fit(module, datamodule=make_prompts(prompt_file))


def test_a_model_whose_responses_cannot_end(tmp_path, prompt_file):
    folder = write_tiny_folder(tmp_path / "endless")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").unlink()

    with pytest.raises(ValueError, match=r"endless` names no token that ends a response. Set `eos_token`"):
        make_trainer(tmp_path, make_rollout()).fit(make_ppo(folder), datamodule=make_prompts(prompt_file))


def test_ppo_without_a_rollout_callback(tmp_path, tiny_folder, prompt_file):
    with pytest.raises(MisconfigurationException, match=r"no callback samples any\. Add one: `rollout: HFRollout`"):
        make_trainer(tmp_path).fit(make_ppo(tiny_folder), datamodule=make_prompts(prompt_file))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"advantage": GAE()}, r"`GAE` needs values: set `model.critic`"),
        ({"critic": CriticConfig()}, r"`GRPO` uses no critic: set `model.critic: null`"),
        (
            {"advantage": GAE(), "critic": CriticConfig(epochs=2)},
            r"`model\.critic\.epochs` \(2\) must equal `model\.update",
        ),
        (
            {"advantage": GDPO({"format": 1.0}), "shaping": ShapingConfig(overlong_buffer=2)},
            r"`model\.shaping\.overlong_buffer` lowers the score, which `GDPO` does not read",
        ),
        (
            {"advantage": GDPO({"format": 1.0}), "kl": KLConfig(place="reward", estimator="k1")},
            r"`model\.kl\.place: reward` lowers the score, which `GDPO` does not read",
        ),
    ],
)
def test_estimators_and_critics_that_do_not_fit(tiny_folder, parts, message):
    with pytest.raises(ValueError, match=message):
        make_ppo(tiny_folder, **parts)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KLConfig(horizon=100), r"`model\.kl\.horizon` says how soon .* give a target, or leave it out"),
        (
            lambda: ShapingConfig(overlong_penalty=0.5),
            r"`model\.shaping\.overlong_penalty` needs `model\.shaping\.overlong_buffer`",
        ),
        (
            lambda: ValidationConfig(pass_k=[1, 0]),
            r"`model\.validation\.pass_k` counts responses, at least 1, got \[1, 0\]",
        ),
        (lambda: CriticConfig(warmup_steps=-1), r"`model\.critic\.warmup_steps` must not be negative, got -1"),
    ],
)
def test_options_without_effect(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_decay_without_an_end(tmp_path, tiny_folder, prompt_file):
    actor = make_model_config(tiny_folder, optim=OptimConfig(lr=1e-3, schedule="cosine"))
    trainer = make_trainer(tmp_path, make_rollout(), max_steps=-1, max_epochs=1)
    with pytest.raises(
        ValueError, match=r"`model\.actor\.optim\.schedule: cosine` ends at `trainer\.max_steps`.*got -1"
    ):
        trainer.fit(make_ppo(tiny_folder, actor=actor), datamodule=make_prompts(prompt_file))


def test_a_reward_that_no_response_makes_right(tmp_path, tiny_folder, prompt_file):
    module = make_ppo(tiny_folder, reward=make_reward("text"))

    with pytest.raises(ValueError, match=r"(?s)tried on the first row of `sort4`.*a number or None, got .* = 'good'"):
        make_trainer(tmp_path, make_rollout()).fit(module, datamodule=make_prompts(prompt_file))

    assert module.actor is None  # no model was loaded


@pytest.mark.parametrize("function", ["as_in_trl", "as_in_verl"])
def test_rewards_of_other_libraries(tmp_path, tiny_folder, prompt_file, function):
    ours, theirs = Recorder(), Recorder()
    for recorder, name in ((ours, "even_share"), (theirs, function)):
        seed_everything(0, verbose=False)
        module = make_ppo(tiny_folder, reward=make_reward(name, max_error_share=0.0))
        make_trainer(tmp_path, make_rollout(), recorder).fit(module, datamodule=make_prompts(prompt_file))

    assert theirs.column("critic/score/mean") == ours.column("critic/score/mean")
    assert theirs.column("actor/pg_loss") == ours.column("actor/pg_loss")


NO_REWARDS = {
    "none_but_in_the_trial": r"failed on 0 of them, .* on 0 and returned None for 16\. None leaves a response out",
    "fails": r"failed on 16 of them, .* returned None for 0\. The first failure:\n[\s\S]*RuntimeError: as ever",
}


@pytest.mark.parametrize("function", NO_REWARDS)
def test_a_function_that_has_no_reward_for_any_response_ends_the_run(tmp_path, tiny_folder, prompt_file, function):
    """Whatever share of a batch may fail."""
    module = make_ppo(tiny_folder, reward=make_reward(function, max_error_share=1.0))

    with pytest.raises(RunError, match=f"no response of step 1 has a reward, .* {NO_REWARDS[function]}"):
        make_trainer(tmp_path, make_rollout()).fit(module, datamodule=make_prompts(prompt_file))


def test_rewards_that_stay_away_for_two_steps_are_waited_for():
    with_rewards, without = {"critic/score/mean": 0.5, "reward/errors": 2.0}, {"reward/timeouts": 16.0}
    watch = RewardWatch()

    for step, metrics in enumerate([with_rewards, without, without, with_rewards, without, without]):
        watch.check(metrics, step, "late")

    with pytest.raises(RunError, match=r"no response of step 6 .* ran out of time on 16 .*\. The first failure:\nlate"):
        watch.check(without, 6, "late")


def test_a_failed_run_leaves_no_reward_worker(tmp_path, tiny_folder, prompt_file):
    before = {child.pid for child in psutil.Process().children()}
    module = make_ppo(tiny_folder, reward=make_reward("fails_on_even"))  # over `max_error_share`
    rollout = make_rollout()

    with pytest.raises(RuntimeError, match=r"an even start"):
        make_trainer(tmp_path, rollout).fit(module, datamodule=make_prompts(prompt_file))

    assert {child.pid for child in psutil.Process().children()} <= before
    assert rollout._engine is None
