"""Two worlds for a tiny policy: a calculator that it may ask before it answers, and a game."""

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


class HighLow(Environment):
    """Has a digit found, and says whether it is higher or lower than what the policy says."""

    async def reset(self, row: Mapping[str, Any]) -> str:
        """Asks for the digit of the row."""
        self.digit = row["reward_model"]["ground_truth"]
        return "digit"

    async def step(self, message: dict[str, Any]) -> Step:
        """Compares what was said with the digit."""
        said = message["content"]
        if said == self.digit:
            return Step(reward=1.0, done=True)
        return Step("higher" if said < self.digit else "lower", reward=-0.1)
