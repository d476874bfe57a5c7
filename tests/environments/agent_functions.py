"""Agents for tests; light, as a process of its own imports them."""

from __future__ import annotations

import asyncio

from tests.resume.kill_once import kill_once

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds numbers.",
        "parameters": {
            "type": "object",
            "properties": {name: {"type": "integer", "description": name} for name in "ab"},
        },
    },
}


async def agent(client, row):
    """Plays the part that its row names."""
    return await globals()[row["part"]](client, row)


async def ask(client, messages, **options):
    answer = await client.chat.completions.create(model="policy", messages=messages, **options)
    return answer.choices[0].message


async def linear(client, row):
    """A conversation of two turns."""
    messages = [{"role": "user", "content": "5 1"}]
    messages.append(await ask(client, messages, temperature=0.7))
    messages = [*(m if isinstance(m, dict) else m.model_dump() for m in messages), {"role": "user", "content": "12"}]
    answer = await ask(client, messages)
    return float(len(answer.content))


async def branched(client, row):
    """Two goes at the second turn, and a summary of the first one."""
    start = [{"role": "user", "content": "5 1"}]
    said = (await ask(client, start)).content
    for reply in ("1", "2"):
        await ask(client, [*start, {"role": "assistant", "content": said}, {"role": "user", "content": reply}])
    await ask(client, [{"role": "user", "content": "12 34"}])
    return 1.0


async def with_tools(client, row):
    """Lets the policy call a tool."""
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    message = await ask(client, messages, tools=[ADD])
    (call,) = message.tool_calls
    assert call.function.arguments == '{"a": 2, "b": 3}'
    messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "5"}]
    answer = await ask(client, messages, tools=[ADD])
    return float(answer.content == "It is 5.")


async def streaming(client, row):
    """Reads a stream, a completion, several choices, and log-probs."""
    chat = client.chat.completions
    stream = await chat.create(model="m", stream=True, messages=[{"role": "user", "content": "1"}])
    pieces = [piece async for piece in stream]
    assert pieces[-1].choices[0].finish_reason == "stop"
    text = (await client.completions.create(model="m", prompt="5 1", logprobs=1)).choices[0]
    assert text.logprobs.token_logprobs == [-1.0, -0.5]
    both = await chat.create(model="m", n=2, messages=[{"role": "user", "content": "1 2"}], logprobs=True)
    assert [len(choice.logprobs.content) for choice in both.choices] == [2, 2]
    assert [model.id async for model in client.models.list()] == ["policy"]
    return float(pieces[0].choices[0].delta.content == text.text == both.choices[1].message.content)


async def refused(client, row):
    """Asks what is refused, and tells how."""
    import openai

    user = [{"role": "user", "content": "1"}]
    wrong = [
        ({"messages": [{"role": "user", "content": 500 * "1"}]}, openai.BadRequestError, "context_length_exceeded"),
        ({"messages": user, "top_logprobs": 3}, openai.BadRequestError, None),
        ({"messages": user, "stop": ["x"]}, openai.BadRequestError, None),
        ({"messages": user, "extra_body": {"temprature": 1}}, openai.BadRequestError, "unknown_parameter"),
        ({"messages": []}, openai.BadRequestError, None),
    ]
    chat = client.chat.completions
    right = [await told(chat.create(model="m", **options)) == (kind, code) for options, kind, code in wrong]
    stranger = client.with_options(api_key="sk-wrong")
    calls = (
        stranger.chat.completions.create(model="m", messages=user),
        stranger.completions.create(model="m", prompt="1"),
    )
    for call in calls:
        right.append(await told(call) == (openai.AuthenticationError, "invalid_api_key"))
    right.append(await told(client.embeddings.create(model="m", input="1")) == (openai.NotFoundError, "unknown_url"))
    await ask(client, user)
    return float(all(right))


async def told(call):
    """The kind and code of the error that a call is refused with."""
    import openai

    try:
        await call
    except openai.APIStatusError as error:
        return type(error), error.code


async def failing(client, row):
    await ask(client, [{"role": "user", "content": "1"}])
    raise KeyError("lost")


async def dying(client, row):
    """Ends its process between two questions, if there is an order to do so."""
    await ask(client, [{"role": "user", "content": "1"}])
    kill_once(row["order"])
    await ask(client, [{"role": "user", "content": "12"}])
    return 1.0


async def late(client, row):
    await ask(client, [{"role": "user", "content": "1"}])
    await asyncio.sleep(600)


async def silent(client, row):
    return 1.0


async def wordy(client, row):
    await ask(client, [{"role": "user", "content": "1"}])
    return "good"


async def two_turns(client, row):
    """A conversation about the row's prompt, of a second turn where there is room for it; short answers are good."""
    import openai

    messages = list(row["prompt"])
    answer = await ask(client, messages, max_tokens=6)
    try:
        again = await ask(client, [*messages, answer, {"role": "user", "content": "1"}], max_tokens=6)
    except openai.BadRequestError:
        return float(len(answer.content))
    return float(len(answer.content) + len(again.content))
