"""What the rollout callback adds to batches, and when."""

from __future__ import annotations

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from tests.runs import make_chats, make_model_config, make_ppo, make_prompts, make_rollout, make_sft, make_trainer
from verl_lightning.algorithms.advantages.remax import ReMax
from verl_lightning.models.config import LoraConfig
from verl_lightning.rewards.pool import RewardPool
from verl_lightning.rollout.base import SamplingConfig
from verl_lightning.rollout.hf import HFEngine


@pytest.fixture(autouse=True)
def _seed():
    seed_everything(0, verbose=False)


class Keeper(Callback):
    """Keeps the batches as later callbacks see them."""

    def __init__(self):
        self.train, self.val = [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.train.append(batch)

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.val.append(batch)


def test_responses_are_judged_while_others_are_sampled(tmp_path, tiny_folder, prompt_file, monkeypatch):
    order = []
    step, offer = HFEngine.step, RewardPool.offer
    monkeypatch.setattr(HFEngine, "step", lambda engine: order.append("step") or step(engine))
    monkeypatch.setattr(RewardPool, "offer", lambda *given: order.append("offer") or offer(*given))
    trainer = make_trainer(tmp_path, make_rollout(), max_steps=1)

    trainer.fit(make_ppo(tiny_folder), datamodule=make_prompts(prompt_file))

    first_judged = order.index("offer")
    assert "step" in order[first_judged:]
    assert order.count("offer") == 16


def test_remax_gets_a_greedy_response_to_each_prompt(tmp_path, tiny_folder, prompt_file):
    keeper = Keeper()
    trainer = make_trainer(tmp_path, make_rollout(), keeper, max_steps=1)

    trainer.fit(make_ppo(tiny_folder, advantage=ReMax()), datamodule=make_prompts(prompt_file))

    batch = keeper.train[0]
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    prompts = {"input_ids": batch.prompt_ids, "attention_mask": batch.prompt_mask.long()}
    expected = model.generate(**prompts, max_new_tokens=6, do_sample=False)[:, batch.prompt_ids.shape[1] :]
    greedy = batch.greedy_rollout
    assert_close(greedy.response_ids, expected[:, : greedy.response_ids.shape[1]])
    assert batch.rollout.prompt_index.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert greedy.prompt_index.tolist() == [0, 1, 2, 3]


def test_other_estimators_pay_for_no_greedy_response(tmp_path, tiny_folder, prompt_file):
    keeper = Keeper()
    trainer = make_trainer(tmp_path, make_rollout(), keeper, max_steps=1)

    trainer.fit(make_ppo(tiny_folder), datamodule=make_prompts(prompt_file))

    assert keeper.train[0].greedy_rollout is None


def test_each_step_and_sample_draws_its_own_noise_and_validations_draw_the_same(tmp_path, tiny_folder, prompt_file):
    keeper = Keeper()
    # A rate of nearly nothing keeps the policy, so that only the noise can differ.
    module = make_ppo(tiny_folder, actor=make_model_config(tiny_folder, lr=1e-12))
    options = {"max_steps": 2, "overfit_batches": 1, "check_val_every_n_epoch": 1}
    rollout = make_rollout(val_sampling=SamplingConfig(num_samples=2, max_new_tokens=6))

    make_trainer(tmp_path, rollout, keeper, **options).fit(module, datamodule=make_prompts(prompt_file, prompt_file))

    first, second = (batch.rollout.response_ids for batch in keeper.train)
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], first[1])
    vals = [batch.rollout.response_ids for batch in keeper.val]
    assert_close(vals[0], vals[len(vals) // 2])
    assert not torch.equal(vals[0][0], vals[0][1])


def test_the_rollout_callback_refuses_a_module_that_learns_from_no_responses(tmp_path, tiny_folder, chat_file):
    modules = {"BoringModel": (BoringModel(), None), "SFTModule": (make_sft(tiny_folder), make_chats(chat_file))}
    for name, (module, data) in modules.items():
        with pytest.raises(MisconfigurationException, match=rf"`{name}` has no use.*`rollout: null`"):
            make_trainer(tmp_path, make_rollout()).fit(module, datamodule=data)


def test_adapters_alone_need_an_engine_that_takes_them(tmp_path, tiny_folder, prompt_file):
    actor = make_model_config(tiny_folder, lora=LoraConfig(rank=4, merge_for_rollout=False))

    with pytest.raises(MisconfigurationException, match=r"the engine of `HFRollout` takes whole weights only"):
        make_trainer(tmp_path, make_rollout()).fit(make_ppo(tiny_folder, actor=actor), make_prompts(prompt_file))


class Told(CPUAccelerator):
    """Says when Lightning sets it up, which on a GPU frees memory that CUDA graphs of an engine would still use."""

    def __init__(self, events):
        super().__init__()
        self.events = events

    def setup(self, trainer):
        self.events.append("accelerator")
        super().setup(trainer)


@pytest.mark.parametrize("entry", ["fit", "validate", "test"])
def test_the_engine_starts_once_and_on_a_device_that_is_set_up(tmp_path, tiny_folder, prompt_file, entry, monkeypatch):
    events, start = [], HFEngine.start
    monkeypatch.setattr(HFEngine, "start", lambda engine, device: (events.append("engine"), start(engine, device)))
    trainer = make_trainer(tmp_path, make_rollout(), max_steps=1, accelerator=Told(events))

    prompts = make_prompts(prompt_file, prompt_file, test_files=str(prompt_file))
    getattr(trainer, entry)(make_ppo(tiny_folder), datamodule=prompts)

    assert events == ["accelerator", "engine"]
