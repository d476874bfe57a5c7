"""Scores responses in worker processes that can be killed, so that no reward function can stop or skew a run."""

from __future__ import annotations

import dataclasses
import os
import selectors
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from verl_lightning.faults import RunError
from verl_lightning.processes.module_path import module_path
from verl_lightning.rewards.base import RewardSample
from verl_lightning.rewards.config import RewardConfig
from verl_lightning.rewards.environment import worker_environment
from verl_lightning.rewards.given import to_wire
from verl_lightning.rewards.process import WorkerProcess, stop_workers
from verl_lightning.rewards.scoring import RewardResults, ScoringBatch, units_of
from verl_lightning.rewards.wire import encode_line

if TYPE_CHECKING:
    from verl_lightning.rewards.ray_pool import RayRewardPool

_START_SECONDS = 300.0  # to import the functions' modules, which may load a model
_GRACE_SECONDS = 5.0  # for a worker to cancel calls of an `async` function that take too long, before it is killed


def make_pool(config: RewardConfig) -> RewardPool | RayRewardPool:
    """Makes the pool of a configuration's back end; does not start it."""
    if config.backend == "processes":
        return RewardPool(config)
    from verl_lightning.rewards.ray_pool import RayRewardPool  # late: it needs this file

    return RayRewardPool(config)


def with_error_share(config: RewardConfig, max_error_share: float | None) -> RewardConfig:
    """Returns the configuration with another ``max_error_share``; for None the same configuration."""
    return config if max_error_share is None else dataclasses.replace(config, max_error_share=max_error_share)


def check_failures(config: RewardConfig, results: RewardResults) -> None:
    """Stops a run whose reward function fails too often.

    Args:
        config: Settings of the function, with the share of samples that may fail.
        results: Results of a batch so far.

    Raises:
        RunError: If a larger share of the samples has failed.
    """
    num_samples = len(results.rewards)
    if results.num_errors + results.num_timeouts <= config.max_error_share * num_samples:
        return
    raise RunError(
        f"The reward {config.label} failed on {results.num_errors} of"
        f" {num_samples - results.num_unjudged} samples and ran out of time (`timeout: {config.timeout:g}`) on"
        f" {results.num_timeouts}, which is more than `max_error_share: {config.max_error_share:g}` allows in a batch"
        f" of {num_samples}. Mend the function, or raise the share to leave such samples out. The first failure:\n"
        f"{results.first_traceback}"
    )


