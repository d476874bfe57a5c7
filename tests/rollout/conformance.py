"""What every engine does, wherever it is placed: the checks of `test_conformance.py` and `test_vllm_conformance.py`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from tests.rollout.asking import Prompts, sample
from tests.rollout.vllm_parts import PAD, make_prompts, weights_of
from verl_lightning.models.build import build_scorer
from verl_lightning.models.config import ModelConfig
from verl_lightning.rollout.background import Background
from verl_lightning.rollout.base import Completion, Engine, Request, SamplingConfig
from verl_lightning.rollout.completions import answer, make_requests, to_rollout, wait_for
from verl_lightning.rollout.hf import HFEngine
from verl_lightning.rollout.process import EngineDiedError

ENDS = list(range(5, 102, 4))
SAMPLING = SamplingConfig(num_samples=4, max_new_tokens=8)


@runtime_checkable
class Sleeper(Protocol):
    """An engine that can give its memory back."""

    def sleep(self) -> None:
        """Gives it back until weights are loaded next."""


@dataclass
class Bench:
    """An engine to check, started on the CPU."""

    folder: Path
    """The policy's Hugging Face folder."""

    engine: Engine
    """Engine whose responses end with one of `ENDS`."""

    pids: Callable[[], list[int]] | None = None
    """Function that gives the processes of an engine that is not in this one."""

    def __post_init__(self) -> None:
        self.weights = weights_of(AutoModelForCausalLM.from_pretrained(self.folder))
        self.engine.load_weights(self.weights, 1)


