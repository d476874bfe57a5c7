"""A language model as judge, asked by OpenAI's API: any server that speaks it, such as vLLM's."""

from __future__ import annotations

import asyncio
import re
from typing import Any
from weakref import WeakKeyDictionary

from verl_lightning.needs import INSTALL_AGENTS, missing_package
from verl_lightning.pictures import as_data_url
from verl_lightning.rewards.base import RewardSample

TEMPLATE = (
    "Question:\n{prompt}\n\nExpected answer:\n{ground_truth}\n\nAnswer to judge:\n{response}\n\n"
    "How good is the answer? Reply with one number between 0 (wrong) and 1 (right), as in: Score: 0.5"
)
"""Question to the judge unless another is given."""

_ATTEMPTS = 3
_BUSY = {408, 409, 429, 500, 502, 503, 504}  # statuses after which asking again may help
_sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = WeakKeyDictionary()


async def llm_judge(
    sample: RewardSample,
    *,
    base_url: str,
    model: str,
    template: str = TEMPLATE,
    pattern: str = r"[Ss]core:\s*(-?\d+(?:\.\d+)?)",
    api_key: str = "none",
    timeout: float = 60.0,
    parameters: dict[str, Any] | None = None,
    images: bool | None = None,
) -> float:
    """Asks a language model for a verdict on a response, and returns the number in it.

    Args:
        sample: Response to judge.
        base_url: Address of the server, such as ``http://127.0.0.1:8000/v1``.
        model: Name of the model there.
        template: Question, with ``{prompt}``, ``{response}``, ``{ground_truth}`` and ``{data_source}`` in it.
        pattern: Regular expression of the verdict, whose first group is a number; the last match counts.
        api_key: Key of the server; write ``${NAME}`` for an environment variable.
        timeout: Most seconds of one request; it is asked up to three times if the server is busy.
        parameters: Further parameters of the request, such as ``temperature``.
        images: True shows the judge the prompt's images too, False only ``<image>`` in their places; must be told where
            a prompt has some.

    Raises:
        ValueError: If the verdict has no number, or a prompt has images and nobody says whether the judge reads some.
        RuntimeError: If the server refuses the request.
    """
    question = with_images(fill(template, sample), sample, images)
    body = {"model": model, "messages": [{"role": "user", "content": question}], **(parameters or {})}
    verdict = await _ask(f"{base_url.rstrip('/')}/chat/completions", body, api_key, timeout)
    found = list(re.finditer(pattern, verdict))
    if not found:
        raise ValueError(f"The judge's verdict has nothing that fits `pattern` ({pattern}): {verdict[-200:]!r}.")
    return float(found[-1][1])


def fill(template: str, sample: RewardSample) -> str:
    """Returns a question about a sample; other braces than those of its four names stay as they are."""
    values = {
        "prompt": "\n".join(str(message.get("content", "")) for message in sample.prompt),
        "response": sample.response,
        "ground_truth": str(sample.ground_truth),
        "data_source": sample.data_source,
    }
    return re.sub(r"\{(prompt|response|ground_truth|data_source)\}", lambda found: values[found[1]], template)


def with_images(question: str, sample: RewardSample, images: bool | None) -> str | list[dict[str, Any]]:
    """Returns the content of a question: its text, after the prompt's images where they are to be shown.

    Raises:
        ValueError: If there are some and ``images`` is None.
    """
    shown = sample.extra_info.get("images") or []
    if not shown or images is False:
        return question
    if images is None:
        raise ValueError(
            "The prompt has images. Tell `llm_judge` whether its model reads some: set `images` in its `arguments` to"
            " true, or to false to judge by the text alone."
        )
    parts = [{"type": "image_url", "image_url": {"url": as_data_url(source)}} for source in shown]
    return [*parts, {"type": "text", "text": question}]


async def _ask(url: str, body: dict[str, Any], api_key: str, timeout: float) -> str:
    import aiohttp

    for attempt in range(1, _ATTEMPTS + 1):
        reason = ""
        try:
            limit = aiohttp.ClientTimeout(total=timeout)
            headers = {"Authorization": f"Bearer {api_key}"}
            async with _session().post(url, json=body, headers=headers, timeout=limit) as answer:
                if answer.status == 200:
                    return _verdict(await answer.json())
                reason = f"status {answer.status}: {(await answer.text())[:200]}"
                if answer.status not in _BUSY:
                    break
        except (aiohttp.ClientConnectionError, TimeoutError) as error:
            reason = f"{type(error).__name__}: {error}"
        if attempt < _ATTEMPTS:
            await asyncio.sleep(0.5 * attempt)
    raise RuntimeError(f"The judge at `{url}` gave no verdict: {reason}.")


def _verdict(answer: Any) -> str:
    try:
        return str(answer["choices"][0]["message"]["content"])
    except (LookupError, TypeError) as error:
        raise RuntimeError(f"The judge's answer is no chat completion: {str(answer)[:200]}.") from error


def _session() -> Any:
    """Returns the session of this event loop, with as many connections at once as are asked for."""
    if (complaint := missing_package("`llm_judge`", "aiohttp", INSTALL_AGENTS)) is not None:
        raise ValueError(complaint)
    import aiohttp

    loop = asyncio.get_running_loop()
    if loop not in _sessions:
        _sessions[loop] = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    return _sessions[loop]
