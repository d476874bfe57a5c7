"""Histories that are written anew are several trajectories of one episode, which count as one in all that compares."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from torch.testing import assert_close

from tests.environments.worlds import Counting, counting_tokenizer, play, requests_for, write_counting_folder
from tests.processes import on_ranks
from tests.runs import Recorder, make_model_config, make_ppo, make_prompts, make_rollout, make_trainer
from tests.tolerances import assert_near
from verl_lightning.algorithms.advantages.gae import GAE
from verl_lightning.algorithms.advantages.opo import OPO
from verl_lightning.callbacks import SamplesTable
from verl_lightning.environments.config import EpisodesConfig
from verl_lightning.modules.learner import divide
from verl_lightning.modules.ppo_config import CriticConfig, UpdateConfig
from verl_lightning.modules.trajectories import longest_lengths, trajectories_of
from verl_lightning.rollout.completions import pack_completions, to_rollout, unpack_completions
from verl_lightning.strategies import STRATEGIES
from verl_lightning.types import Experience

SPLIT = EpisodesConfig(history="split")


def played(*turns):
    """Episodes of as many turns each, and their requests."""
    rows = [{"turns": count} for count in turns]
    completions = play(Counting, rows, max_new_tokens=8, tokenizer=counting_tokenizer(), history="split")
    return requests_for(rows, max_new_tokens=8), completions


@pytest.fixture(scope="module")
def rollout():
    """One of three trajectories, one of a single one, and one of two."""
    requests, completions = played(3, 1, 2)
    return to_rollout(requests, completions, num_samples=1, pad_token_id=0, device=torch.device("cpu"))


def test_each_history_that_the_template_writes_is_a_trajectory():
    _, (completion,) = played(3)
    tokenizer, episode = counting_tokenizer(), completion.episode
    start = "1" + tokenizer.apply_chat_template([{"role": "user", "content": "5 1"}], tokenize=False)[1:]

    assert tokenizer.decode(episode.past[0].prompt_ids).startswith(start)
    assert [tokenizer.decode(each.token_ids[:1]) for each in episode.past] == ["7", "7"]
    assert tokenizer.decode(completion.prompt_ids)[0] == "5"
    assert [each.rewards for each in episode.past] == [[1.0], [1.0]]
    assert (episode.rewards, episode.reward, episode.num_turns) == ([11.0], 13.0, 3)
    assert len(completion.own_versions) == 6
    assert [each.messages[-1]["content"] for each in episode.past] == ["7", "7"]
    assert unpack_completions(pack_completions([completion]))[0].episode == episode


def test_rows_are_joined_to_episodes_and_parted_again(rollout):
    trajectories = trajectories_of(rollout, pad_token_id=0)

    assert trajectories.episode_index == (0, 0, 0, 1, 2, 2)
    mask = trajectories.rows.response_mask
    assert torch.equal(trajectories.parted(trajectories.joined(mask)), mask)
    joined = trajectories.joined(mask)
    assert joined.sum(-1).tolist() == [6, 2, 4]
    assert joined[0].tolist() == [True, True, False, True, True, False, True, True]
    rewards = trajectories.joined_rewards(torch.tensor([[0.0, 11.0]] * 3))
    assert rewards[0].tolist() == [0, 1, 0, 0, 1, 0, 0, 11]
    assert rewards[1].sum() == 11


def test_the_longest_trajectory_counts_against_limits(rollout):
    assert longest_lengths(rollout).tolist() == [2, 2, 2]
    longer = dataclasses.replace(rollout.episodes[0].past[0], is_own=[True] * 7)
    changed = dataclasses.replace(rollout.episodes[0], past=[longer])
    episodes = (changed, *rollout.episodes[1:])
    assert longest_lengths(dataclasses.replace(rollout, episodes=episodes)).tolist() == [7, 2, 2]


def test_a_rollout_of_single_trajectories_stays_as_it_is(rollout):
    single = rollout.select(slice(1, 2))

    trajectories = trajectories_of(single, pad_token_id=0)

    assert trajectories.episode_index is None
    assert trajectories.rows.input_ids is single.input_ids


class Seen(Callback):
    """Keeps what each iteration learns from."""

    def __init__(self):
        self.found = []

    def on_experience(self, module, scored, experience, rows):
        self.found.append((scored, experience))


def learn(folder, tmp_path, prompts, trainer=None, **parts):
    seed_everything(0, verbose=False)
    seen, recorder = Seen(), Recorder()
    rollout = make_rollout(max_new_tokens=40, environment=Counting, episodes=SPLIT)
    module = make_ppo(folder, **{"reward": "environment"} | parts)
    options = {"max_steps": 2} | (trainer or {})
    table = SamplesTable(train_every_n_steps=1, folder=str(tmp_path / "samples"))
    trainer = make_trainer(tmp_path, rollout, seen, recorder, table, **options)
    trainer.fit(module, make_prompts(prompts, max_prompt_length=200))
    return seen.found, recorder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_counting_folder(tmp_path_factory.mktemp("counting") / "model")


def expected_loss(experience, aggregation):
    """The loss of a policy that has sampled its responses itself, by a slow loop over episodes."""
    episodes = {}
    for row, owner in enumerate(experience.episode_index):
        own = experience.advantages[row][experience.response_mask[row]].tolist()
        episodes.setdefault(owner, []).extend(own)
    counted = [own for own in episodes.values() if own]
    if aggregation == "token-mean":
        return -sum(map(sum, counted)) / sum(map(len, counted))
    if aggregation == "seq-mean-token-sum":
        return -sum(map(sum, counted)) / len(counted)
    return -sum(sum(own) / len(own) for own in counted) / len(counted)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_a_run_learns_from_all_trajectories_as_from_one_episode(aggregation, folder, tmp_path, prompt_file):
    update = UpdateConfig(aggregation=aggregation, mini_batch_size=4, micro_batch_size=3)
    found, recorder = learn(folder, tmp_path, prompt_file, advantage=OPO(), update=update, trainer={"max_steps": 1})

    ((scored, experience),) = found
    episodes, owners = scored.rollout.episodes, list(experience.episode_index)
    rewards = torch.tensor([episode.reward for episode in episodes]).view(4, 4)
    lengths = torch.zeros(16).index_add(0, torch.tensor(owners), experience.response_mask.sum(-1).float()).view(4, 4)
    scores = rewards - (lengths * rewards).sum(-1, keepdim=True) / lengths.sum(-1, keepdim=True)
    of_rows = scores.flatten()[owners]
    assert len(experience) > 16
    assert_close(experience.advantages, torch.where(experience.response_mask, of_rows[:, None], 0.0))
    assert_close(scored.reward_result.rewards, rewards.flatten())
    assert recorder.column("actor/pg_loss") == [pytest.approx(expected_loss(experience, aggregation), 1e-3, 1e-5)]
    assert recorder.column("env/Counting/trajectories")[0] == pytest.approx(len(experience) / 16)
    assert recorder.column("rollout_corr/abs_log_prob_gap")[0] < 1e-4


def test_a_critic_sees_an_episode_through(folder, tmp_path, prompt_file):
    """And people do, on the page of samples."""
    critic = CriticConfig(model=make_model_config(folder))
    found, recorder = learn(folder, tmp_path, prompt_file, advantage=GAE(gamma=1.0, lam=1.0), critic=critic)

    scored, experience = found[0]
    rewards = torch.tensor([episode.reward for episode in scored.rollout.episodes])
    first = [experience.episode_index.index(row) for row in range(16)]
    returns = [experience.returns[row][experience.response_mask[row]][0] for row in first]
    assert_near(torch.stack(returns), rewards)
    assert min(recorder.column("critic/grad_norm")) > 0
    rows = [json.loads(line) for line in (tmp_path / "samples/train_step=1.jsonl").read_text().splitlines()]
    for row, episode in zip(rows, scored.rollout.episodes, strict=False):
        assert [each["token_ids"] for each in row.get("past", [])] == [each.token_ids for each in episode.past]
        own = [turn for turn in row["turns"] if turn["is_trained"]]
        assert sum(turn["reward"] for turn in own) == pytest.approx(episode.reward)
        assert own[-1].get("trajectory", 1) == 1 + len(episode.past)
    assert max(len(row.get("past", [])) for row in rows) > 0


def test_parts_hold_whole_episodes(rollout):
    trajectories = trajectories_of(rollout, pad_token_id=0)
    rows = trajectories.rows
    zeros = torch.zeros(rows.response_mask.shape)
    whole = Experience(
        input_ids=rows.input_ids,
        attention_mask=rows.attention_mask,
        response_mask=rows.response_mask,
        rollout_log_probs=zeros,
        old_log_probs=zeros,
        advantages=zeros,
        episode_index=trajectories.episode_index,
    )

    first, second = divide(whole, 2)

    assert (len(first), len(second)) == (4, 2)
    assert first.episode_tokens.tolist() == [6, 6, 6, 2]
    assert second.episode_tokens.tolist() == [4, 4]


def learn_on_rank(folder, tmp_path, prompts):
    """What two ranks learn: under ddp in micro-batches of as many rows, under fsdp by a budget of tokens."""
    updates = {
        "ddp": UpdateConfig(mini_batch_size=2, micro_batch_size=1),
        "fsdp": UpdateConfig(mini_batch_size=2, max_tokens_per_micro_batch=250),
    }
    told = []
    for name, update in updates.items():
        trainer = {"strategy": STRATEGIES[name](), "devices": 2}
        found, recorder = learn(folder, tmp_path / name, prompts, update=update, trainer=trainer)
        told.append([len(found[0][1]), recorder.column("actor/pg_loss"), recorder.column("actor/grad_norm")])
    return told


@pytest.mark.slow
def test_ranks_with_different_numbers_of_trajectories_learn_together(folder, tmp_path, prompt_file):
    _, alone = learn(folder, tmp_path, prompt_file)

    ranks = on_ranks(2, learn_on_rank, folder, tmp_path, prompt_file)

    for (rows, *told), (other_rows, *others) in zip(*ranks, strict=True):
        assert rows != other_rows
        assert told == others
        assert told[0][0] == pytest.approx(alone.column("actor/pg_loss")[0], rel=1e-3, abs=1e-5)
        assert told[1][0] == pytest.approx(alone.column("actor/grad_norm")[0], rel=1e-3)
