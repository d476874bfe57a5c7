"""Two worlds for a tiny policy: a calculator that it may ask before it answers, and the game of Nim."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from verl_lightning import Environment, Step


class Calculator(Environment):
    """Adds up what the policy writes in brackets, such as ``[37+48]``; whatever else it says is its answer."""

    async def reset(self, row: Mapping[str, Any]) -> str:
        """Asks for the sum of the row."""
        self.has_called = False
        self.answer = row["reward_model"]["ground_truth"]
        return str(row["prompt"][-1]["content"])

    async def step(self, message: dict[str, Any]) -> Step:
        """Adds up, or judges the answer."""
        said = message["content"]
        if not said.startswith("["):
            return Step(reward=float(said == self.answer), done=True, metrics={"called": self.has_called})
        self.has_called = True
        numbers = re.fullmatch(r"\[(\d+)\+(\d+)\]", said)
        return Step(str(int(numbers[1]) + int(numbers[2])) if numbers else "?")


class Nim(Environment):
    """Takes sticks from a heap in turn with the policy, one to three each time; whoever takes the last one wins.

    The environment plays as well as can be: the policy wins if it always leaves a multiple of four, and each time is
    worth half a point.
    """

    async def reset(self, row: Mapping[str, Any]) -> str:
        """Shows the heap of the row."""
        self.sticks = row["extra_info"]["sticks"]
        self.habit = row["extra_info"]["habit"]  # what it takes from a heap that is lost
        return f"nim {self.sticks}"

    async def step(self, message: dict[str, Any]) -> Step:
        """Takes what the policy says, then its own."""
        said = message["content"]
        if said not in {"1", "2", "3"} or int(said) > self.sticks:
            return Step(reward=-0.5, done=True, metrics={"won": 0.0})
        self.sticks -= int(said)
        if self.sticks == 0:
            return Step(reward=0.5, done=True, metrics={"won": 1.0})
        surplus = self.sticks % 4
        self.sticks -= surplus or self.habit
        return Step(f"left {self.sticks}", reward=0.0 if surplus else 0.5, done=self.sticks == 0, metrics={"won": 0.0})
