"""The bound on age, and each prompt once: with engines of any speed, kills at any step, and other ranks after them."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_lightning.callbacks import HFRollout
from verl_lightning.data.loader import TrainLoader
from verl_lightning.data.prompts import PromptDataset
from verl_lightning.rollout.base import Completion, SamplingConfig
from verl_lightning.rollout.completions import pack_completions, unpack_completions
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


def make_module(loader, step, metrics):
    epoch_loop = SimpleNamespace(total_batch_idx=step)
    trainer = SimpleNamespace(
        train_dataloader=loader, global_step=step, training=True, fit_loop=SimpleNamespace(epoch_loop=epoch_loop)
    )
    contract = SimpleNamespace(
        model_parallel_size=1,
        model_parallel_rank=0,
        gather_over_data_parallel=lambda value: [value],
        gather_over_model_parallel=lambda value: [value],
        sum_over_data_parallel=lambda value: value,
    )
    return SimpleNamespace(
        trainer=trainer,
        contract=contract,
        needs_greedy_rollout=False,
        phase=lambda name: nullcontext(),
        log=lambda name, value, **_: metrics.setdefault(name, []).append(value),
        tokenizer=SimpleNamespace(pad_token_id=0),
        device=torch.device("cpu"),
    )


async def turns(number):
    """So long the policy learns."""
    for _ in range(number):
        await asyncio.sleep(0)


def run_rank(rank, ranks, start, num_steps, learning, saved, bound, speeds, in_flight):
    """One rank from a step on; returns the rows and the ages of each of its steps, and what it saves after them."""
    metrics, rows, oldest = {}, [], []
    loader = make_loader(rank, ranks, saved and saved["loader"])
    rollout = FakeRollout(
        SamplingConfig(num_samples=SAMPLES, max_new_tokens=LONGEST), max_staleness=bound, in_flight=in_flight
    )
    rollout._engine = RandomEngine(speeds)
    module = make_module(loader, start, metrics)
    rollout.on_load_checkpoint(module.trainer, module, saved["queue"] if saved else {})
    rollout.on_train_start(module.trainer, module)
    batches = (batch for _ in range(9) for batch in loader)
    for step, batch in zip(range(start, start + num_steps), batches, strict=False):
        module.trainer.global_step = module.trainer.fit_loop.epoch_loop.total_batch_idx = step
        rollout.on_train_batch_start(module.trainer, module, batch, step)
        rows += batch.row_index.tolist()
        steps = rollout._queue.steps
        versions = batch.rollout.response_ids[batch.rollout.response_mask].tolist()
        oldest.append(step - min(steps[version] for version in versions))
        assert batch.rollout.prompt_index.tolist() == [row for row in range(len(batch)) for _ in range(SAMPLES)]
        rollout._queue.background.submit(turns(learning[step % len(learning)])).result()
    module.trainer.global_step = start + num_steps
    state = {"loader": loader.state_dict(), "queue": {}}
    rollout.on_save_checkpoint(module.trainer, module, state["queue"])
    rollout.teardown(module.trainer, module, "fit")
    assert metrics["rollout/staleness/max"] == oldest
    return rows, oldest, state


def joined(states):
    """What all ranks save together."""
    queues = [state["queue"]["rollout_queue"] for state in states]
    completions = [completion for queue in queues for completion in unpack_completions(queue["completions"])]
    lists = {name: [value for queue in queues for value in queue[name]] for name in ("prompts", "sizes")}
    queue = {"completions": pack_completions(completions), "steps": queues[0]["steps"], "data": "", **lists}
    return {"loader": states[0]["loader"], "queue": {"rollout_queue": queue}}


speeds = st.lists(st.integers(1, 40), min_size=1, max_size=5)
lives = st.lists(st.tuples(st.sampled_from([1, 2]), st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=3)


@settings(max_examples=25, deadline=None, database=None, derandomize=True)
@given(speeds, speeds, lives, st.sampled_from(["finish", "continue"]))
def test_no_token_is_older_than_the_bound_and_each_prompt_comes_once(speeds, learning, lives, in_flight):
    """A run has some lives: on so many ranks, for so many steps, with this bound."""
    step, saved, rows = 0, None, []
    for ranks, num_steps, bound in lives:
        found = [
            run_rank(rank, ranks, step, num_steps, learning, saved, bound, speeds, in_flight) for rank in range(ranks)
        ]
        step, saved = step + num_steps, joined([state for *_, state in found])
        rows += [row for group in zip(*(own for own, *_ in found), strict=True) for row in group]
        assert all(age <= bound for _, oldest, _ in found for age in oldest)
    expected = [row for _, batch in zip(range(step), make_epochs(), strict=False) for row in batch.row_index.tolist()]
    assert Counter(rows) == Counter(expected)


def make_epochs():
    """The batches of a run without a queue."""
    loader = make_loader(0, 1)
    return (batch for _ in range(9) for batch in loader)


def test_the_responses_that_wait_survive_a_kill_and_others_ranks_get_them():
    saved = [run_rank(rank, 2, 0, 2, [50], None, 2, [1], "finish")[2] for rank in range(2)]
    both = joined(saved)

    versions = both["queue"]["rollout_queue"]["completions"]["versions"]
    rows, oldest, _ = run_rank(0, 1, 2, 1, [1], both, 2, [1], "finish")

    assert len(both["queue"]["rollout_queue"]["prompts"]) == 8  # two steps of four prompts
    assert set(versions.tolist()) == {1, 2}
    assert oldest == [2]


def test_a_bound_that_is_lowered_has_old_responses_sampled_anew():
    saved = run_rank(0, 1, 0, 2, [50], None, 4, [1], "finish")[2]

    _, oldest, _ = run_rank(0, 1, 2, 3, [1], saved, 1, [1], "finish")

    assert oldest == [0, 1, 1]


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
