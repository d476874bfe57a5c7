"""Episodes go on each by itself, keep their tokens, and end well whatever their environments do."""

from __future__ import annotations

import asyncio
import heapq
import random
import threading

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback

from tests.environments.worlds import END, Blocking, Counting, Sleeping, Unruly, play, say_seven
from tests.runs import Recorder, make_ppo, make_prompts, make_rollout, make_trainer
from tests.tiny import tiny_tokenizer
from verl_lightning.algorithms.corrections.truncated_importance_sampling import TruncatedImportanceSampling
from verl_lightning.environments.base import Step
from verl_lightning.faults import RunError
from verl_lightning.modules.teacher_config import TeacherConfig
from verl_lightning.rollout.base import Completion
from verl_lightning.rollout.completions import pack_completions, unpack_completions


def text_of(ids):
    return tiny_tokenizer().decode(ids)


def test_an_episode_is_the_chat_that_the_template_writes():
    (episode,) = play(Counting, [{}])

    said = [message["content"] for message in episode.episode.messages]
    chat = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 3, said, strict=True)]
    expected = tiny_tokenizer().apply_chat_template(chat, tokenize=False)
    assert said == ["5 1", "7", "12", "7", "12", "7"]
    assert expected.startswith(text_of(episode.prompt_ids + episode.token_ids))


def test_the_policys_own_tokens_alone_are_learnt_from():
    (episode,) = play(Counting, [{}])

    own = [token for token, is_own in zip(episode.token_ids, episode.is_own, strict=True) if is_own]
    seven = tiny_tokenizer().convert_tokens_to_ids("7")
    assert own == [seven, END] * 3
    assert [episode.is_own[end - 1] for end in episode.episode.turn_ends] == [True] * 3
    assert episode.episode.rewards == [1.0, 1.0, 11.0]
    assert episode.episode.metrics == {"heard": 3.0}


def test_a_turn_without_an_end_is_the_last():
    async def run_on(request):
        return Completion([7] * request.sampling.max_new_tokens, [-1.0] * request.sampling.max_new_tokens, True, 1)

    (episode,) = play(Counting, [{}], run_on, max_new_tokens=5)

    assert (len(episode.token_ids), episode.is_truncated, len(episode.episode.rewards)) == (5, True, 1)


@pytest.mark.parametrize("limit", [{"max_turns": 2}, {"max_new_tokens": 6}])
def test_an_episode_without_room_for_another_turn_is_cut(limit):
    (episode,) = play(Counting, [{}], **limit)

    assert episode.is_truncated
    assert episode.is_own[-1]
    assert len(episode.episode.rewards) < 3


class Clock:
    """Time that goes on once all open episodes sleep, up to the first one that wakes."""

    def __init__(self, num_open):
        self.now, self._num_open, self._sleeping, self._lock = 0.0, num_open, [], threading.Lock()

    async def sleep(self, seconds):
        loop = asyncio.get_running_loop()
        with self._lock:
            woken = loop.create_future()
            heapq.heappush(self._sleeping, (self.now + seconds, id(woken), loop, woken))
            self._go_on()
        await woken

    def close(self):
        with self._lock:
            self._num_open -= 1
            self._go_on()

    def _go_on(self):
        if self._sleeping and len(self._sleeping) == self._num_open:
            self.now, _, loop, woken = heapq.heappop(self._sleeping)
            loop.call_soon_threadsafe(woken.set_result, None)


class ByTheClock(Sleeping):
    clock = None

    async def step(self, message):
        await self.clock.sleep(self.seconds.pop())
        return Step("1", done=not self.seconds)

    async def close(self):
        self.clock.close()


def test_no_episode_waits_for_another(monkeypatch):
    """64 of them, with tools of a heavy tail, take as long as the longest of them."""
    draw = random.Random(0)
    rows = [{"seconds": [min(2.0, 0.05 * draw.paretovariate(1.1)) for _ in range(4)]} for _ in range(64)]
    longest = max(sum(row["seconds"]) for row in rows)
    rounds = sum(max(each) for each in zip(*(row["seconds"] for row in rows), strict=True))
    monkeypatch.setattr(ByTheClock, "clock", clock := Clock(64))

    play(ByTheClock, rows)

    assert clock.now == pytest.approx(longest)
    assert rounds > 1.15 * longest  # as those would that wait for one another


