"""OpenAI's chat and completion API, as far as the run's server speaks it: requests, answers and errors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from verl_lightning.data.messages import Message, clean_messages
from verl_lightning.environments.tool_calls import Reply
from verl_lightning.rollout.base import Completion

Kind = Literal["chat.completion", "text_completion"]

_IGNORED = {
    *("model", "user", "metadata", "store", "parallel_tool_calls", "service_tier", "safety_identifier", "logit_bias"),
    *("reasoning_effort", "verbosity", "prompt_cache_key", "stream_options", "echo", "best_of", "suffix"),
}
"""Parameters that change nothing here, at whatever value."""

OF_THE_RUN = ("temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty")
"""Parameters of sampling, which the run decides: the policy learns from what it samples with its own."""


class APIError(Exception):
    """A request that is refused, in the form of OpenAI's errors.

    Args:
        message: Reason and way out.
        status: HTTP status.
        code: Code that clients know; None if there is none.
        param: Parameter that is at fault; None if there is none.
    """

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = {401: "authentication_error", 404: "not_found_error"}.get(
            status, "invalid_request_error" if status < 500 else "server_error"
        )
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True, kw_only=True)
class APIRequest:
    """A request of an agent."""

    messages: list[Message] = field(default_factory=list)
    """Messages of a chat."""

    prompt: str | list[int] = ""
    """Prompt of a completion, as text or tokens."""

    tools: list[dict[str, Any]] = field(default_factory=list)
    """Schemas of the agent's tools."""

    max_tokens: int | None = None
    """Most tokens of the answer; None leaves it to the run."""

    num_choices: int = 1
    """Answers to give."""

    has_log_probs: bool = False
    """True if the answer tells the log-prob of each token."""

    is_streamed: bool = False
    """True if the answer comes as events, here in one piece."""

    overridden: tuple[str, ...] = ()
    """Parameters of sampling that were given, and that the run decides."""


def read_request(body: Any, kind: Kind) -> APIRequest:
    """Read the body of a request.

    Raises:
        APIError: If it is none, or asks what the server does not do.
    """
    if not isinstance(body, dict):
        raise APIError("The body must be a JSON object.")
    known = {"messages", "tools", "tool_choice"} if kind == "chat.completion" else {"prompt"}
    known |= {
        "max_tokens",
        "max_completion_tokens",
        "n",
        "logprobs",
        "top_logprobs",
        "stream",
        "stop",
        "response_format",
    }
    given = {name: value for name, value in body.items() if value is not None}
    if unknown := given.keys() - known - _IGNORED - set(OF_THE_RUN):
        raise APIError(f"Unknown parameter: '{min(unknown)}'.", code="unknown_parameter", param=min(unknown))
    _refuse_unsupported(given)
    limit = given.get("max_completion_tokens", given.get("max_tokens"))
    common: dict[str, Any] = {
        "max_tokens": None if limit is None else _positive(limit, "max_tokens"),
        "num_choices": _positive(given.get("n", 1), "n"),
        "has_log_probs": given.get("logprobs", False) is not False,
        "is_streamed": bool(given.get("stream", False)),
        "overridden": tuple(name for name in OF_THE_RUN if name in given),
    }
    if kind == "text_completion":
        return APIRequest(prompt=_prompt(given.get("prompt")), **common)
    tools = [] if given.get("tool_choice") == "none" else given.get("tools", [])
    return APIRequest(messages=_messages(given.get("messages")), tools=_tools(tools), **common)


def _refuse_unsupported(given: Mapping[str, Any]) -> None:
    if given.get("stop"):
        raise APIError("'stop' is not supported: set `rollout.sampling.stop` in the run.", param="stop")
    if given.get("top_logprobs"):
        raise APIError("'top_logprobs' is not supported: only sampled tokens have log-probs.", param="top_logprobs")
    if given.get("response_format", {"type": "text"}) != {"type": "text"}:
        raise APIError("'response_format' is not supported: set `rollout.sampling.guide`.", param="response_format")
    if given.get("tool_choice", "auto") not in ("auto", "none"):
        raise APIError("'tool_choice' must be 'auto' or 'none': the policy decides.", param="tool_choice")


