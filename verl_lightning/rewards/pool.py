"""Scores responses in worker processes that can be killed, so that no reward function can stop or skew a run."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import selectors
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from verl_lightning.faults import RunError
from verl_lightning.rewards.base import RewardSample
from verl_lightning.rewards.environment import worker_environment
from verl_lightning.rewards.process import WorkerProcess, stop_workers
from verl_lightning.rewards.scoring import RewardResults, ScoringBatch, units_of
from verl_lightning.rewards.wire import encode_line

if TYPE_CHECKING:
    from verl_lightning.rewards.ray_pool import RayRewardPool

_VARIABLE = re.compile(r"[A-Za-z_]\w*")
_START_SECONDS = 300.0  # to import the function's module, which may load a model


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Reward function that judges the responses, and settings for running it."""

    function: str
    """A built-in name (``gsm8k``, ``gsm8k_flexible``, ``math``, ``exact_match``, ``tag_format``, ``boxed_format``), an
    import path ``package.module.function``, or a file ``path/to/file.py:function``."""

    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function, the same for every sample. They are saved and logged with the other settings;
    ``${NAME}`` stands for the environment variable ``NAME``, whose value is not."""

    environment: list[str] | None = None
    """Names of the environment variables that the function may see, beside basic ones such as ``PATH`` and ``HOME``
    (``verl_lightning.rewards.environment.BASICS``); null lets it see all."""

    num_workers: int = 2
    """Workers of each rank: processes, or Ray actors with one CPU each."""

    backend: Literal["processes", "ray"] = "processes"
    """Kind of the workers: ``processes`` on the rank's own machine, or ``ray`` actors anywhere in the Ray cluster,
    which replaces those that die."""

    timeout: float = 30.0
    """Seconds that one sample may take. A sample that takes longer is left out, and its worker is killed."""

    max_error_share: float = 0.1
    """Share of a batch, in ``[0, 1]``, that may be left out for errors and timeouts; above it the run stops."""

    def __post_init__(self) -> None:
        if not self.function:
            raise ValueError("`function` must name the reward function, such as `gsm8k`, but it is empty.")
        if self.num_workers < 1:
            raise ValueError(f"`num_workers` must be at least 1, got {self.num_workers}.")
        if not 0 < self.timeout < math.inf:
            raise ValueError(f"`timeout` must be a positive number of seconds, got {self.timeout}.")
        if not 0 <= self.max_error_share <= 1:
            raise ValueError(f"`max_error_share` must be between 0 and 1, got {self.max_error_share}.")
        if wrong := [name.partition("=")[0] for name in self.environment or () if not _VARIABLE.fullmatch(name)]:
            raise ValueError(
                "`environment` lists names of environment variables without their values, such as `OPENAI_API_KEY`; got"
                f" `{wrong[0]}`."
            )
        if self.backend not in ("processes", "ray"):
            raise ValueError(f"`backend` must be `processes` or `ray`, got {self.backend!r}.")


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
        f"The reward `function: {config.function}` failed on {results.num_errors} of"
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
        self.is_batched = False  # known once the function is loaded
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
        no_samples = ScoringBatch([], num_workers=self.config.num_workers)
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
        if not self._workers:
            raise RuntimeError("`RewardPool.score` needs running workers. Call `start` first.")
        units = units_of(samples, is_batched=self.is_batched)
        batch = ScoringBatch(units, num_workers=self.config.num_workers)
        for worker in [worker for worker in self._workers if worker.is_dead]:
            self._replace(worker, batch)
        try:
            while not batch.is_done:
                self._share_out(batch)
                self._advance(batch)
                self._check_failures(batch, max_error_share)
        finally:
            if not batch.is_done:
                self.stop()
        return batch.results()

    def stop(self) -> None:
        """Ends the workers. Does nothing if there are none; ``start`` may follow."""
        stop_workers(self._workers)
        self._workers = []

    def _spawn(self) -> WorkerProcess:
        first_line = {
            "function": self.config.function,
            "arguments": self.config.arguments,
            "sys_path": [str(path) for path in sys.path],
        }
        environment = worker_environment(os.environ, self.config.environment)
        return WorkerProcess(encode_line(first_line), environment=environment, start_timeout=_START_SECONDS)

    def _share_out(self, batch: ScoringBatch) -> None:
        for worker in self._workers:
            if worker.is_ready and not worker.queue and (units := batch.take()):
                timeouts = [self.config.timeout * batch.sizes[unit] for unit in units]
                worker.assign(units, [batch.requests[unit] for unit in units], timeouts=timeouts)

    def _advance(self, batch: ScoringBatch) -> None:
        """Waits until a worker has something to say or runs out of time, and deals with it."""
        for worker in self._wait():
            for answer in worker.receive():
                self._take_answer(worker, answer, batch)
            if worker.is_at_end or worker.is_garbled:
                self._bury(worker, batch)
        now = time.monotonic()
        for worker in [worker for worker in self._workers if worker.deadline < now]:
            self._interrupt(worker, batch)

    def _wait(self) -> list[WorkerProcess]:
        """Moves backlogs on until an answer comes or a deadline passes; gives the workers with answers."""
        first_deadline = min(worker.deadline for worker in self._workers)
        with selectors.PollSelector() as selector:
            for worker in self._workers:
                selector.register(worker.answers, selectors.EVENT_READ, worker)
                if worker.has_backlog:
                    selector.register(worker.requests, selectors.EVENT_WRITE, worker)
            events = selector.select(max(0.0, first_deadline - time.monotonic()))
        for key, event in events:
            if event & selectors.EVENT_WRITE:
                key.data.flush()
        return [key.data for key, event in events if event & selectors.EVENT_READ]

    def _take_answer(self, worker: WorkerProcess, answer: Any, batch: ScoringBatch) -> None:
        unit = worker.finish()
        if worker.is_ready:
            batch.record_answer(unit, answer)
        elif "failed" in answer:
            error = ValueError(answer["failed"])
            error.add_note(answer["traceback"])
            raise error
        else:
            worker.is_ready = True
            self.is_batched = answer["is_batched"]

    def _bury(self, worker: WorkerProcess, batch: ScoringBatch) -> None:
        garbled = "Something that was no answer came out of the worker's pipe, to which user code must not write,"
        how = f"The worker's process ended ({worker.kill()})" if worker.is_at_end else garbled
        if not worker.is_ready:
            raise ValueError(
                f"The reward `function: {self.config.function}` does not import. {how} meanwhile; what it printed"
                " stands above. Import it in a Python shell to see why."
            )
        if worker.queue:
            batch.record_loss(worker.finish(), how)
        self._replace(worker, batch)

    def _interrupt(self, worker: WorkerProcess, batch: ScoringBatch) -> None:
        if not worker.is_ready:
            raise ValueError(
                f"The reward `function: {self.config.function}` does not import within {_START_SECONDS:g} seconds."
                " Import it in a Python shell to see what it waits for."
            )
        unit = worker.finish()
        batch.record_timeout(unit, self.config.timeout * batch.sizes[unit])
        self._replace(worker, batch)

    def _replace(self, worker: WorkerProcess, batch: ScoringBatch) -> None:
        worker.kill()
        batch.put_back(assignment.unit for assignment in worker.queue if worker.is_ready)
        self._workers[self._workers.index(worker)] = self._spawn()

    def _check_failures(self, batch: ScoringBatch, max_error_share: float | None) -> None:
        config = with_error_share(self.config, max_error_share)
        if batch.num_failures > config.max_error_share * batch.num_samples:
            check_failures(config, batch.results())