def assert_near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Log-probs of two computations in float32."""
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def make_reference(folder: Path, weights: list[tuple[str, torch.Tensor]]) -> HFEngine:
    """The engine that all others are compared with, in this process."""
    engine = HFEngine(ModelConfig(path=str(folder)), eos_token_ids=ENDS, pad_token_id=PAD)
    engine.start(torch.device("cpu"))
    engine.load_weights(weights, 1)
    return engine


def check_same_seeds_give_the_same_responses(bench: Bench) -> None:
    """Whenever they are asked, and in whatever order."""
    prompts = make_prompts(num_samples=4)
    first, again = (sample(bench.engine, prompts, SAMPLING) for _ in range(2))
    turned = sample(bench.engine, Prompts(prompts.tokens[::-1], prompts.seeds[::-1]), SAMPLING)

    assert torch.equal(first.input_ids, again.input_ids)
    assert_near(first.rollout_log_probs, again.rollout_log_probs)
    rows = torch.arange(12).view(3, 4).flip(0).flatten()
    assert torch.equal(turned.select(rows).input_ids, first.input_ids)


def check_greedy_responses_are_the_references(bench: Bench) -> None:
    """Tokens, log-probs, masks and ends."""
    greedy = dataclasses.replace(SAMPLING, num_samples=1, temperature=0.0)
    ours, theirs = (
        sample(each, make_prompts(), greedy) for each in (bench.engine, make_reference(bench.folder, bench.weights))
    )

    for name in ("input_ids", "attention_mask", "response_mask", "is_truncated", "prompt_index"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert_near(ours.rollout_log_probs, theirs.rollout_log_probs)


def check_ids_go_in_and_come_out_as_they_are(bench: Bench) -> None:
    """Special tokens and ends in a prompt too: log-probs are those of the very ids that were asked and answered."""
    prompts = Prompts([[1, 1, 5, 0, 3], [2, 101, 100, 9]], [[1, 2, 3, 4], [5, 6, 7, 8]])

    rollout = sample(bench.engine, prompts, SAMPLING)

    scorer = build_scorer(ModelConfig(path=str(bench.folder)), "policy", trainable=False)
    assert_near(rollout.rollout_log_probs, scorer(rollout).log_probs.where(rollout.response_mask, 0.0))


def check_responses_end_with_their_end_token(bench: Bench) -> None:
    """Which is their last and only one, or at the limit."""
    rollout = sample(bench.engine, make_prompts(num_samples=16), dataclasses.replace(SAMPLING, num_samples=16))

    tokens = [ids[mask].tolist() for ids, mask in zip(rollout.response_ids, rollout.response_mask, strict=True)]
    assert {len(row) < 8 for row in tokens} == {True, False}
    for row, is_truncated in zip(tokens, rollout.is_truncated.tolist(), strict=True):
        assert not set(ENDS) & set(row[:-1])
        assert (row[-1] in ENDS) != is_truncated
        assert len(row) == 8 or not is_truncated


def check_stop_texts_are_followed_or_refused(bench: Bench) -> None:
    """Never passed over."""
    stopping = dataclasses.replace(SAMPLING, stop=[str(digit) for digit in range(10)])
    requests = make_requests(*make_prompts(num_samples=4), stopping)

    with contextlib.suppress(ValueError):  # `HFEngine` refuses them, by name
        free = sample(bench.engine, make_prompts(num_samples=4), SAMPLING)
        completions = wait_for(answer(bench.engine.generate, requests))
        assert sum(len(each.token_ids) for each in completions) < free.response_mask.sum()


def check_completions_tell_the_version_of_their_weights(bench: Bench) -> None:
    """And come from those weights."""
    changed = changed_weights(bench)
    # Greedy, since libraries draw with other random numbers.
    requests = make_requests(*make_prompts(), dataclasses.replace(SAMPLING, num_samples=1, temperature=0.0))
    before = wait_for(answer(bench.engine.generate, requests))
    bench.engine.load_weights(changed, 2)

    after = wait_for(answer(bench.engine.generate, requests))

    bench.engine.load_weights(bench.weights, 1)
    assert {each.weights_version for each in before} == {1}
    assert {each.weights_version for each in after} == {2}
    expected = wait_for(answer(make_reference(bench.folder, changed).generate, requests))
    assert [each.token_ids for each in after] == [each.token_ids for each in expected] != [e.token_ids for e in before]


def check_responses_on_their_way_go_on_with_new_weights(bench: Bench) -> None:
    """Each token has the log-prob that the weights of its version give it: the engine reads all anew with new ones."""
    sampling = dataclasses.replace(SAMPLING, max_new_tokens=48)
    requests = make_requests(*make_prompts((9, 4, 7, 12), num_samples=16), sampling)
    background, changed = Background(), changed_weights(bench)
    answers = background.submit(answer(bench.engine.generate, requests))
    background.submit(turns(6)).result()  # some tokens are there, where the engine is in this process
    with background.paused():
        bench.engine.load_weights(changed, 2)
    completions = answers.result()
    background.stop()

    bench.engine.load_weights(bench.weights, 1)
    rollout = to_rollout(requests, completions, num_samples=16, pad_token_id=PAD, device=torch.device("cpu"))
    versions = pad_sequence([torch.tensor(each.own_versions) for each in completions], batch_first=True)
    for version, weights in ((1, bench.weights), (2, changed)):
        scorer = build_scorer(ModelConfig(path=str(bench.folder)), "policy", trainable=False)
        scorer.backbone.load_state_dict(dict(weights), strict=False)
        of_version = rollout.response_mask & (versions == version)
        assert_near(rollout.rollout_log_probs[of_version], scorer(rollout).log_probs[of_version])
    if bench.pids is None:
        assert {len(set(each.own_versions)) for each in completions} == {1, 2}


async def turns(number: int) -> None:
    """So many turns of an event loop."""
    for _ in range(number):
        await asyncio.sleep(0)


def changed_weights(bench: Bench) -> list[tuple[str, torch.Tensor]]:
    """Other weights of the same shapes."""
    return [(name, weight + 0.02 * torch.ones_like(weight).cumsum(-1).sin()) for name, weight in bench.weights]


def check_an_engine_that_slept_answers_as_before(bench: Bench) -> None:
    """Once it has its weights again; engines with memory of their own need no sleep."""
    requests = make_requests(*make_prompts(), dataclasses.replace(SAMPLING, num_samples=1))
    before = wait_for(answer(bench.engine.generate, requests))

    if isinstance(bench.engine, Sleeper):
        bench.engine.sleep()
        bench.engine.load_weights(bench.weights, 1)

    after = wait_for(answer(bench.engine.generate, requests))
    assert [each.token_ids for each in after] == [each.token_ids for each in before]


def check_a_killed_engine_is_replaced_in_the_middle_of_64_requests(bench: Bench) -> None:
    """By whoever places it, or by the callback, which starts another and asks anew."""
    requests = make_requests(*make_prompts((9, 4, 7, 12), num_samples=16), SAMPLING)
    expected = wait_for(answer(bench.engine.generate, requests))
    killed: list[int] = []

    async def generate(request: Request) -> Completion:
        completion = await bench.engine.generate(request)
        if not killed:
            killed.append(bench.pids()[0])
            os.kill(killed[0], signal.SIGKILL)
        return completion

    try:
        completions = wait_for(answer(generate, requests))
    except EngineDiedError:
        bench.engine.start(torch.device("cpu"))
        bench.engine.load_weights(bench.weights, 1)
        completions = wait_for(answer(generate, requests))

    assert killed
    assert [each.token_ids for each in completions] == [each.token_ids for each in expected]


def check_a_hung_engine_is_named(bench: Bench) -> None:
    """By the first response that is missing; nothing answers after this."""
    requests = make_requests(*make_prompts(), dataclasses.replace(SAMPLING, num_samples=1))
    stopped = bench.pids()
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)

    names = r"\d responses were not finished after `rollout.deadline` = 1 s; the first is that to prompt 0, sample 0"
    with pytest.raises(TimeoutError, match=names):
        wait_for(answer(bench.engine.generate, requests))
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):  # who placed it has killed it
            os.kill(pid, signal.SIGKILL)


CHECKS = [check for name, check in list(globals().items()) if name.startswith("check_")]
"""All checks; after the last, the engine is of no more use."""

CHECKS_IN_PROCESS = [check for check in CHECKS if check.__name__.split("_")[2] not in ("killed", "hung")]
"""Checks of an engine in this process, which can neither die nor hang alone."""
