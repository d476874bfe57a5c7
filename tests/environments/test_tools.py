"""Whatever a call of a tool comes to is a message that the policy reads."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.environments import tool_functions as functions
from verl_lightning.environments.tool_calls import MalformedCall, Reply, ToolCall
from verl_lightning.environments.tools import MethodTool, Toolbox, function_tools, with_types, wrong_arguments

NAMES = [f"tests.environments.tool_functions.{name}" for name in ("add", "fail", "hang", "rest", "choose", "write")]


@pytest.fixture(scope="module")
def toolbox():
    tools = function_tools(NAMES, timeout=60.0)
    yield Toolbox(tools=tools)
    tools[0]._workers.stop()


def say(toolbox, *calls):
    ids = [f"call{n:05d}" for n in range(len(calls))]
    messages, tally = asyncio.run(toolbox.answer(calls, ids))
    assert [message["tool_call_id"] for message in messages] == ids
    return [message["content"] for message in messages], tally


def call(name, **arguments):
    return ToolCall(name=name, arguments=arguments)


def test_what_a_tool_returns_is_text(toolbox):
    said, tally = say(
        toolbox, call("add", a=2, b=3), call("add", a=2), call("fail"), call("choose", color="red", items=[1])
    )

    assert said[:3] == ["5", "2", "Error: KeyError: None"]
    assert said[3].startswith("{'color': 'red', 'items': [1], 'object': <object")
    assert (tally.calls, tally.errors, tally.timeouts) == (4, 1, 0)


def test_a_long_answer_is_cut_in_the_middle(toolbox):
    said, _ = say(toolbox, call("write", text="ab"))

    assert len(said[0]) < 20_100
    assert said[0].startswith("abab")
    assert "[180000 characters left out]" in said[0]


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (call("sub", a=1), "There is no tool 'sub'. The tools are add, fail"),
        (call("ad", a=1), "Did you mean `add`?"),
        (call("add"), "'a' is a required property"),
        (call("add", a="1"), "argument 'a': '1' is not of type 'integer'"),
        (call("add", a=1, c=2), "unknown argument 'c'. The arguments are a, b."),
        (call("choose", color="green", items=[]), "argument 'color': 'green' is not one of ['red', 'blue']"),
        (call("choose", color="red", items=["1"]), "argument 'items.0': '1' is not of type 'integer'"),
        (MalformedCall(name="add", complaint="It is no JSON."), "Error: It is no JSON."),
    ],
)
def test_a_wrong_call_is_answered_with_what_is_wrong(toolbox, wrong, complaint):
    said, tally = say(toolbox, wrong)

    assert complaint in said[0]
    assert tally.errors == 1


def test_bare_text_is_read_as_the_schema_says(toolbox):
    properties = {"n": {"type": "integer"}, "s": {"type": "string"}, "b": {"type": "boolean"}, "o": {"type": "object"}}
    texts = {"n": "7", "s": "7", "b": "True", "o": '{"a": 1}', "x": "[1"}

    schema = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    (read,) = with_types(
        Reply(content="", calls=(ToolCall(name="f", arguments=texts, has_text_values=True),)), [schema]
    ).calls
    assert read.arguments == {"n": 7, "s": "7", "b": True, "o": {"a": 1}, "x": "[1"}
    assert wrong_arguments({"how": None}, toolbox.by_name["fail"].parameters) is None


def test_a_tool_that_hangs_costs_its_own_call_alone():
    tools = function_tools(NAMES, timeout=0.3)
    hasty, workers = Toolbox(tools=tools), tools[0]._workers

    said, tally = say(hasty, call("rest", seconds=600), call("rest", seconds=600))
    first = workers._process
    assert said == 2 * ["Error: the tool ran out of time."]
    say(hasty, call("hang", seconds=600))

    assert first is not None
    assert workers._process is None  # a later call starts another
    first.wait()
    assert tally.timeouts == 2


def test_a_process_that_dies_is_replaced(toolbox):
    said, _ = say(toolbox, call("fail", how="exit"))
    later, _ = say(toolbox, call("add", a=1))

    assert said == ["Error: RuntimeError: the process in which it ran has ended"]
    assert later == ["1"]


def test_many_calls_wait_at_once(toolbox):
    said, tally = say(toolbox, *(call("hang", seconds=0.5) for _ in range(64)))

    assert said == 64 * ["awake"]
    assert tally.timeouts == 0


def test_tools_need_types_and_different_names():
    with pytest.raises(ValueError, match="`untyped` can't be described to the policy: .*Google style"):
        function_tools([functions.untyped])
    with pytest.raises(ValueError, match="must have different names, got add, add"):
        Toolbox(tools=function_tools([functions.add, functions.add]))
    with pytest.raises(ValueError, match=r"`rollout.environment.tools: .*\.ad` does not import.*Did you mean `add`"):
        function_tools(["tests.environments.tool_functions.ad"])


class Counter:
    """An environment's part with state."""

    def __init__(self):
        self.total = 0

    def count(self, by: int) -> int:
        """Counts on.

        Args:
            by: Number to add.
        """
        self.total += by
        return self.total

    async def wait(self) -> None:
        """Waits for ever."""
        await asyncio.Event().wait()

    def compute(self) -> None:
        """Computes for ever."""
        while True:
            self.total += 0


def test_a_method_that_computes_without_end_is_ended():
    toolbox = Toolbox(tools=[MethodTool(Counter().compute, 0.05)])

    said, tally = say(toolbox, call("compute"))

    assert (said, tally.timeouts) == (["Error: the tool ran out of time."], 1)
    for thread in threading.enumerate():
        if thread.name == "tool":
            thread.join(60)
            assert not thread.is_alive()


def test_methods_act_on_their_environment_one_after_another():
    counter = Counter()
    toolbox = Toolbox(tools=[MethodTool(counter.count, 5.0), MethodTool(counter.wait, 0.05)])

    said, tally = say(toolbox, call("count", by=1), call("wait"), call("count", by=2), call("count", by="x"))

    assert said[::2] == ["1", "3"]
    assert said[1] == "Error: the tool ran out of time."
    assert "'x' is not of type 'integer'" in said[3]
    assert (tally.errors, tally.timeouts) == (1, 1)


def test_a_function_of_a_notebook_comes_along(toolbox):
    factor = 3

    def times(a: int) -> int:
        """Multiplies.

        Args:
            a: Number.
        """
        return a * factor

    tools = function_tools([times])
    said, _ = say(Toolbox(tools=tools), call("times", a=4))
    tools[0]._workers.stop()

    assert said == ["12"]
