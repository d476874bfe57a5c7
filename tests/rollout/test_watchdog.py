"""A process that is stuck says what it waits for, and ends."""

from __future__ import annotations

import ctypes
import faulthandler
import threading
import time
from types import SimpleNamespace as Plain

from tests.processes import start
from tests.rollout.asking import Prompts, sample
from verl_lightning.rollout import vllm, watchdog
from verl_lightning.rollout.base import SamplingConfig
from verl_lightning.rollout.vllm_config import VLLMConfig

LONG = 1000.0
"""Seconds that never pass here, so that only one of the two timers can end a process."""


class Stuck(vllm.VLLMEngine):
    """Answers the first of its requests, and has a second step that never returns."""

    @property
    def _running(self):
        return Plain(llm_engine=Plain(step=self._step, abort_request=lambda keys: None))

    def _step(self):
        if len(self._late) < 3:
            time.sleep(LONG)
        output = Plain(token_ids=[1], logprobs=Plain(logprobs=[0.0]), finish_reason="stop")
        return [Plain(request_id="0", outputs=[output], prompt_token_ids=None)]

    def add(self, key, request):
        self._late[key] = vllm.Late(request.name, time.monotonic(), [], None)


def take_a_stuck_step():
    watchdog.LAST_SECONDS, vllm.STUCK_SECONDS = LONG, 2.0
    engine = Stuck(VLLMConfig(path="", eos_token_ids=[1], pad_token_id=0, max_model_len=9, deadline=0.1))
    sample(engine, Prompts([[5], [6], [7]], [[0], [1], [2]]), SamplingConfig())


def wait_without_end():
    watchdog.LAST_SECONDS = LONG
    with watchdog.end_if_stuck(0.5, lambda: "the culprit"):
        time.sleep(LONG)


def keep_pythons_lock():
    watchdog.LAST_SECONDS = 0.5 - LONG
    with watchdog.end_if_stuck(LONG, lambda: "the culprit"):
        ctypes.PyDLL(None).sleep(int(LONG))


def freeze():
    watchdog.LAST_SECONDS = 0.0
    with watchdog.end_if_frozen(0.5):
        ctypes.PyDLL(None).sleep(int(LONG))


def test_code_that_stops_all_threads_is_shown_and_ended(tmp_path):
    with start(freeze, folder=tmp_path) as process:
        said = process.wait(code=1)

    assert "in freeze" in said


def test_a_stuck_step_of_the_engine_names_its_requests(tmp_path):
    with start(take_a_stuck_step, folder=tmp_path) as process:
        said = process.wait(code=watchdog.EXIT_CODE)

    assert "step 1 of vLLM did not return. 2 responses were not finished" in said
    assert "that to prompt 1, sample 0" in said
    assert "in step" in said


def test_a_stuck_process_ends_and_shows_its_stack(tmp_path):
    with start(wait_without_end, folder=tmp_path) as process:
        said = process.wait(code=watchdog.EXIT_CODE)

    assert "the culprit" in said
    assert "most recent call first" in said


def test_a_process_whose_threads_cannot_speak_ends_too(tmp_path):
    """As a library that keeps Python's lock lets none of them."""
    with start(keep_pythons_lock, folder=tmp_path) as process:
        said = process.wait(code=1)

    assert "the culprit" not in said
    assert "most recent call first" in said


def test_work_that_ends_in_time_is_left_alone(monkeypatch):
    calls = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: calls.append("set"))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: calls.append("cancelled"))

    for _ in range(2):
        with watchdog.end_if_stuck(LONG, lambda: ""):
            pass

    for timer in threading.enumerate():
        if isinstance(timer, threading.Timer):
            timer.join()
    assert calls == ["set", "cancelled"] * 2
