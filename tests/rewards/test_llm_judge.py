"""A language model behind OpenAI's API judges many responses at once."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from verl_lightning.rewards import llm_judge as judging
from verl_lightning.rewards.base import RewardSample


def sample_of(response, images=()):
    prompt = [{"role": "user", "content": "What is {2 + 3}?"}]
    return RewardSample(
        response=response,
        ground_truth=5,
        data_source="sums",
        prompt=prompt,
        extra_info={"images": images},
        is_truncated=False,
    )


async def with_server(answer, work, shown=()):
    """Runs some work beside a judge that answers each request with ``answer(body, number)``."""
    bodies = []

    async def handle(request):
        assert request.headers["Authorization"] == "Bearer secret"
        bodies.append(await request.json())
        return await answer(bodies[-1], len(bodies))

    app = web.Application()
    app.router.add_post("/v1/chat/completions", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        return await work(lambda response, **options: judging.llm_judge(
            sample_of(response, shown), base_url=url, model="judge", api_key="secret", **options
        )), bodies  # fmt: skip
    finally:
        await judging._session().close()
        await runner.cleanup()


def say(text):
    return web.json_response({"choices": [{"message": {"role": "assistant", "content": text}}]})


def test_the_last_verdict_counts():
    async def answer(body, number):
        return say("Score: 0 would be harsh. Score: 0.75")

    reward, (body,) = asyncio.run(with_server(answer, lambda judge: judge("It is 5.", parameters={"temperature": 0})))

    assert reward == 0.75
    assert body["temperature"] == 0
    (message,) = body["messages"]
    assert "What is {2 + 3}?" in message["content"]
    assert "Answer to judge:\nIt is 5." in message["content"]
    assert "Expected answer:\n5" in message["content"]


def test_images_are_shown_where_the_judge_reads_some(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"abc")
    shown = ["data:image/png;base64,aGk=", str(tmp_path / "a.jpg")]

    async def answer(body, number):
        return say("Score: 1")

    async def ask(judge):
        with pytest.raises(ValueError, match="Tell `llm_judge` whether its model reads some: set `images`"):
            await judge("5")
        return await judge("5", images=False), await judge("5", images=True)

    _, (without, with_images) = asyncio.run(with_server(answer, ask, shown))
    assert isinstance(without["messages"][0]["content"], str)
    urls = [part["image_url"]["url"] for part in with_images["messages"][0]["content"][:2]]
    assert urls == ["data:image/png;base64,aGk=", "data:image/jpeg;base64,YWJj"]


def test_all_verdicts_are_asked_for_at_once():
    """None of 512 is answered before the last has been asked for."""
    all_asked = asyncio.Event()

    async def answer(body, number):
        if number == 512:
            all_asked.set()
        await all_asked.wait()
        return say("Score: 1")

    async def work(judge):
        return await asyncio.gather(*(judge(str(n)) for n in range(512)))

    rewards, _ = asyncio.run(with_server(answer, work))

    assert rewards == [1.0] * 512


def test_a_busy_judge_is_asked_again_and_a_refusal_is_told():
    async def busy(body, number):
        return say("Score: 1") if number == 2 else web.Response(status=503, text="busy")

    async def refusing(body, number):
        return web.Response(status=400, text="no such model")

    async def vague(body, number):
        return say("It is good.")

    reward, _ = asyncio.run(with_server(busy, lambda judge: judge("5")))
    assert reward == 1.0
    with pytest.raises(RuntimeError, match="gave no verdict: status 400: no such model"):
        asyncio.run(with_server(refusing, lambda judge: judge("5")))
    with pytest.raises(ValueError, match="nothing that fits `pattern`"):
        asyncio.run(with_server(vague, lambda judge: judge("5")))