@pytest.mark.parametrize("world", [Sleeping, Blocking])
def test_as_many_episodes_are_open_as_are_allowed(world):
    open_now, most = 0, 0

    async def count(request):
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        completion = await say_seven(request)
        open_now -= 1
        return completion

    play(world, [{"seconds": [0.001]}] * 20, count, max_concurrency=3)

    assert most <= 3


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raises", r"`Unruly` \(prompt 0, sample 0\): `step` raised KeyError: 'lost' \(.*worlds.py:\d+\)"),
        ("exits", r"`step` raised RuntimeError: SystemExit: 3"),
        ("sleeps", r"`step` took longer than `rollout.episodes.timeout` \(0.05 s\)\."),
        ("hangs", r"took longer than `rollout.episodes.timeout` \(0.05 s\)\. Its thread is left behind"),
        ("computes", r"took longer than `rollout.episodes.timeout` \(0.05 s\)\.$"),
        ("says nothing", r"`step` must return messages, or say that the episode is `done`"),
        ("returns no step", r"`step` must return a `Step`, got '5'"),
        ("rewards with a word", r"`Step.reward` must be a finite number, got 'good'"),
        ("takes a name", r"`Step.metrics` may not have `turns`, which each environment has of its own"),
        ("says a number", r"expected a text or a list of messages, got 5"),
    ],
)
def test_an_environment_that_fails_is_named(fault, message, monkeypatch):
    # On a busy machine what hangs must not end within the grace, nor what computes outlast it.
    grace = {"hangs": 0.05, "computes": 2.0}.get(fault, 1.0)
    monkeypatch.setattr("verl_lightning.environments.own_thread._GRACE", grace)
    limit = 0.05 if fault in ("sleeps", "hangs", "computes") else 60.0
    with pytest.raises(RunError, match=r"1 of 1 episodes .* `rollout.episodes.max_error_share: 0.1` .*" + message):
        play(Unruly, [{"fault": fault}], timeout=limit)


def test_a_failed_episode_costs_no_other():
    rows = [{"fault": "raises"}, {"fault": ""}]

    with pytest.warns(UserWarning, match="1 of 2 episodes of a batch could not be finished and are left out"):
        failed, whole = play(Unruly, rows, max_error_share=0.5)

    assert failed.episode.error
    assert whole.episode.rewards == [1.0, 1.0, 11.0]


def test_a_run_learns_from_an_environments_rewards(tmp_path, tiny_folder, prompt_file):
    recorder = Recorder()
    rollout = make_rollout(max_new_tokens=40, environment=Counting)

    module = make_ppo(tiny_folder, reward="environment")
    make_trainer(tmp_path, rollout, recorder).fit(module, make_prompts(prompt_file))

    assert len(recorder.steps) == 3
    assert min(recorder.column("actor/grad_norm")) > 0
    assert recorder.column("rollout_corr/abs_log_prob_gap")[0] < 1e-4
    assert recorder.column("critic/score/mean") == pytest.approx(recorder.column("env/Counting/reward"))
    assert recorder.column("env/Counting/episodes") == [16.0] * 3


def test_rewards_of_environments_are_not_dropped(tmp_path, tiny_folder, prompt_file):
    module = make_ppo(tiny_folder, reward=None, advantage=None, teacher=TeacherConfig(path=str(tiny_folder)))
    trainer = make_trainer(tmp_path, make_rollout(environment=Counting))

    with pytest.raises(MisconfigurationException, match="`model.reward: null` would drop what `rollout.environment`"):
        trainer.fit(module, make_prompts(prompt_file))


def test_episodes_are_played_ahead_and_a_checkpoint_holds_them(tmp_path, tiny_folder, prompt_file):
    recorder, path = Recorder(), tmp_path / "two.ckpt"
    options = {"max_new_tokens": 40, "environment": Counting, "max_staleness": 2}
    module = make_ppo(tiny_folder, reward="environment", corrections=[TruncatedImportanceSampling()])
    trainer = make_trainer(tmp_path, make_rollout(**options), recorder, Saver(path))
    trainer.fit(module, make_prompts(prompt_file))

    assert recorder.column("rollout/staleness/max") == [0.0, 1.0, 2.0]
    assert recorder.column("env/Counting/episodes") == [16.0] * 3
    (saved,) = torch.load(path, weights_only=True)["rollout_queue"]["groups"]
    completions = unpack_completions(saved["completions"])
    assert len(completions) == 2 * 16
    assert {each.episode.environment for each in completions} == {"Counting"}
    assert pack_completions(completions)["episodes"] == saved["completions"]["episodes"]
    assert all(each.is_own.count(True) == len(each.own_versions) > 0 for each in completions)


class Saver(Callback):
    """Saves once, while episodes wait."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)
