"""Dynamic sampling under resume: groups that wait for others are in the checkpoint."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from lightning.pytorch import Callback

from tests.modules.test_ppo_options import make_scored
from tests.runs import make_ppo, make_prompts, make_reward, make_rollout, make_trainer
from verl_lightning.modules.ppo_config import DynamicSamplingConfig
from verl_lightning.modules.scored_rollout import ScoredRollout, deal_out


class SaveWhileGathering(Callback):
    """Saves as soon as groups wait."""

    def __init__(self, path):
        self.path, self.num_waiting = path, 0

    def on_train_batch_end(self, trainer, pl_module, *args):
        if self.num_waiting == 0 and pl_module.gathering.batches:
            self.num_waiting = sum(part.num_groups for part in pl_module.gathering.batches)
            trainer.save_checkpoint(self.path)


def fit(folder, prompt_file, tmp_path, *callbacks, ckpt_path=None):
    """Weights after two iterations."""
    reward = make_reward("same_on_even_rows")  # half of each batch is without signal
    module = make_ppo(folder, reward=reward, dynamic_sampling=DynamicSamplingConfig(max_batches=20))
    trainer = make_trainer(tmp_path, make_rollout(), *callbacks, max_steps=2)
    trainer.fit(module, datamodule=make_prompts(prompt_file), ckpt_path=ckpt_path, weights_only=True)
    return module.state_dict()


def test_a_run_resumed_while_groups_wait_equals_the_uninterrupted_one(tiny_folder, prompt_file, tmp_path):
    saver = SaveWhileGathering(tmp_path / "cut.ckpt")
    expected = fit(tiny_folder, prompt_file, tmp_path, saver)

    resumed = fit(tiny_folder, prompt_file, tmp_path, ckpt_path=saver.path)

    assert saver.num_waiting == 2
    assert all(torch.equal(weight, resumed[name]) for name, weight in expected.items())


@pytest.mark.parametrize(("ranks", "responses"), [(2, [["0", "1"], ["2", "3"]]), (1, [["0", "1", "2", "3"]])])
def test_waiting_groups_are_dealt_out_to_the_ranks_there_are(ranks, responses):
    saved = [[make_scored([1.0, 0.0]).state_dict()], [make_renamed("2", "3").state_dict()]]

    dealt = [deal_out(saved, rank=rank, ranks=ranks, pad_token_id=0) for rank in range(ranks)]

    assert [part.reward_result.responses for (part,) in dealt] == responses


def test_waiting_groups_keep_the_batchs_order():
    """Rank 0 had prompts 0 and 2 of the batch, rank 1 prompts 1 and 3: all of them are again in order on one rank."""
    saved = [[make_scored([1.0, 0.0, 0.0, 1.0]).state_dict()], [make_renamed("p1", "p1", "p3", "p3").state_dict()]]

    (whole,) = deal_out(saved, rank=0, ranks=1, pad_token_id=0)

    assert whole.reward_result.responses == ["0", "1", "p1", "p1", "2", "3", "p3", "p3"]


def test_failures_are_counted_once_after_the_ranks_have_changed():
    saved = [[with_failures(make_scored([1.0, 0.0])).state_dict()], [with_failures(make_scored([])).state_dict()]]

    dealt = [deal_out(saved, rank=rank, ranks=3, pad_token_id=0)[0] for rank in range(3)]

    assert [part.reward_result.num_errors for part in dealt] == [6, 0, 0]
    assert [part.num_groups for part in dealt] == [1, 0, 0]


def with_failures(scored) -> ScoredRollout:
    return dataclasses.replace(scored, reward_result=dataclasses.replace(scored.reward_result, num_errors=3))


def test_more_ranks_than_before_share_the_groups():
    saved = [[make_scored([1.0, 0.0, 0.0, 1.0]).state_dict()]]

    dealt = [deal_out(saved, rank=rank, ranks=2, pad_token_id=0) for rank in range(2)]

    assert [part.reward_result.responses for (part,) in dealt] == [["0", "1"], ["2", "3"]]


def make_renamed(*responses) -> ScoredRollout:
    """Groups of two with these responses."""
    scored = make_scored([0.0, 1.0] * (len(responses) // 2))
    scored.reward_result.responses[:] = responses
    return scored
