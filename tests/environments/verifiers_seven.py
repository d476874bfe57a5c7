"""An environment of `verifiers` that wants to hear 7."""

from __future__ import annotations

import verifiers
from datasets import Dataset


def load_environment(reward):
    async def is_seven(completion):
        return reward * (completion[-1]["content"] == "7")

    data = Dataset.from_list([{"question": str(number), "answer": "7"} for number in range(5)])
    return verifiers.SingleTurnEnv(dataset=data, rubric=verifiers.Rubric(funcs=[is_seven]))
