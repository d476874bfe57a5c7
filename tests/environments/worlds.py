"""Environments of the tests, and a policy that says what it is told to."""

from __future__ import annotations

import asyncio
import time

from tests.rollout.asking import play_all
from tests.tiny import tiny_tokenizer, write_tiny_folder
from verl_lightning.environments.base import Environment, Step
from verl_lightning.environments.config import Environments, EpisodesConfig
from verl_lightning.environments.runner import EpisodeRequest, EpisodeRunner
from verl_lightning.rollout.base import Completion, SamplingConfig


class Counting(Environment):
    """Says a digit until three turns are over; each turn is worth its length, and the last one ten more."""

    is_quick = True

    def __init__(self, turns: int = 3):
        self.turns, self.heard = turns, []

    async def reset(self, row):
        self.row, self.turns = row, row.get("turns", self.turns)
        return "5 1"

    async def step(self, message):
        self.heard.append(message["content"])
        done = len(self.heard) == self.turns
        return Step("12", reward=len(message["content"]) + 10.0 * done, done=done, metrics={"heard": 1.0})


class Sleeping(Environment):
    """Takes the seconds that its row says before each answer, as a tool that waits for a network."""

    async def reset(self, row):
        self.seconds = list(row["seconds"])
        return "5"

    async def step(self, message):
        await asyncio.sleep(self.seconds.pop())
        return Step("1", done=not self.seconds)


class Blocking(Sleeping):
    """Holds up its own thread."""

    async def step(self, message):
        time.sleep(self.seconds.pop())
        return Step("1", done=not self.seconds)


def compute():
    while True:
        pass


ENDLESS = {"hangs": lambda: time.sleep(3), "computes": compute}


class Unruly(Counting):
    """Does what its row says."""

    is_quick = False

    async def step(self, message):
        match self.row["fault"]:
            case "raises":
                raise KeyError("lost")
            case "exits":
                raise SystemExit(3)
            case "sleeps":
                await asyncio.sleep(60)
            case "hangs" | "computes" as fault:
                ENDLESS[fault]()
            case "says nothing":
                return Step()
            case "returns no step":
                return "5"
            case "rewards with a word":
                return Step("5", reward="good")
            case "takes a name":
                return Step("5", metrics={"turns": 1.0})
            case "says a number":
                return Step(5)
        return await super().step(message)


END = tiny_tokenizer().eos_token_id


def counting_tokenizer():
    """A tokenizer whose template begins with the number of messages, so that each message writes it anew."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}" + tokenizer.chat_template
    return tokenizer


def write_counting_folder(path):
    """The tiny model with `counting_tokenizer`."""
    write_tiny_folder(path)
    counting_tokenizer().save_pretrained(path)
    return path


async def say_seven(request):
    """A policy that always says 7, and ends."""
    return Completion([tiny_tokenizer().convert_tokens_to_ids("7"), END], [-1.0, -0.5], False, 1)


def requests_for(rows, *, max_new_tokens=64):
    """What is asked for one episode of each row."""
    sampling = SamplingConfig(max_new_tokens=max_new_tokens)
    return [
        EpisodeRequest(prompt_ids=[5], sampling=sampling, seed=index, name=f"prompt {index}, sample 0", row=row)
        for index, row in enumerate(rows)
    ]


def play(
    environment,
    rows,
    generate=say_seven,
    *,
    max_new_tokens=64,
    max_prompt_length=None,
    tokenizer=None,
    eos=END,
    **config,
):
    """Episodes of some rows, one of each."""
    runner = EpisodeRunner(
        environments=Environments(environment),
        config=EpisodesConfig(**config),
        tokenizer=tokenizer or tiny_tokenizer(),
        eos_token_ids=[eos],
        max_prompt_length=max_prompt_length,
        enable_thinking=None,
    )
    return play_all(runner, generate, requests_for(rows, max_new_tokens=max_new_tokens))
