"""A process that is stuck says what it waits for, and ends."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

WAYS = {
    "a loop that yields": "time.sleep(60)",
    "a library that keeps Python's lock": "ctypes.PyDLL(None).sleep(60)",
}


def run(code: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, in which a second is long."""
    start = """
        import ctypes, time
        from verl_lightning.rollout import watchdog
        watchdog.LAST_SECONDS = 0.5
    """
    program = textwrap.dedent(start) + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=250)


@pytest.mark.slow
def test_a_stuck_step_of_the_engine_names_its_requests():
    """An engine with three requests of which one is answered, and a second step that never returns."""
    ended = run(
        """
        from types import SimpleNamespace as Plain
        from verl_lightning.rollout import vllm
        from verl_lightning.rollout.base import Prompts, SamplingConfig
        from verl_lightning.rollout.vllm_config import VLLMConfig
        vllm.STUCK_SECONDS = 0.5
        output = Plain(token_ids=[1], logprobs=Plain(logprobs=[0.0]), finish_reason="stop")
        answers = iter([[Plain(request_id="0", outputs=[output])]])
        def step():
            for answer in answers:
                return answer
            time.sleep(60)
        class Stuck(vllm.VLLMEngine):
            _running = Plain(llm_engine=Plain(step=step, has_unfinished_requests=lambda: True))
            def _add_requests(self, prompts, sampling):
                return {"0": 0, "1": 1, "2": 2}
        engine = Stuck(VLLMConfig(path="", eos_token_ids=[1], pad_token_id=0, max_model_len=9, deadline=0.1))
        prompts = Prompts.from_tokens([[5], [6], [7]], [[0], [1], [2]])
        engine.generate(prompts, SamplingConfig())
        """
    )

    assert ended.returncode == 70
    assert "step 2 of vLLM did not return. 2 of 3 responses were not finished" in ended.stderr
    assert "that to prompt 1, sample 0" in ended.stderr
    assert "in stream" in ended.stderr


@pytest.mark.parametrize("way", WAYS)
def test_a_stuck_process_ends_and_shows_its_stack(way):
    ended = run(f"with watchdog.end_if_stuck(0.5, lambda: 'the culprit'):\n    {WAYS[way]}")

    assert ended.returncode in (70, 1)
    assert ("the culprit" in ended.stderr) == (ended.returncode == 70)
    assert (ended.returncode == 70) == (way == "a loop that yields")
    assert "most recent call first" in ended.stderr


def test_work_that_ends_in_time_is_left_alone():
    ended = run(
        """
        for _ in range(2):
            with watchdog.end_if_stuck(0.5, lambda: ""):
                pass
        time.sleep(1.5)
        """
    )

    assert (ended.returncode, ended.stderr) == (0, "")
