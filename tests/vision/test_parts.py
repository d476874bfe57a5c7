"""What else runs with images have: a critic, a reference, adapters, a page of samples; and what takes no images."""

from __future__ import annotations

import json

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import seed_everything
from peft import PeftModel
from transformers import AutoModelForImageTextToText

from tests.runs import Recorder, make_model_config, make_ppo, make_prompts, make_rollout, make_trainer
from tests.vision.tiny_vision import squares, write_vision_folder
from verl_lightning.algorithms.advantages.gae import GAE
from verl_lightning.callbacks import HFCheckpoint, SamplesTable
from verl_lightning.models.config import LoraConfig
from verl_lightning.modules.ppo_config import CriticConfig, KLConfig, UpdateConfig
from verl_lightning.rewards.config import RewardConfig, RewardModelConfig
from verl_lightning.rollout.turns import Environment, TurnsConfig
from verl_lightning.strategies import STRATEGIES


class Nobody(Environment):
    """Says nothing."""

    def respond(self, conversation):
        return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_vision_folder(tmp_path_factory.mktemp("qwen2_5_vl"), "qwen2_5_vl")


@pytest.fixture
def rows(tmp_path):
    """Four questions about a picture each."""
    for count in range(1, 5):
        squares(count).save(tmp_path / f"{count}.png")
    shown = [
        {"prompt": "<image>count", "images": [f"{count}.png"], "ground_truth": str(count)} for count in range(1, 5)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shown))
    return tmp_path / "rows.jsonl"


def test_a_critic_and_a_reference_see_images_and_people_do_too(tmp_path, folder, rows):
    seed_everything(0, verbose=False)
    lora, recorder = LoraConfig(rank=2), Recorder()
    module = make_ppo(
        folder,
        actor=make_model_config(folder, lr=1e-2, lora=lora),
        advantage=GAE(),
        critic=CriticConfig(model=make_model_config(folder, lr=1e-2)),
        kl=KLConfig(),
        update=UpdateConfig(mini_batch_size=4, micro_batch_size=4),
    )
    table, export = SamplesTable(train_every_n_steps=1), HFCheckpoint(dirpath=str(tmp_path / "hf"))
    callbacks = make_rollout(canary_limit=1e-5), recorder, table, export
    trainer = make_trainer(tmp_path, *callbacks, max_steps=2, enable_checkpointing=True, val_check_interval=1)
    trainer.fit(module, datamodule=make_prompts(rows, rows))

    assert recorder.column("actor/kl_loss")[0] == pytest.approx(0, abs=1e-6)
    assert recorder.column("critic/vf_loss")[1] > 0
    for name in ("step=2.jsonl", "train_step=2.jsonl"):
        said = [json.loads(line) for line in (table.page.parent / name).read_text().splitlines()]
        assert all(row["images"][0].startswith("data:image/png;base64,") for row in said)
        assert {row["prompt"] for row in said} == {"<image>count"}
    base = AutoModelForImageTextToText.from_pretrained(folder)
    adapted = [name for name, _ in PeftModel.from_pretrained(base, tmp_path / "hf" / "last").named_parameters()]
    assert not any("lora" in name and "visual" in name for name in adapted)
    assert any("lora" in name for name in adapted)


def test_what_takes_no_images_says_so_by_its_key_before_the_first_step(tmp_path, folder, rows):
    rollout = make_rollout(turns=TurnsConfig(environment=Nobody(), max_turns=2))
    trainer = make_trainer(tmp_path, rollout)
    with pytest.raises(MisconfigurationException, match=r"in row 1 of .*rows.jsonl`, but .*`rollout.environment` or"):
        trainer.fit(make_ppo(folder), datamodule=make_prompts(rows))

    reward = RewardConfig(function="exact_match", model=RewardModelConfig(path=str(folder)))
    assert "`model.reward.model` judges text" in make_ppo(folder, reward=reward).image_obstacle()
    assert "`trainer.strategy: megatron`" in STRATEGIES["megatron"]().image_obstacle
    assert "`fsdp.sequence_parallel_size`" in STRATEGIES["fsdp"](sequence_parallel_size=2).image_obstacle
