"""The bound on age, and each prompt once: with engines of any speed, kills at any step, and other ranks after them."""

from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import Future
from contextlib import nullcontext
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_lightning.callbacks import HFRollout
from verl_lightning.callbacks.prompt_stream import Group, Prompt
from verl_lightning.callbacks.rollout_queue import RolloutQueue
from verl_lightning.callbacks.rollout_supply import GroupSupply
from verl_lightning.data.loader import TrainLoader
from verl_lightning.data.prompts import PromptDataset
from verl_lightning.rollout.base import Completion, SamplingConfig
from verl_lightning.rollout.stepping import SteppingEngine

NUM_ROWS, SAMPLES, LONGEST = 14, 2, 6


class RandomEngine(SteppingEngine):
    """Writes the version of its weights as each token; how many steps of it a token takes differs by request."""

    def __init__(self, speeds):
        super().__init__()
        self.speeds, self.version, self.open = speeds, 0, {}

    start = weight_sums = recipe = drop_caches = None

    def load_weights(self, weights, version):
        self.version = version

    def add(self, key, request):
        length, turns = 1 + request.seed % LONGEST, self.speeds[request.seed % len(self.speeds)]
        self.open[key] = ([], length, turns, [0])

    def step(self):
        for tokens, _, turns, count in self.open.values():
            count[0] += 1
            tokens += [self.version] * (count[0] % turns == 0)
        ended = [key for key, (tokens, length, *_) in self.open.items() if len(tokens) == length]
        return [(key, self._answer(self.open.pop(key)[0])) for key in ended]

    def _answer(self, tokens):
        return Completion(tokens, [0.0] * len(tokens), False, tokens[-1], versions=tokens)

    def abort(self):
        self.open = {}

    def stop(self):
        pass


class FakeRollout(HFRollout):
    """Has no model whose weights it could send."""

    def _weights(self, module):
        return []


