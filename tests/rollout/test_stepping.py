"""Requests join engines of this process at any time, and none is overlooked."""

from __future__ import annotations

import asyncio

import pytest

from verl_lightning.rollout.base import Completion, Request, SamplingConfig
from verl_lightning.rollout.stepping import SteppingEngine


class Echo(SteppingEngine):
    """Answers each request in one step; the parts that nothing here calls are left out."""

    def __init__(self):
        super().__init__()
        self._asked = []

    start = load_weights = drop_caches = weight_sums = stop = recipe = None

    def add(self, key, request):
        self._asked.append(key)

    def step(self):
        asked, self._asked = self._asked, []
        return [(key, Completion([1], [0.0], is_truncated=False, weights_version=0)) for key in asked]

    def abort(self):
        self._asked = []


@pytest.mark.parametrize("turns", range(6))
def test_a_request_that_comes_just_when_the_engine_ends_is_answered(turns):
    engine, request = Echo(), Request(prompt_ids=[1], sampling=SamplingConfig(), seed=0, name="one")

    async def ask_later():
        for _ in range(turns):
            await asyncio.sleep(0)
        return await engine.generate(request)

    async def ask_twice():
        return await asyncio.wait_for(asyncio.gather(engine.generate(request), ask_later()), 30)

    assert len(asyncio.run(ask_twice())) == 2
