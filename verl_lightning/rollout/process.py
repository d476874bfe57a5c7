"""An engine in a process of its own, beside the trainer: on other GPUs, and replaceable when it dies."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from verl_lightning.faults import RunError
from verl_lightning.processes import loopback
from verl_lightning.processes.supervisor import SupervisedProcess
from verl_lightning.rollout.base import Completion, Request
from verl_lightning.rollout.stepping import GRACE, Recipe, late_message
from verl_lightning.rollout.weight_sums import WeightSums
from verl_lightning.rollout.weight_transfer import GPUSender, Transfer, chunks, chunks_on_host
from verl_lightning.types import PromptImages

STOP_SECONDS = 10.0
"""Seconds that an engine may take to end by itself."""

LAST_WORDS_SECONDS = 2.0
"""Seconds that an engine that has closed its pipe may take to end, so that its exit code is its own."""

ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (MisconfigurationException, ValueError, RuntimeError, TimeoutError)
}


class EngineDiedError(RunError):
    """The engine's process ended; a new one may take its place."""


class Asked(NamedTuple):
    """A request on its way."""

    name: str
    """The user's name for it."""

    answer: asyncio.Future[Completion]
    """Future that its completion will be."""


class ProcessEngine:
    """An engine in a child process, spoken to in JSON and safetensors through a pipe.

    Weights go through the host's memory, or from GPU to GPU. The child ends with its parent.

    Args:
        recipe: Engine that the process makes.
        gpu: Index of its GPU among those that this process sees; None on CPUs.
        start_timeout: Seconds that imports and making the engine ready may take.
        grace: Seconds beyond the deadline after which a silent engine is killed.
        transfer: Route of the weights to the engine.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        gpu: int | None = None,
        start_timeout: float = 1800.0,
        grace: float = GRACE,
        transfer: Transfer = "host",
    ) -> None:
        self.recipe = recipe
        self.gpu = gpu
        self.start_timeout = start_timeout
        self.grace = grace
        self.transfer = transfer
        self._sender: GPUSender | None = None
        self._process: SupervisedProcess | None = None
        self._connection: Connection | None = None
        self._keys = itertools.count()
        self._asked: dict[int, Asked] = {}
        self._outbox: dict[int, Request] = {}
        self._loop: asyncio.AbstractEventLoop | None = None  # of the newest request
        self._stop_reading: Callable[[], object] = lambda: None
        self.pid = 0
        """Id of the engine's process, once it has started; 0 before."""

    def start(self, device: torch.device) -> None:
        """Start a process in which the engine has no weights yet, in place of one that died; does nothing if it runs.

        Args:
            device: Device of the trainer, which the engine leaves alone.

        Raises:
            EngineDiedError: If the process does not start; what it wrote stands above.
        """
        if self._process is not None and not self._process.has_ended:
            return
        if self._asked and self._loop is not None:  # an event loop that has not heard of the death yet
            self._loop.call_soon_threadsafe(self._fail, self._death())
        self.stop()
        if not dist.is_initialized():  # else it is settled where NCCL listens, for the engine's process too
            loopback.use_for("NCCL")
        ours, theirs = Pipe()
        self._connection = ours
        self._process = self._spawn(theirs)
        theirs.close()
        with self._watch(self.start_timeout):
            answer = self._ask("start", recipe=dataclasses.asdict(self.recipe), on_gpu=self.gpu is not None)
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

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Send the policy's weights. Takes all of them, also when the engine dies meanwhile: others may wait.

        Raises:
            EngineDiedError: If the engine is dead, once all weights were taken.
        """
        weights = iter(weights)
        try:
            with self._watch(self.recipe.deadline + self.grace):
                if self._sender is None:
                    self._send_through_host(weights, version)
                else:
                    self._send_between_gpus(self._sender, weights, version)
        finally:
            for _ in weights:
                pass

    def _send_through_host(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        self._send({"do": "load_weights", "version": version})
        for bucket in buckets(weights):
            self._send_bytes(bucket)
        self._send_bytes(b"")
        self._answer()

    def _send_between_gpus(self, sender: GPUSender, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        self._ask("start_weights")
        for chunk in chunks(weights):
            placed = sender.on_gpu(chunk)
            self._send({"do": "receive_weights", "info": sender.announce(placed)})
            sender.send(placed)
            self._received(sender)
        self._ask("finish_weights", version=version)

    def _received(self, sender: GPUSender) -> None:
        try:
            self._answer()
        except EngineDiedError as error:
            if sender.transfer != "nccl":
                raise
            raise RunError(
                f"{error} It died while weights were on their way, and this process' GPU now waits for it forever."
                " Go on from the last checkpoint, or set `rollout.placement.transfer: host`."
            ) from error

    def load_adapter(self, folder: Path, version: int) -> None:
        """Have the engine read the policy's adapter from a PEFT folder."""
        with self._watch(self.recipe.deadline + self.grace):
            self._ask("load_adapter", folder=str(folder), version=version)

    def drop_caches(self) -> None:
        """Forget the key-value cache of every prompt."""
        with self._watch(self.recipe.deadline + self.grace):
            self._ask("drop_caches")

    def weight_sums(self) -> WeightSums:
        """Sum the weights that the engine holds."""
        with self._watch(self.recipe.deadline + self.grace):
            sums: WeightSums = self._ask("weight_sums")["sums"]
        return sums

    def sleep(self) -> None:
        """Does nothing: the engine's memory is its own."""

    async def generate(self, request: Request) -> Completion:
        """Sample one response; what is asked at once reaches the engine at once.

        Raises:
            EngineDiedError: If the engine dies meanwhile.
            TimeoutError: If it is not finished after the deadline, also if the engine is stuck.
            ValueError: If prompt and response don't fit into `max_model_len`.
        """
        connection, key = self._open, next(self._keys)
        self._loop = loop = asyncio.get_running_loop()
        if not self._asked:
            loop.add_reader(descriptor := connection.fileno(), self._read)
            self._stop_reading = functools.partial(loop.remove_reader, descriptor)
        if not self._outbox:
            loop.call_soon(self._flush)
        self._outbox[key] = request
        self._asked[key] = Asked(request.name, loop.create_future())
        try:
            return await self._asked[key].answer
        finally:
            del self._asked[key]
            if not self._asked:
                self._stop_reading()

    def _flush(self) -> None:
        """Send the requests that were asked since the last turn of the event loop."""
        requests, self._outbox = self._outbox, {}
        patience = self.recipe.deadline + self.grace
        asyncio.get_running_loop().call_later(patience, self._give_up_on, requests.keys())
        try:
            self._send({"do": "generate"} | encode_requests(requests))
        except EngineDiedError as error:
            self._fail(error)

    def _read(self) -> None:
        """Take what the engine says about its requests."""
        try:
            self._deliver(self._receive())
        except EngineDiedError as error:
            self._fail(error)

    def _deliver(self, answer: dict[str, Any]) -> None:
        """Tell those who wait for it."""
        if "error" in answer:
            self._fail(decode_error(answer), answer["keys"])
        elif (asked := self._asked.get(answer["key"])) and not asked.answer.done():
            asked.answer.set_result(Completion(*answer["completion"]))

    def _give_up_on(self, keys: Iterable[int]) -> None:
        """Kill an engine that has not even said that these requests are late."""
        if late := [self._asked[key].name for key in keys if key in self._asked]:
            self.kill()
            self._fail(TimeoutError(late_message(late, self.recipe.deadline)))

    def _fail(self, error: Exception, keys: Iterable[int] | None = None) -> None:
        """Raise an error for some of those who wait, or for all."""
        for key in list(self._asked if keys is None else keys):
            if (asked := self._asked.get(key)) and not asked.answer.done():
                asked.answer.set_exception(error)

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
        """Return the engine's next answer; raise what the engine raised.

        Responses that come before it are handed to the event loop that waits for them, which must not read meanwhile.
        """
        while "key" in (answer := self._receive()) or answer.get("keys"):
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._deliver, answer)
        if "error" in answer:
            raise decode_error(answer)
        return answer

    def _receive(self) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = json.loads(self._open.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._death() from error
        return answer

    @property
    def _open(self) -> Connection:
        if self._connection is None:
            raise RuntimeError("`start` the engine before using it.")
        return self._connection

    @contextlib.contextmanager
    def _watch(self, seconds: float) -> Iterator[None]:
        """Kills an engine that is not done in time, which ends all waiting for it."""
        timer = threading.Timer(seconds, self.kill)
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


def encode_requests(requests: Mapping[int, Request]) -> dict[str, Any]:
    """Convert requests to values as JSON has them, with the images of each prompt once for all its samples."""
    shown = {id(request.images): request.images for request in requests.values() if request.images is not None}
    places = {each: place for place, each in enumerate(shown)}
    encoded = [
        [key, vars(each) | {"sampling": dataclasses.asdict(each.sampling), "images": places.get(id(each.images))}]
        for key, each in requests.items()
    ]
    return {"requests": encoded, "images": [encode_images(images) for images in shown.values()]}


def encode_images(images: PromptImages) -> dict[str, Any]:
    """Convert the images of a prompt to values as JSON has them: tensors in the safetensors format, as base64 text."""
    state = images.state_dict()
    files = {f"file {number}": file for number, file in enumerate(state["files"])}
    inputs = {name: value.contiguous() for name, value in state["inputs"].items() if value is not None}
    tensors = base64.b64encode(safetensors.torch.save(inputs | files)).decode()
    return {name: state[name] for name in ("mm_token_type_ids", "short_ids")} | {"tensors": tensors}


def decode_error(answer: dict[str, Any]) -> Exception:
    """Rebuild the error that the engine tells of."""
    error = ERRORS.get(answer["error"], RuntimeError)(answer["message"])
    error.add_note(answer["traceback"])
    return error


def _visible_gpu(index: int) -> str:
    """Return ``CUDA_VISIBLE_DEVICES`` for a child that is to see this process's GPU ``index`` alone."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(index) if not visible else visible.split(",")[index]


def _environment_without_launcher() -> dict[str, str]:
    """Return this process's environment, less what would make vLLM take itself for one of the training ranks."""
    launcher = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "GROUP_RANK"}
    return {name: value for name, value in os.environ.items() if name not in launcher}