def make_loader(rank, ranks, state=None):
    ids = [[row + 1] for row in range(NUM_ROWS)]
    source = PromptDataset([{}] * NUM_ROWS, ids, list(range(NUM_ROWS)), pad_token_id=0)
    loader = TrainLoader(source, batch_size=4 // ranks, rank=rank, world_size=ranks, shuffle=True, seed=3)
    if state is not None:
        loader.load_state_dict(state)
    return loader


def make_module(loader, step, metrics, most):
    """A module whose other ranks are as far in the data as the one that is farthest."""
    epoch_loop = SimpleNamespace(total_batch_idx=step)
    trainer = SimpleNamespace(
        train_dataloader=loader, global_step=step, training=True, fit_loop=SimpleNamespace(epoch_loop=epoch_loop)
    )
    contract = SimpleNamespace(
        model_parallel_size=1,
        model_parallel_rank=0,
        data_parallel_size=loader.world_size,
        data_parallel_rank=loader.rank,
        gather_over_data_parallel=lambda value: [value, *most] if isinstance(value, int) else [value],
        gather_over_model_parallel=lambda value: [value],
        sum_over_data_parallel=lambda value: value,
    )
    return SimpleNamespace(
        trainer=trainer,
        contract=contract,
        needs_greedy_rollout=False,
        dynamic_sampling=None,
        begin_judging=lambda *_: None,
        phase=lambda name: nullcontext(),
        log=lambda name, value, **_: metrics.setdefault(name, []).append(value),
        tokenizer=SimpleNamespace(pad_token_id=0),
        device=torch.device("cpu"),
    )


async def turns(number):
    """So long the policy learns."""
    for _ in range(number):
        await asyncio.sleep(0)


class Life:
    """A run from one checkpoint to the next, on some ranks, with a bound."""

    def __init__(self, ranks, num_steps, bound, *, speeds, learning=(3,), in_flight="finish", saved=None):
        self.options = {"max_staleness": bound, "in_flight": in_flight if bound else "finish"}
        self.speeds, self.learning = speeds, learning
        self.start, self.end = saved["step"] if saved else 0, (saved["step"] if saved else 0) + num_steps
        self.rows, self.oldest, self.most = [], [], []
        lives = [self.run(rank, ranks, saved) for rank in range(ranks)]
        supplies = [rollout._supply for rollout, _ in lives if rollout._supply]
        self.most += [supply.queue.stream.cursor.batch for supply in supplies]
        states = [self.save(*life) for life in lives]
        groups = [group for state in states for group in state.get("groups", [])]
        self.groups, self.saved = (
            groups,
            {
                "step": self.end,
                "loader": lives[0][1].trainer.train_dataloader.state_dict(),
                "queue": {"rollout_queue": states[0] | {"groups": groups}} if states[0] else {},
            },
        )

    def run(self, rank, ranks, saved):
        loader, metrics, oldest = make_loader(rank, ranks, saved and saved["loader"]), {}, []
        rollout = FakeRollout(SamplingConfig(num_samples=SAMPLES, max_new_tokens=LONGEST), **self.options)
        rollout._engine = RandomEngine(self.speeds)
        module = make_module(loader, self.start, metrics, self.most)
        rollout.on_load_checkpoint(module.trainer, module, saved["queue"] if saved else {})
        rollout.on_train_start(module.trainer, module)
        batches = (batch for _ in range(20) for batch in loader)
        for step, batch in zip(range(self.start, self.end), batches, strict=False):
            module.trainer.global_step = module.trainer.fit_loop.epoch_loop.total_batch_idx = step
            rollout.on_train_batch_start(module.trainer, module, batch, step)
            self.rows += batch.row_index.tolist()
            assert batch.rollout.prompt_index.tolist() == [row for row in range(len(batch)) for _ in range(SAMPLES)]
            if (supply := rollout._supply) is not None:
                versions = batch.rollout.response_ids[batch.rollout.response_mask].tolist()
                oldest.append(step - min(supply.queue.steps[version] for version in versions))
            if supply is not None and supply.background is not None:
                supply.background.submit(turns(self.learning[step % len(self.learning)])).result()
        module.trainer.global_step = self.end
        assert metrics.get("rollout/staleness/max", []) == oldest
        self.oldest += oldest
        return rollout, module

    def save(self, rollout, module):
        state = {}
        rollout.on_save_checkpoint(module.trainer, module, state)
        rollout.teardown(module.trainer, module, "fit")
        return state.get("rollout_queue", {})


speeds = st.lists(st.integers(1, 40), min_size=1, max_size=5)
lives = st.lists(st.tuples(st.sampled_from([1, 2]), st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=3)


@settings(max_examples=25, deadline=None, database=None, derandomize=True)
@given(speeds, speeds, lives, st.sampled_from(["finish", "continue"]))
def test_no_token_is_older_than_the_bound_and_each_prompt_comes_once(speeds, learning, lives, in_flight):
    """A run has some lives: on so many ranks, for so many steps, with this bound."""
    saved, rows, waiting = None, [], []
    for ranks, num_steps, bound in lives:
        life = Life(ranks, num_steps, bound, speeds=speeds, learning=learning, in_flight=in_flight, saved=saved)
        saved, rows = life.saved, rows + life.rows
        waiting = [row for group in life.groups for *_, row in group["prompts"]]
        assert max(life.oldest, default=0) <= bound
    assert Counter(rows + waiting) == Counter(rows_in_order((len(rows) + len(waiting)) // 4))


def rows_in_order(num_batches):
    """The rows of so many batches of a run without a queue."""
    loader = make_loader(0, 1)
    batches = (batch for _ in range(20) for batch in loader)
    return [row for batch in islice(batches, num_batches) for row in batch.row_index.tolist()]


@settings(max_examples=10, deadline=None, database=None, derandomize=True)
@given(speeds, st.integers(1, 4))
def test_in_order_steps_learn_from_the_batches_of_a_run_without_a_queue(speeds, bound):
    assert Life(1, 6, bound, speeds=speeds).rows == rows_in_order(6)


def test_a_long_response_lets_others_pass_until_it_would_be_too_old():
    """Every second response is there only when its step can't do without it; two steps are asked for ahead."""
    kinds, bound, prompts, ages = ["all"] * 4, 4, [], []

    def begin(groups):
        for group in groups:
            group.answer = Future()
            if group.prompt.place % 2:
                group.answer.set_result([])
        long_ones = (group for group in queue.groups if group.asked is not None and not group.is_done)
        while queue.choose(kinds) is None:
            next(long_ones).answer.set_result([])

    queue = RolloutQueue(bound, 2, begin)
    batches = ([Group(Prompt(batch, place, 0, place), "all", []) for place in range(4)] for batch in range(99))
    queue.stream = SimpleNamespace(next_batch=lambda: next(batches))
    for step in range(12):
        queue.begin_step(step)
        queue.look_ahead(kinds)
        queue.settle(lambda: queue.choose(kinds) is not None)
        groups = queue.choose(kinds)
        queue.take(groups)
        prompts += [group.prompt for group in groups]
        ages += [step - group.asked for group in groups]

    assert prompts != sorted(prompts)
    assert len(set(prompts)) == len(prompts) == 48
    assert max(ages) == bound


def test_the_responses_that_wait_survive_a_kill_and_others_ranks_get_them():
    first = Life(2, 2, 2, speeds=[1], learning=[50])
    second = Life(1, 1, 2, speeds=[1], saved=first.saved)

    assert [len(group["prompts"]) for group in first.groups] == [4, 4]  # two steps of four prompts
    assert {version for group in first.groups for version in group["completions"]["versions"].tolist()} == {1, 2}
    assert second.oldest == [2]


def test_a_bound_that_is_lowered_has_old_responses_sampled_anew():
    first = Life(1, 2, 4, speeds=[1], learning=[50])

    assert max(Life(1, 3, 1, speeds=[1], saved=first.saved).oldest) == 1


@pytest.mark.parametrize("count", range(1, 7))
def test_only_ranks_that_have_prompts_of_each_step_are_asked_for_some(count):
    """Three of four ranks share the six prompts of a step, and so any part of them."""
    loader = make_loader(0, 1)
    loader.batch_size = 6
    module = make_module(loader, 0, {}, [])
    module.contract.model_parallel_size = 4
    supply = GroupSupply(None, module, 0, keeps_order=True)
    shares = []
    for rank in range(4):
        module.contract.model_parallel_rank = rank
        shares.append(list(supply._own(count)))

    assert sum(shares, []) == list(range(count))
    assert shares[3] == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_staleness": -1}, "`rollout.max_staleness` must not be negative, got -1"),
        ({"in_flight": "abort"}, "`rollout.in_flight: abort` is for responses that are on their way"),
    ],
)
def test_options_without_sense_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        HFRollout(**options)
