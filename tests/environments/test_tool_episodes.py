"""The policy calls tools in the format of its template, and reads what came of it."""

from __future__ import annotations

import json

import pytest

from tests.data.published import tokenizer_for
from tests.environments.tool_functions import add
from tests.rollout.asking import play_all
from verl_lightning.environments.base import Environment, Step
from verl_lightning.environments.config import Environments, EpisodesConfig
from verl_lightning.environments.runner import EpisodeRequest, EpisodeRunner
from verl_lightning.rollout.base import Completion, SamplingConfig

ARGUMENTS = {"a": 2, "b": 3}
CALLS = {
    "qwen2_5": ('<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>', "<|im_end|>"),
    "qwen_coder_like": (
        "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\n3\n</parameter>\n</function>\n"
        "</tool_call>",
        "<|im_end|>",
    ),
    "llama3_2": ('{"name": "add", "parameters": {"a": 2, "b": 3}}', "<|eot_id|>"),
    "gptoss": (
        '<|channel|>analysis<|message|>add<|end|><|start|>assistant<|channel|>commentary to=functions.add '
        '<|constrain|>json<|message|>{"a": 2, "b": 3}',
        "<|call|>",
    ),
    "lfm2_2_5": ("<|tool_call_start|>[add(a=2, b=3)]<|tool_call_end|>", "<|im_end|>"),
}  # fmt: skip


def play(tokenizer, environment, turns, end, row=None, history="keep", max_turns=4):
    """One episode of a policy that says these texts; with the tokens that it was asked to go on from."""
    said, asked = iter(turns), []

    async def generate(request):
        asked.append(tokenizer.decode(request.prompt_ids))
        ids = tokenizer(next(said) + end, add_special_tokens=False).input_ids
        return Completion(ids, [-1.0] * len(ids), False, 1)

    runner = EpisodeRunner(
        environments=Environments(environment),
        config=EpisodesConfig(history=history, max_turns=max_turns),
        tokenizer=tokenizer,
        eos_token_ids=[tokenizer.convert_tokens_to_ids(end)],
        max_prompt_length=None,
        enable_thinking=None,
    )
    runner.check()
    row = row or {"prompt": [{"role": "user", "content": "What is 2 + 3?"}]}
    request = EpisodeRequest(
        prompt_ids=[5], sampling=SamplingConfig(max_new_tokens=4000), seed=0, name="prompt 0, sample 0", row=row
    )
    (completion,) = play_all(runner, generate, [request])
    return completion, asked


@pytest.mark.parametrize("family", CALLS)
def test_a_tool_is_shown_called_and_answered(family):
    tokenizer, (call, end) = tokenizer_for(family), CALLS[family]

    completion, asked = play(tokenizer, {"tools": [add]}, [call, "It is 5."], end)

    assert "Adds numbers" in asked[0]
    assert len(asked) == 2
    assert asked[1].startswith(asked[0] + call + end)
    assert "5" in asked[1].removeprefix(asked[0] + call + end)
    assert [m["role"] for m in completion.episode.messages] == ["user", "assistant", "tool", "assistant"]
    assert completion.episode.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": ARGUMENTS}
    assert completion.episode.metrics["tool_calls"] == 1
    assert completion.episode.metrics["tool_errors"] == 0


def test_what_is_wrong_with_a_call_is_read_and_mended():
    tokenizer, (call, end) = tokenizer_for("qwen2_5"), CALLS["qwen2_5"]
    wrong = ["<tool_call>{add}</tool_call>", call.replace("2", '"two"'), call.replace("add", "sub"), f"<think>{call}"]

    completion, asked = play(tokenizer, {"tools": ["tests.environments.tool_functions.add"]}, wrong, end)

    read = [message["content"] for message in completion.episode.messages if message["role"] == "tool"]
    assert "not valid JSON" in read[0]
    assert "'two' is not of type 'integer'" in read[1]
    assert "There is no tool 'sub'" in read[2]
    assert not completion.is_truncated  # the last turn thinks of a call, but makes none


class Account(Environment):
    """Its tools are methods, one of which ends it."""

    def __init__(self):
        self.tools, self.balance, self.is_over = [self.put, self.leave, add], 0, False

    async def step(self, message):
        return Step("Use a tool.", reward=-1.0)

    async def after_tools(self, answers):
        return Step(answers, reward=float(self.balance), done=self.is_over)

    def put(self, amount: int) -> str:
        """Puts money into the account.

        Args:
            amount: Money.
        """
        self.balance += amount
        return f"balance {self.balance}"

    def leave(self) -> None:
        """Ends the visit."""
        self.is_over = True


def test_methods_of_an_environment_are_tools():
    def call(name, **arguments):
        return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"

    turns = [call("put", amount=2) + call("put", amount=3), "done?", call("add", a=1), call("leave")]
    completion, asked = play(tokenizer_for("qwen2_5"), Account, turns, "<|im_end|>", max_turns=9)

    assert "balance 2" in asked[1]
    assert "balance 5" in asked[1]
    assert completion.episode.rewards == [5.0, -1.0, 5.0, 5.0]
    assert completion.episode.metrics["tool_calls"] == 4


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"tools": []}, "`rollout.environment.tools` is empty"),
        ({"tools": [add], "timeout": 90}, "less than `rollout.episodes.timeout` .60 s"),
        ({"tools": ["tests.nowhere.add"]}, "`rollout.environment: tools.tools: tests.nowhere.add` does not import"),
        ({"tools": [add], "tool_calls": "hermse"}, "`tool_calls: hermse` is unknown"),
        ({"tools": [add], "timeot": 3}, "unexpected keyword argument 'timeot'"),
    ],
)
def test_wrong_tools_are_refused_before_the_first_episode(given, complaint):
    with pytest.raises(ValueError, match=complaint):
        play(tokenizer_for("qwen2_5"), given, [], "<|im_end|>")


def test_a_policy_without_a_format_of_calls_is_refused():
    with pytest.raises(ValueError, match="does not say in which format it calls tools. Set `tool_calls`"):
        play(tokenizer_for("phi3"), {"tools": [add]}, [], "<|end|>")
