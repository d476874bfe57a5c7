"""What counts as a step, an optimizer step and a schedule step in PPO."""

from __future__ import annotations

import pytest
from lightning.pytorch import seed_everything

from tests.runs import Recorder, make_model_config, make_ppo, make_prompts, make_rollout, make_trainer
from verl_lightning.algorithms.advantages.gae import GAE
from verl_lightning.models.config import OptimConfig
from verl_lightning.modules.ppo_config import CriticConfig, UpdateConfig


@pytest.fixture(autouse=True)
def _seed():
    seed_everything(0, verbose=False)


def optimizer_steps(optimizer):
    return {int(state["step"]) for state in optimizer.state.values()}


@pytest.mark.parametrize(
    ("limits", "num_iterations"),
    [
        ({"max_steps": 3}, 3),
        ({"fast_dev_run": True, "max_steps": -1}, 1),
        ({"max_steps": -1, "max_epochs": 1, "limit_train_batches": 2}, 2),
        ({"max_steps": -1, "max_epochs": 2, "limit_train_batches": 1}, 2),
        ({"max_steps": -1, "max_epochs": 2, "overfit_batches": 1}, 2),
        ({"max_steps": 3, "max_epochs": 5, "limit_train_batches": 2}, 3),
    ],
)
def test_global_step_counts_iterations(tmp_path, tiny_folder, prompt_file, limits, num_iterations):
    recorder = Recorder()
    trainer = make_trainer(tmp_path, make_rollout(num_samples=2, max_new_tokens=2), recorder, **limits)

    trainer.fit(make_ppo(tiny_folder), datamodule=make_prompts(prompt_file))

    assert trainer.global_step == num_iterations
    assert recorder.column("training/global_step") == list(range(1, num_iterations + 1))


def test_each_role_takes_epochs_times_mini_batches_optimizer_steps(tmp_path, tiny_folder, prompt_file):
    critic = CriticConfig(model=make_model_config(tiny_folder), epochs=3)
    update = UpdateConfig(mini_batch_size=2, micro_batch_size=3, epochs=2)
    module = make_ppo(tiny_folder, advantage=GAE(), critic=critic, update=update)
    trainer = make_trainer(tmp_path, make_rollout(num_samples=2, max_new_tokens=2))

    trainer.fit(module, datamodule=make_prompts(prompt_file))

    actor, critic = trainer.optimizers
    assert optimizer_steps(actor) == {3 * 2 * 2}  # iterations, epochs, mini-batches
    assert optimizer_steps(critic) == {3 * 3 * 2}
    assert trainer.global_step == 3


def test_the_learning_rate_changes_once_an_iteration(tmp_path, tiny_folder, prompt_file):
    optim = OptimConfig(lr=1.0e-3, warmup_steps=2, schedule="linear")
    module = make_ppo(tiny_folder, actor=make_model_config(tiny_folder, optim=optim))
    recorder = Recorder()
    trainer = make_trainer(tmp_path, make_rollout(num_samples=2, max_new_tokens=2), recorder, max_steps=4)

    trainer.fit(module, datamodule=make_prompts(prompt_file))

    assert recorder.column("actor/lr") == pytest.approx([0.5e-3, 1e-3, 1e-3, 0.5e-3])


def test_the_first_micro_batch_of_an_iteration_is_exactly_on_policy(tmp_path, tiny_folder, prompt_file):
    recorder = Recorder()
    update = UpdateConfig(mini_batch_size=2, micro_batch_size=3, epochs=2)
    trainer = make_trainer(tmp_path, make_rollout(), recorder)

    trainer.fit(make_ppo(tiny_folder, update=update), datamodule=make_prompts(prompt_file))

    assert recorder.column("actor/on_policy_ratio_error") == [0.0, 0.0, 0.0]
    assert min(map(abs, recorder.column("actor/ppo_kl"))) > 0  # later mini-batches are off policy


def test_old_log_probs_are_those_of_the_engine(tmp_path, tiny_folder, prompt_file):
    recorder = Recorder()
    trainer = make_trainer(tmp_path, make_rollout(max_new_tokens=12), recorder)

    trainer.fit(make_ppo(tiny_folder), datamodule=make_prompts(prompt_file))

    # Each step's responses come from the weights of the step before, so a stale engine would show from the second on.
    assert max(recorder.column("rollout_corr/abs_log_prob_gap")) < 1e-5


def test_critic_warm_up_leaves_the_actor_alone(tmp_path, tiny_folder, prompt_file):
    critic = CriticConfig(model=make_model_config(tiny_folder), warmup_steps=2)
    module = make_ppo(tiny_folder, advantage=GAE(), critic=critic)
    recorder = Recorder()
    trainer = make_trainer(tmp_path, make_rollout(), recorder)

    trainer.fit(module, datamodule=make_prompts(prompt_file))

    actor, critic = trainer.optimizers
    assert optimizer_steps(actor) == {2}  # of the third iteration only
    assert optimizer_steps(critic) == {6}
    assert ["actor/pg_loss" in step for step in recorder.steps[:2]] == [False, False]
    assert trainer.global_step == 3