def _positive(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise APIError(f"'{name}' must be a positive integer, got {value!r}.", param=name)
    return value


def _messages(value: Any) -> list[Message]:
    try:
        return clean_messages(value, name="the request's `messages`")
    except ValueError as error:
        raise APIError(str(error), param="messages") from error


def _tools(value: Any) -> list[dict[str, Any]]:
    fits = isinstance(value, list) and all(
        isinstance(tool, dict)
        and isinstance(tool.get("function"), dict)
        and isinstance(tool["function"].get("name"), str)
        for tool in value
    )
    if not fits:
        raise APIError("'tools' must be a list of functions with names.", param="tools")
    tools: list[dict[str, Any]] = value
    return tools


def _prompt(value: Any) -> str | list[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    is_ids = isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)
    if not value or not (isinstance(value, str) or is_ids):
        raise APIError("'prompt' must be one text or one list of tokens, and not empty.", param="prompt")
    prompt: str | list[int] = value
    return prompt


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One answer of the policy."""

    reply: Reply
    """What it said, taken apart."""

    call_ids: list[str]
    """Name of each call in it."""

    completion: Completion
    """Its tokens."""

    num_prompt_tokens: int
    """Tokens that it follows."""

    pieces: list[str]
    """Text of each token."""

    @property
    def finish_reason(self) -> str:
        """Reason for which it ended, in OpenAI's words."""
        if self.completion.is_truncated:
            return "length"
        return "tool_calls" if self.reply.calls else "stop"


def answer_body(
    choices: Sequence[Choice], kind: Kind, *, name: str, created: int, has_log_probs: bool
) -> dict[str, Any]:
    """Return the answer to a request.

    Args:
        choices: Answers of the policy.
        kind: API that was asked.
        name: Name of the answer.
        created: Time, in seconds since 1970.
        has_log_probs: True if log-probs were asked for.
    """
    prompt, own = choices[0].num_prompt_tokens, sum(len(choice.completion.token_ids) for choice in choices)
    return {
        "id": name,
        "object": kind,
        "created": created,
        "model": "policy",
        "choices": [_choice(n, choice, kind, has_log_probs) for n, choice in enumerate(choices)],
        "usage": {"prompt_tokens": prompt, "completion_tokens": own, "total_tokens": prompt + own},
    }


def _choice(index: int, choice: Choice, kind: Kind, has_log_probs: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"index": index, "finish_reason": choice.finish_reason, "logprobs": None}
    if has_log_probs:
        body["logprobs"] = _log_probs(choice, kind)
    if kind == "text_completion":
        return {**body, "text": choice.reply.content}
    message: Message = {"role": "assistant", "content": choice.reply.content or None, "refusal": None}
    if choice.reply.thought:
        message["reasoning_content"] = choice.reply.thought
    if calls := choice.reply.to_message(choice.call_ids).get("tool_calls"):
        message["tool_calls"] = [
            {**call, "function": {"name": call["function"]["name"], "arguments": _json(call["function"]["arguments"])}}
            for call in calls
        ]
    else:
        message["content"] = choice.reply.content
    return {**body, "message": message}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _log_probs(choice: Choice, kind: Kind) -> dict[str, Any]:
    pairs = list(zip(choice.pieces, choice.completion.log_probs, strict=True))
    if kind == "text_completion":
        return {"tokens": choice.pieces, "token_logprobs": [value for _, value in pairs]}
    content = [
        {"token": piece, "logprob": value, "bytes": list(piece.encode()), "top_logprobs": []} for piece, value in pairs
    ]
    return {"content": content, "refusal": None}


def events(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return an answer as the events of a stream: all that was said in one, its end in another."""
    is_chat = body["object"] == "chat.completion"
    head = {**body, "object": "chat.completion.chunk" if is_chat else body["object"]}
    whole, ends = [], []
    for choice in body["choices"]:
        bare = {"index": choice["index"], "logprobs": choice["logprobs"]}
        if is_chat:
            calls = choice["message"].get("tool_calls", [])
            numbered = {"tool_calls": [{**call, "index": n} for n, call in enumerate(calls)]} if calls else {}
            whole.append({**bare, "delta": {**choice["message"], **numbered}, "finish_reason": None})
            ends.append({**bare, "logprobs": None, "delta": {}, "finish_reason": choice["finish_reason"]})
        else:
            whole.append({**bare, "text": choice["text"], "finish_reason": choice["finish_reason"]})
    first = {**head, "choices": whole, "usage": None}
    return [first, {**head, "choices": ends}] if is_chat else [{**first, "usage": head["usage"]}]
