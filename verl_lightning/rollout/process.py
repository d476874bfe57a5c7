"""The vLLM engine in a process of its own, beside the trainer: on other GPUs, and replaceable when it dies."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from verl_lightning.faults import RunError
from verl_lightning.processes import loopback
from verl_lightning.processes.supervisor import SupervisedProcess
from verl_lightning.rollout.base import Prompts, SamplingConfig
from verl_lightning.rollout.completions import Completion, to_rollout
from verl_lightning.rollout.vllm import late_message
from verl_lightning.rollout.vllm_config import VLLMConfig
from verl_lightning.rollout.weight_transfer import GPUSender, Transfer, chunks, chunks_on_host
from verl_lightning.types import Rollout

GRACE = 60.0
"""Seconds beyond its deadline that an engine gets to say that it is late, before it counts as stuck."""

STOP_SECONDS = 10.0
"""Seconds that an engine may take to end by itself."""

LAST_WORDS_SECONDS = 2.0
"""Seconds that an engine that has closed its pipe may take to end, so that its exit code is its own."""

ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (MisconfigurationException, ValueError, RuntimeError, TimeoutError)
}


class EngineDiedError(RunError):
    """The engine's process ended; a new one may take its place."""


class ProcessEngine:
    """A `VLLMEngine` in a child process, spoken to in JSON and safetensors through a pipe.

    Weights go through the host's memory, or from GPU to GPU. The child ends with its parent.

    Args:
        config: Settings of the engine.
        gpu: Index of its GPU among those that this process sees; None on CPUs.
        start_timeout: Seconds that importing vLLM and making it ready may take.
        grace: Seconds beyond the deadline after which a silent engine is killed.
        transfer: Route of the weights to the engine.
    """

    def __init__(
        self,
        config: VLLMConfig,
        *,
        gpu: int | None = None,
        start_timeout: float = 1800.0,
        grace: float = GRACE,
        transfer: Transfer = "host",
    ) -> None:
        self.config = config
        self.gpu = gpu
        self.start_timeout = start_timeout
        self.grace = grace
        self.transfer = transfer
        self._sender: GPUSender | None = None
        self._process: SupervisedProcess | None = None
        self._connection: Connection | None = None
        self._was_late = False
        self.pid = 0
        """Id of the engine's process, once it has started; 0 before."""

    def start(self, device: torch.device) -> None:
        """Start a process in which vLLM has random weights, in place of one that died; does nothing if it runs.

        Args:
            device: Device of the trainer, which the engine leaves alone.

        Raises:
            EngineDiedError: If the process does not start; what it wrote stands above.
        """
        if self._process is not None and not self._process.has_ended:
            return
        self.stop()
        if not dist.is_initialized():  # else it is settled where NCCL listens, for the engine's process too
            loopback.use_for("NCCL")
        ours, theirs = Pipe()
        self._connection = ours
        self._process = self._spawn(theirs)
        theirs.close()
        with self._watch(self.start_timeout):
            answer = self._ask("start", config=dataclasses.asdict(self.config), on_gpu=self.gpu is not None)
            self.pid = answer["pid"]
            if self.transfer != "host":
                self._meet(GPUSender(self.transfer, device))

    def _spawn(self, connection: Connection) -> SupervisedProcess:
        """Start a process that serves its end of the pipe."""
        visible = {} if self.gpu is None else {"CUDA_VISIBLE_DEVICES": _visible_gpu(self.gpu)}
        return SupervisedProcess(
            "verl_lightning.rollout.worker",
            str(connection.fileno()),
            pass_fds=[connection.fileno()],
            env=_environment_without_launcher() | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | visible,
        )

    def _meet(self, sender: GPUSender) -> None:
        """Open the way from GPU to GPU."""
        self._sender, invitation = sender, sender.invitation()
        self._send({"do": "join_trainer", "invitation": invitation})
        sender.join(invitation)
        self._answer()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Send the policy's weights. Takes all of them, also when the engine dies meanwhile: others may wait.

        Raises:
            EngineDiedError: If the engine is dead, once all weights were taken.
        """
        weights = iter(weights)
        try:
            with self._watch(self.config.deadline + self.grace):
                if self._sender is None:
                    self._send_through_host(weights)
                else:
                    self._send_between_gpus(self._sender, weights)
        finally:
            for _ in weights:
                pass

    def _send_through_host(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        self._send({"do": "load_weights"})
        for bucket in buckets(weights):
            self._send_bytes(bucket)
        self._send_bytes(b"")
        self._answer()

    def _send_between_gpus(self, sender: GPUSender, weights: Iterator[tuple[str, Tensor]]) -> None:
        self._ask("start_weights")
        for chunk in chunks(weights):
            placed = sender.on_gpu(chunk)
            self._send({"do": "receive_weights", "info": sender.announce(placed)})
            sender.send(placed)
            self._received(sender)
        self._ask("finish_weights")

    def _received(self, sender: GPUSender) -> None:
        try:
            self._answer()
        except EngineDiedError as error:
            if sender.transfer != "nccl":
                raise
            raise RunError(
                f"{error} It died while weights were on their way, and this process' GPU now waits for it forever."
                " Go on from the last checkpoint, or set `rollout.beside.transfer: host`."
            ) from error

    def load_adapter(self, folder: Path) -> None:
        """Have the engine read the policy's adapter from a PEFT folder."""
        with self._watch(self.config.deadline + self.grace):
            self._ask("load_adapter", folder=str(folder))

    def drop_caches(self) -> None:
        """Forget the key-value cache of every prompt."""
        with self._watch(self.config.deadline + self.grace):
            self._ask("drop_caches")

    def sleep(self) -> None:
        """Does nothing: the engine's memory is its own."""

    def generate(self, prompts: Prompts, sampling: SamplingConfig) -> Rollout:
        """Sample ``sampling.num_samples`` responses to each prompt.

        Raises:
            EngineDiedError: If the engine dies meanwhile.
            TimeoutError: If some responses are not finished after the deadline, also if the engine is stuck.
            ValueError: If the longest prompt and its response don't fit into `max_model_len`.
        """
        late = set(range(len(prompts) * sampling.num_samples))
        completions: dict[int, Completion] = {}
        try:
            with self._watch(self.config.deadline + self.grace):
                self._send({"do": "generate", **encode_prompts(prompts), "sampling": dataclasses.asdict(sampling)})
                while "row" in (answer := self._answer()):
                    completions[answer["row"]] = Completion(*answer["completion"])
                    late.remove(answer["row"])
        except EngineDiedError:
            if self._was_late:
                raise TimeoutError(late_message(prompts, late, self.config.deadline)) from None
            raise
        rows = [completions[row] for row in range(len(completions))]
        return to_rollout(prompts, sampling, rows, pad_token_id=self.config.pad_token_id)

    def stop(self) -> None:
        """End the process; may be called twice."""
        if self._process is None:
            return
        assert self._connection is not None
        self._connection.close()
        self._process.end(STOP_SECONDS)
        self._process = self._connection = self._sender = None
        self.pid = 0

    def kill(self) -> None:
        """End the process at once, whatever it does; `stop` is still to follow."""
        if self._process is not None:
            self._process.end()

    def _ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        self._send({"do": do, **arguments})
        return self._answer()

    def _send(self, message: dict[str, Any]) -> None:
        self._send_bytes(json.dumps(message).encode())

    def _send_bytes(self, message: bytes) -> None:
        try:
            self._open.send_bytes(message)
        except OSError as error:
            raise self._death() from error

    def _answer(self) -> dict[str, Any]:
        """Return the engine's next answer; raise what the engine raised."""
        try:
            answer: dict[str, Any] = json.loads(self._open.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._death() from error
        if "error" in answer:
            raised = ERRORS.get(answer["error"], RuntimeError)(answer["message"])
            raised.add_note(answer["traceback"])
            raise raised
        return answer

    @property
    def _open(self) -> Connection:
        if self._connection is None:
            raise RuntimeError("`start` the engine before using it.")
        return self._connection

    @contextlib.contextmanager
    def _watch(self, seconds: float) -> Iterator[None]:
        """Kills an engine that is not done in time, which ends all waiting for it."""
        self._was_late = False

        def give_up() -> None:
            self._was_late = True
            self.kill()

        timer = threading.Timer(seconds, give_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _death(self) -> EngineDiedError:
        assert self._process is not None
        code = self._process.end(LAST_WORDS_SECONDS)
        return EngineDiedError(f"the engine's process{f' {self.pid}' if self.pid else ''} ended with {code}.")


def buckets(weights: Iterator[tuple[str, Tensor]]) -> Iterator[bytes]:
    """Yield weights in the safetensors format, in messages of about `BUCKET_BYTES`."""
    for chunk in chunks_on_host(weights):
        yield safetensors.torch.save({name: weight.contiguous() for name, weight in chunk.items()})


def encode_prompts(prompts: Prompts) -> dict[str, Any]:
    """Convert prompts to values as JSON has them."""
    return {
        "prompt_ids": prompts.prompt_ids.tolist(),
        "prompt_mask": prompts.prompt_mask.tolist(),
        "seeds": prompts.seeds,
    }


def _visible_gpu(index: int) -> str:
    """Return ``CUDA_VISIBLE_DEVICES`` for a child that is to see this process's GPU ``index`` alone."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(index) if not visible else visible.split(",")[index]


def _environment_without_launcher() -> dict[str, str]:
    """Return this process's environment, less what would make vLLM take itself for one of the training ranks."""
    launcher = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "GROUP_RANK"}
    return {name: value for name, value in os.environ.items() if name not in launcher}
