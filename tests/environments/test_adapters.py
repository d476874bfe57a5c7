"""Environments of other projects run as ours do."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.data.published import tokenizer_for
from tests.environments.test_tool_episodes import play
from verl_lightning.environments.adapters.gymnasium_text import GymnasiumText
from verl_lightning.environments.adapters.mcp import MCPEnvironment
from verl_lightning.environments.adapters.openenv import OpenEnv
from verl_lightning.environments.adapters.reasoning_gym import ReasoningGym

QWEN, END = "qwen2_5", "<|im_end|>"


@pytest.mark.filterwarnings("ignore::SyntaxWarning")  # of a package that it imports, while Python compiles it
def test_a_question_of_reasoning_gym_is_judged_by_it():
    make = partial(ReasoningGym, task="basic_arithmetic", size=8, seed=1)
    row = {"index": 0}

    right, asked = play(tokenizer_for(QWEN), make, ["<answer>-4</answer>"], END, row)
    wrong, _ = play(tokenizer_for(QWEN), make, ["-4"], END, row)

    assert "Calculate 5 - 3 - 6." in asked[0]
    assert (right.episode.reward, wrong.episode.reward) == (1.0, 0.0)


def test_a_game_of_gymnasium_is_played_in_words():
    game = {"game": "FrozenLake-v1", "arguments": {"is_slippery": False, "render_mode": "ansi"}}
    make = partial(GymnasiumText, **game, actions=["left", "down", "right", "up"], wrong_reward=-0.1)
    turns = ["jump", "down", "down", "right", "2", "down", "right"]

    episode, asked = play(tokenizer_for(QWEN), make, turns, END, {"index": 3}, max_turns=20)

    assert "SFFF" in re.sub(r"\x1b\[[0-9;]*m", "", asked[0])
    assert "The actions are left, down, right, up." in asked[1]
    assert episode.episode.rewards == [-0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]


@pytest.mark.oracle
def test_an_environment_of_a_server_of_openenv_is_played():
    """A server in a thread that wants the number of its seed; needs `openenv-core`."""
    from tests.environments.openenv_server import served

    with served() as url:
        make = partial(OpenEnv, url=url, action="guess", observation="said")
        episode, asked = play(tokenizer_for(QWEN), make, ["4", "7"], END, {"index": 7})

    assert "a number below 10" in asked[0]
    assert "higher" in asked[1]
    assert episode.episode.rewards == [0.0, 1.0]


def test_tools_of_an_mcp_server_are_called():
    make = partial(MCPEnvironment, command=[sys.executable, str(Path(__file__).with_name("mcp_server.py"))])
    call = '<tool_call>{"name": "NAME", "arguments": ARGUMENTS}</tool_call>'
    notes = call.replace("NAME", "note")
    turns = [
        notes.replace("ARGUMENTS", '{"text": "a"}'),
        notes.replace("ARGUMENTS", '{"txt": "a"}') + call.replace("NAME", "fail").replace("ARGUMENTS", "{}"),
        notes.replace("ARGUMENTS", '{"text": "b"}'),
        "done",
    ]

    episode, asked = play(tokenizer_for(QWEN), make, turns, END)

    said = [message["content"] for message in episode.episode.messages if message["role"] == "tool"]
    assert "Keeps a note" in asked[0]
    assert said[0] == "1 notes"
    assert "unknown argument 'txt'" in said[1]
    assert said[2] == "Error: Error executing tool fail"
    assert said[3] == "2 notes"
