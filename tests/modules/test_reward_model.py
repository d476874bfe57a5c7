"""Reward models: what they learn, that transformers reads them, and that training goes on from one."""

from __future__ import annotations

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import seed_everything
from torch.testing import assert_close
from transformers import AutoModelForSequenceClassification

from tests.runs import Recorder, make_model_config, make_pairs, make_trainer
from tests.tolerances import assert_near
from verl_lightning.callbacks import HFCheckpoint
from verl_lightning.models.config import LoraConfig, OptimConfig
from verl_lightning.modules import RewardModule
from verl_lightning.modules.reward_model import scored_at_the_end
from verl_lightning.types import PreferenceBatch, TokenBatch


def fit(tmp_path, folder, pairs, *callbacks, actor=None, module=None, **options):
    """Metrics of the steps, the module, and its data."""
    seed_everything(0, verbose=False)
    recorder = Recorder()
    config = make_model_config(folder, **{"optim": OptimConfig(lr=1e-3, eps=1e-5, max_grad_norm=0.0)} | (actor or {}))
    reward, data = RewardModule(config, **module or {}), make_pairs(pairs, pairs)
    make_trainer(tmp_path, recorder, *callbacks, enable_checkpointing=bool(callbacks), **options).fit(
        reward, datamodule=data
    )
    return recorder, reward


def batches_of(tmp_path, module, pairs):
    data, trainer = make_pairs(pairs), make_trainer(tmp_path)
    trainer.strategy.connect(module)
    data.trainer = trainer
    data.setup("fit")
    return [PreferenceBatch(**fields) for fields in data.train_dataloader()]


def test_rewards_are_those_of_transformers(tmp_path, reward_folder, pair_file):
    """Of the folder that training starts from, head included: the first loss says so."""
    recorder, module = fit(tmp_path, reward_folder, pair_file, max_steps=1, module={"center_rewards_coefficient": 0.01})
    batch = batches_of(tmp_path, module, pair_file)[0]
    model = AutoModelForSequenceClassification.from_pretrained(reward_folder)
    with torch.no_grad():
        rewards = model(batch.input_ids, attention_mask=batch.attention_mask.long()).logits.squeeze(-1)
    chosen, rejected = rewards[0::2], rewards[1::2]
    expected = -torch.nn.functional.logsigmoid(chosen - rejected) + 0.01 * (chosen + rejected) ** 2
    assert recorder.column("train/loss") == pytest.approx([expected.mean().item()], rel=1e-5)
    assert recorder.column("margin") == pytest.approx([(chosen - rejected).mean().item()], rel=1e-4)
    assert recorder.column("mean_reward") == pytest.approx([rewards.mean().item()], rel=1e-4)


def test_the_written_folder_gives_the_rewards_that_were_learnt(tmp_path, tiny_folder, pair_file):
    """A language model's reward starts at 0; what is written is a reward model, from which training goes on."""
    recorder, module = fit(tmp_path, tiny_folder, pair_file, HFCheckpoint(dirpath=str(tmp_path / "hf")), max_steps=8)
    assert recorder.column("train/loss")[0] == pytest.approx(0.693147, abs=1e-6)
    assert recorder.column("train/loss")[-1] < 0.69
    batch = batches_of(tmp_path, module, pair_file)[0]
    with torch.no_grad():
        scored = scored_at_the_end(batch, pad_token_id=module.tokenizer.pad_token_id)
        ours = torch.where(scored.response_mask, module.policy(scored).values, 0.0).sum(-1)
        written = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf/last")
        theirs = written(batch.input_ids, attention_mask=batch.attention_mask.long()).logits.squeeze(-1)
    assert type(written).__name__ == "LlamaForSequenceClassification"
    assert_close(theirs, ours, rtol=1e-5, atol=1e-6)

    again, _ = fit(tmp_path, tmp_path / "hf/last", pair_file, max_steps=1)
    expected = -torch.nn.functional.logsigmoid(ours[0::2] - ours[1::2]).mean()
    assert again.column("train/loss") == pytest.approx([expected.item()], rel=1e-5)


def test_packing_and_a_budget_change_no_gradient(tmp_path, reward_folder, pair_file):
    expected, module = fit(tmp_path, reward_folder, pair_file)
    options = {"actor": {"packing": "always"}, "module": {"max_tokens_per_micro_batch": 140}}
    actual, other = fit(tmp_path, reward_folder, pair_file, **options)
    assert_near(
        (actual.column("train/grad_norm"), dict(other.state_dict())),
        (expected.column("train/grad_norm"), dict(module.state_dict())),
    )


@pytest.mark.parametrize(("ids", "scored"), [([5, 6, 1, 0], 2), ([5, 6, 7, 1], 3), ([5, 6, 0, 0], 1)])
def test_the_last_token_that_is_no_padding_is_scored(ids, scored):
    """As transformers does it, also where the end token is the padding."""
    batch = TokenBatch(
        input_ids=torch.tensor([ids]),
        attention_mask=torch.tensor([[True, True, True, ids[3] != 0]]),
        response_mask=torch.ones(1, 3, dtype=torch.bool),
    )
    found = scored_at_the_end(batch, pad_token_id=0)
    assert found.response_mask.nonzero().tolist() == [[0, scored]]  # predicted from the column `scored`
    assert found.input_ids[0, : scored + 1].tolist() == ids[: scored + 1]
    assert found.attention_mask.sum() == scored + 2


def test_adapters_are_merged_into_what_is_written(tmp_path, tiny_folder, pair_file):
    lora = {"lora": LoraConfig(rank=4)}
    with pytest.raises(MisconfigurationException, match="writes a reward model as a whole.* `merge_adapters: true`"):
        fit(tmp_path, tiny_folder, pair_file, HFCheckpoint(dirpath=str(tmp_path / "hf")), actor=lora)
    saver = HFCheckpoint(dirpath=str(tmp_path / "hf"), merge_adapters=True)
    fit(tmp_path, tiny_folder, pair_file, saver, actor=lora, max_steps=1)
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf/last")


def test_a_negative_weight_of_the_centre_is_refused(tiny_folder):
    with pytest.raises(ValueError, match="`model.center_rewards_coefficient` must not be negative, got -1"):
        RewardModule(make_model_config(tiny_folder), center_rewards_coefficient=-1.0)
