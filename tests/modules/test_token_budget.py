"""Micro-batches of a token budget: every row once, never over the budget, about equal compute, as many on all ranks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from lightning.pytorch import seed_everything
from torch.testing import assert_close

from tests.processes import on_ranks
from tests.runs import Recorder, make_chats, make_model_config, make_ppo, make_prompts, make_rollout, make_sft
from tests.runs import make_trainer as new_trainer
from tests.tiny import write_uneven_chat_file
from tests.tolerances import assert_near
from verl_lightning.algorithms.advantages.gae import GAE
from verl_lightning.modules.micro_batches import BatchSplitter
from verl_lightning.modules.ppo_config import CriticConfig, UpdateConfig
from verl_lightning.modules.token_budget import TokenBudget
from verl_lightning.strategies import STRATEGIES
from verl_lightning.types import RowLength, Scores, TokenBatch

SHAPES = {
    "equal": lambda: torch.full((12,), 8),
    "one long": lambda: torch.tensor([32, *[1] * 20]),
    "half the budget and a bit": lambda: torch.full((9,), 17),
    "a single row": lambda: torch.tensor([32]),
    "long tail": lambda: (32 * torch.rand(40) ** 4).long() + 1,
    "uniform": lambda: torch.randint(1, 33, (50,)),
    "empty rows": lambda: torch.tensor([0, 0, 3, 0]),
}


def make_budget(**changes):
    return TokenBudget(**{"max_tokens": 32, "packs": True, "attention_cost": 0.1} | changes)


def sizes(lengths):
    """Rows whose prompts are a third of them."""
    return [RowLength(n, scored=0, prompt=n // 3, response=n - n // 3) for n in lengths.tolist()]


def content(rows, part, packs):
    """What a model reads of a micro-batch."""
    own = [rows[index] for index in part]
    if packs:
        return sum(row.tokens for row in own)
    return len(own) * (max(row.prompt for row in own) + max(row.response for row in own))


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(20))
def test_every_row_comes_once_and_the_budget_holds(shape, packs, seed):
    torch.manual_seed(seed)
    rows, budget = sizes(SHAPES[shape]()), make_budget(packs=packs)
    needed = len(budget.divide(rows))
    for count in (needed, needed + 1, needed + 5, 1000):
        parts = budget.divide_into(rows, count)
        assert sorted(index for part in parts for index in part) == list(range(len(rows)))
        assert len(parts) == min(count, len(rows))
        assert all(content(rows, part, packs) <= 32 for part in parts)


def test_no_more_micro_batches_than_needed():
    """32 tokens hold four rows of 8, and two rows of 16 with nothing between."""
    assert len(make_budget().divide(sizes(torch.full((12,), 8)))) == 3
    assert len(make_budget().divide(sizes(torch.tensor([16, 16, 16, 16])))) == 2
    assert len(make_budget().divide(sizes(torch.tensor([17, 17, 15, 15])))) == 2


def test_compute_is_balanced_with_its_quadratic_part():
    """A row of 20 costs 20 + 40, one of 4 costs 4 + 1.6: twelve of these cost 67.2, the others 65.6."""
    rows = sizes(torch.tensor([20, *[4] * 13]))
    assert [len(part) for part in make_budget(max_tokens=64).divide_into(rows, 2)] == [12, 2]
    linear = make_budget(max_tokens=64, attention_cost=0.0).divide_into(rows, 2)
    assert sorted(sum(rows[index].tokens for index in part) for part in linear) == [36, 36]


def test_a_row_over_the_budget_is_refused():
    with pytest.raises(
        ValueError, match=r"a sequence of 33 tokens does not fit into `max_tokens_per_micro_batch` \(32\)"
    ):
        make_budget().divide(sizes(torch.tensor([4, 33])))


def make_batch(lengths, temperature=0.7):
    """Rows of a prompt of two and a response."""
    width = max(lengths)
    response = torch.arange(width) < torch.tensor(lengths)[:, None]
    mask = torch.cat([torch.ones(len(lengths), 2, dtype=torch.bool), response], dim=1)
    ids = torch.arange(mask.numel()).view_as(mask)
    return TokenBatch(input_ids=ids, attention_mask=mask, response_mask=response, temperature=temperature)


class Model:
    """What a splitter asks of a scorer."""

    attention_cost = 0.01

    def packs_batch(self, batch):
        return True


class Alone:
    """The only rank."""

    def gather_over_data_parallel(self, value):
        return [value]


def test_scores_come_back_in_the_order_of_the_batch():
    batch = make_batch([3, 9, 1, 5, 2])
    (split,) = BatchSplitter(contract=Alone(), micro_batch_size=8, max_tokens=12).split(Model(), [batch])
    scores = [Scores(log_probs=torch.where(part.response_mask, part.response_ids, 0).float()) for part in split.parts]
    assert len(split.parts) == 3
    assert_close(split.join(scores).log_probs, torch.where(batch.response_mask, batch.response_ids, 0).float())
    for part in split.parts:
        assert part.row_lengths == dataclasses.replace(part, row_lengths=None).known_lengths()
        assert part.temperature == 0.7


class TwoRanks:
    """This rank needs one micro-batch, the other three for the first batch; or it has a row too long."""

    def __init__(self, problem=None):
        self.problem = problem

    def gather_over_data_parallel(self, value):
        return [value, (self.problem, [3, 1])]


def test_a_rank_makes_as_many_micro_batches_as_the_one_that_needs_most():
    splitter = BatchSplitter(contract=TwoRanks(), micro_batch_size=8, max_tokens=64)
    first, second = splitter.split(Model(), [make_batch([3, 4, 5, 6]), make_batch([3, 4])])
    assert (len(first.parts), len(second.parts)) == (3, 1)


def test_every_rank_hears_of_a_row_that_is_too_long_for_one():
    splitter = BatchSplitter(contract=TwoRanks("a sequence of 99 tokens"), micro_batch_size=8, max_tokens=64)
    with pytest.raises(ValueError, match="data-parallel rank 1: a sequence of 99 tokens"):
        splitter.split(Model(), [make_batch([3]), make_batch([4])])


@pytest.mark.parametrize("packing", ["always", "never"])
@pytest.mark.parametrize("critic", [False, True])
def test_ppo_learns_the_same_within_a_budget(packing, critic, tmp_path, tiny_folder, prompt_file):
    weights = []
    for update in (
        UpdateConfig(mini_batch_size=2, epochs=2),
        UpdateConfig(mini_batch_size=2, epochs=2, max_tokens_per_micro_batch=40),
    ):
        seed_everything(0, verbose=False)
        config = make_model_config(tiny_folder, packing=packing)
        parts = {"advantage": GAE(), "critic": CriticConfig(model=config)} if critic else {}
        module = make_ppo(tiny_folder, actor=config, update=update, **parts)
        new_trainer(tmp_path, make_rollout()).fit(module, make_prompts(prompt_file, max_prompt_length=30))
        weights.append(module.state_dict())
    assert_near(weights[1], weights[0])


@pytest.fixture
def chats(tmp_path):
    """Chats with answers of unequal lengths."""
    return write_uneven_chat_file(tmp_path / "chats.jsonl", num_rows=40)


def fit_sft(path, folder, chats, ranks, strategy, accumulated, budget, packing):
    """Final weights and logged losses of a run whose batches make several micro-batches under a budget."""
    seed_everything(0, verbose=False)
    recorder = Recorder()
    module = make_sft(folder, actor=make_model_config(folder, packing=packing), max_tokens_per_micro_batch=budget)
    strategy = STRATEGIES[strategy]() if strategy in STRATEGIES else strategy
    trainer = new_trainer(path, recorder, strategy=strategy, devices=ranks, accumulate_grad_batches=accumulated)
    trainer.fit(module, make_chats(chats, batch_size=8 // ranks, max_length=45))
    weights = {name: weight.clone() for name, weight in module.contract.named_weights(module.policy)}
    return weights, recorder.column("train/loss")


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "auto"), (2, "ddp"), (2, "fsdp")])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_sft_learns_the_same_within_a_budget(ranks, strategy, accumulated, tmp_path, tiny_folder, chats):
    weights, losses = fit_sft(tmp_path, tiny_folder, chats, 1, "auto", accumulated, None, "never")
    arguments = (tmp_path, tiny_folder, chats, ranks, strategy, accumulated, 45, "always")
    for actual, other in on_ranks(ranks, fit_sft, *arguments):
        assert_near((other, actual), (losses, weights))


def test_a_budget_must_hold_the_longest_chat(tmp_path, tiny_folder, chats):
    module = make_sft(tiny_folder, max_tokens_per_micro_batch=30)
    with pytest.raises(
        ValueError, match=r"`model.max_tokens_per_micro_batch` \(30\) is less than one chat may have .*, 45\)"
    ):
        new_trainer(tmp_path).fit(module, make_chats(chats, max_length=45))


def test_two_sizes_of_a_micro_batch_are_refused():
    with pytest.raises(ValueError, match="both say how large a micro-batch is"):
        UpdateConfig(micro_batch_size=4, max_tokens_per_micro_batch=1000)


@pytest.mark.parametrize("make", [UpdateConfig, lambda **options: make_sft("nowhere", **options)])
def test_an_empty_budget_is_refused(make):
    with pytest.raises(ValueError, match="`model.(update.)?max_tokens_per_micro_batch` must be at least 1, got 0"):
        make(max_tokens_per_micro_batch=0)


def test_a_budget_that_grows_gives_a_longer_row_a_micro_batch_of_its_own():
    rows = [RowLength(n, n - 1, 1, n - 1) for n in (50, 10, 10, 10)]
    budget = TokenBudget(max_tokens=20, packs=True, attention_cost=0.0, grows=True)
    assert [0] in budget.divide(rows)