class RewardPool:
    """Worker processes that share out the samples of each batch.

    A sample whose function raises, returns no number that fits, kills its process or takes too long gets no reward: it
    is counted and left out, never taken for 0. Rewards don't depend on which worker gives them. No worker outlives its
    parent, nor anything that the worker started. Start, score and stop from one thread: Linux takes a worker down with
    the thread that started it.

    Args:
        config: The function and its limits.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self.is_batched = False  # both known once the functions are loaded
        self.is_async = False
        self._workers: list[WorkerProcess] = []

    def start(self) -> None:
        """Starts the workers and waits until each has imported the function.

        Raises:
            ValueError: If the function does not import or does not take the arguments.
            RuntimeError: If the pool is started already.
        """
        if self._workers:
            raise RuntimeError("`RewardPool.start` was called twice. Call `stop` in between.")
        self._workers = [self._spawn() for _ in range(self.config.num_workers)]
        no_samples = self.begin([])
        try:
            while not all(worker.is_ready for worker in self._workers):
                self._advance(no_samples)
        finally:
            if not all(worker.is_ready for worker in self._workers):
                self.stop()

    def score(self, samples: Sequence[RewardSample], *, max_error_share: float | None = None) -> RewardResults:
        """Scores a batch.

        Args:
            samples: Samples, any number or none.
            max_error_share: Share of samples that may fail; None takes the configured one.

        Returns:
            One reward a sample, in order; None for samples to leave out.

        Raises:
            RunError: If more than ``max_error_share`` of the samples fail, as soon as that is certain. The pool is then
                stopped.
            RuntimeError: Before ``start``.
            TypeError: If a sample holds a value that JSON can't express.
        """
        units = units_of(samples, is_batched=self.is_batched)
        batch = self.begin([len(unit) for unit in units])
        for index, unit in enumerate(units):
            batch.put(index, unit)
        return self.finish(batch, max_error_share=max_error_share)

    def begin(self, sizes: Sequence[int]) -> ScoringBatch:
        """Opens a batch whose samples come one after another.

        Args:
            sizes: Number of samples of each unit; see `units_of`.
        """
        return ScoringBatch(sizes, num_workers=self.config.num_workers)

    def offer(self, batch: ScoringBatch, unit: int, samples: Sequence[RewardSample]) -> None:
        """Brings the samples of a unit and goes on judging, without waiting for any answer."""
        self._check_running()
        batch.put(unit, samples)
        self._share_out(batch)
        self._advance(batch, waits=False)

    def finish(self, batch: ScoringBatch, *, max_error_share: float | None = None) -> RewardResults:
        """Waits for the answers to a batch whose samples have all come; see `score`."""
        self._check_running()
        try:
            while not batch.is_done:
                self._share_out(batch)
                self._advance(batch)
                self._check_failures(batch, max_error_share)
        finally:
            if not batch.is_done:
                self.stop()
        return batch.results()

    def give_up(self, batch: ScoringBatch) -> None:
        """Waits until no worker has a sample of a batch in hand whose other samples will not come."""
        while any(worker.queue for worker in self._workers):
            self._advance(batch)

    def stop(self) -> None:
        """Ends the workers. Does nothing if there are none; ``start`` may follow."""
        stop_workers(self._workers)
        self._workers = []

    def _spawn(self) -> WorkerProcess:
        first_line = {
            "parts": [vars(p) | {"function": to_wire(p.function), "label": p.label} for p in self.config.parts],
            "is_sum": self.config.function is None,
            "timeout": self.config.timeout,
            "sys_path": module_path(),
        }
        environment = worker_environment(os.environ, self.config.environment)
        return WorkerProcess(encode_line(first_line), environment=environment, start_timeout=_START_SECONDS)

    def _check_running(self) -> None:
        if not self._workers:
            raise RuntimeError("`RewardPool.score` needs running workers. Call `start` first.")

    def _share_out(self, batch: ScoringBatch) -> None:
        for worker in [worker for worker in self._workers if not worker.queue and worker.is_dead]:
            self._replace(worker, batch)  # no sample is to blame
        grace = _GRACE_SECONDS if self.is_async else 0.0
        for worker in self._workers:
            if worker.is_ready and (units := self._take(worker, batch)):
                timeouts = [self.config.timeout * batch.sizes[unit] + grace for unit in units]
                worker.assign(units, [batch.requests[unit] for unit in units], timeouts=timeouts)

    def _take(self, worker: WorkerProcess, batch: ScoringBatch) -> list[int]:
        held = [assignment.unit for assignment in worker.queue]
        if self.is_async:
            return batch.take_to_wait_for(held, room=worker.capacity - len(held))
        return [] if held else batch.take()

    def _advance(self, batch: ScoringBatch, *, waits: bool = True) -> None:
        """Deals with what workers say and with those that run out of time; waits for the first of them, or doesn't."""
        for worker in self._talkers(waits=waits):
            for unit, answer in worker.receive():
                self._take_answer(worker, unit, answer, batch)
            if worker.is_at_end or worker.is_garbled:
                self._bury(worker, batch)
        now = time.monotonic()
        for worker in [worker for worker in self._workers if worker.deadline < now]:
            self._interrupt(worker, batch)

    def _talkers(self, *, waits: bool) -> list[WorkerProcess]:
        """Moves backlogs on, until an answer comes or a deadline passes; gives the workers with answers."""
        first_deadline = min(worker.deadline for worker in self._workers)
        with selectors.PollSelector() as selector:
            for worker in self._workers:
                selector.register(worker.answers, selectors.EVENT_READ, worker)
                if worker.has_backlog:
                    selector.register(worker.requests, selectors.EVENT_WRITE, worker)
            events = selector.select(max(0.0, first_deadline - time.monotonic()) if waits else 0.0)
        for key, event in events:
            if event & selectors.EVENT_WRITE:
                key.data.flush()
        return [key.data for key, event in events if event & selectors.EVENT_READ]

    def _take_answer(self, worker: WorkerProcess, unit: int, answer: Any, batch: ScoringBatch) -> None:
        if worker.is_ready:
            batch.record_answer(unit, answer)
        elif "failed" in answer:
            error = ValueError(answer["failed"])
            error.add_note(answer["traceback"])
            raise error
        else:
            worker.is_ready = True
            self.is_batched, self.is_async = answer["is_batched"], answer["is_async"]
            worker.capacity = self.config.concurrency if self.is_async else 1
            self._check_concurrency()

    def _bury(self, worker: WorkerProcess, batch: ScoringBatch) -> None:
        garbled = "Something that was no answer came out of the worker's pipe, to which user code must not write,"
        how = garbled if worker.is_garbled else f"The worker's process ended ({worker.kill()})"
        if not worker.is_ready:
            raise ValueError(
                f"The reward {self.config.label} does not import. {how} meanwhile; what it printed"
                " stands above. Import it in a Python shell to see why."
            )
        match worker.take_in_hand():
            case []:
                pass
            case [unit]:
                batch.record_loss(unit, how)
            case several:
                batch.put_back_suspects(several)
        self._replace(worker, batch)

    def _interrupt(self, worker: WorkerProcess, batch: ScoringBatch) -> None:
        if not worker.is_ready:
            raise ValueError(
                f"The reward {self.config.label} does not import within {_START_SECONDS:g} seconds."
                " Import it in a Python shell to see what it waits for."
            )
        match worker.take_in_hand():
            case [unit]:
                batch.record_timeout(unit, self.config.timeout * batch.sizes[unit])
            case several:
                batch.put_back_suspects(several)
        self._replace(worker, batch)

    def _replace(self, worker: WorkerProcess, batch: ScoringBatch) -> None:
        worker.kill()
        batch.put_back(assignment.unit for assignment in worker.queue if worker.is_ready)
        self._workers[self._workers.index(worker)] = self._spawn()

    def _check_concurrency(self) -> None:
        if self.config.max_concurrency is not None and not self.is_async:
            raise ValueError(
                f"`model.reward.max_concurrency: {self.config.max_concurrency}` is for functions that are defined with"
                f" `async def`, and the reward {self.config.label} is not. Take it out."
            )

    def _check_failures(self, batch: ScoringBatch, max_error_share: float | None) -> None:
        config = with_error_share(self.config, max_error_share)
        if batch.num_failures > config.max_error_share * batch.num_samples:
            check_failures(config, batch.results())
