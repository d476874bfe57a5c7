"""An engine's process: ``python -m verl_lightning.rollout.worker``, started and spoken to by `ProcessEngine`."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import safetensors.torch
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from verl_lightning.models.config import ModelConfig
from verl_lightning.rollout.base import Completion, Guide, Request, SamplingConfig
from verl_lightning.rollout.hf import HFEngine
from verl_lightning.rollout.stepping import Recipe, SteppingEngine
from verl_lightning.rollout.vllm import VLLMEngine
from verl_lightning.rollout.vllm_config import VLLMConfig
from verl_lightning.rollout.weight_transfer import decode_handles
from verl_lightning.types import PromptImages

T = TypeVar("T")

ENGINE_ERRORS = (
    MisconfigurationException,
    ValueError,
    TypeError,
    KeyError,
    RuntimeError,
    ImportError,
    AssertionError,
)
"""Errors that the trainer is told of; any other ends this process."""


class Worker:
    """Does what the trainer asks, and steps its engine while there are requests.

    Args:
        connection: Connection to the trainer.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._engine: SteppingEngine | None = None
        self._unfinished: set[int] = set()
        self._is_updating = False  # while some weights are new and others old
        self._answers: SimpleQueue[bytes] = SimpleQueue()

    def run(self) -> None:
        """Serves until the trainer closes the pipe."""
        # Else both could wait for the other to read, where the trainer sends much while much is finished here.
        threading.Thread(target=self._send_answers, daemon=True).start()
        while True:
            try:
                while self._is_updating or not self._unfinished or self.connection.poll():
                    message = json.loads(self.connection.recv_bytes())
                    self._serve(message.pop("do"), message)
            except EOFError:
                return
            self._step()

    def _serve(self, do: str, message: dict[str, Any]) -> None:
        """Does one thing that the trainer waits for, or takes its requests."""
        if do == "generate":
            images = [decode_images(each) for each in message["images"]]
            for key, request in message["requests"]:
                self._unfinished.add(key)
                self._try([key], functools.partial(self._add, key, request, images))
        elif do == "weight_sums":
            self._try([], lambda: self._answer({"sums": self._running.weight_sums()}))
        elif self._try([], lambda: self._do(do, message)):
            self._answer({"done": do, "pid": os.getpid()})

    def _add(self, key: int, request: dict[str, Any], images: Sequence[PromptImages]) -> None:
        self._running.add(key, decode_request(request, images))

    def _step(self) -> None:
        """Has the engine go on with all requests, and answers those that it finishes."""
        self._try(list(self._unfinished), lambda: self._answer_all(self._running.step()))

    def _answer_all(self, ended: list[tuple[int, Completion]]) -> None:
        for key, completion in ended:
            self._unfinished.remove(key)
            self._answer({"key": key, "completion": completion})

    def _try(self, keys: list[int], work: Callable[[], None]) -> bool:
        """Does some work, and tells the trainer of an error in it: that is the trainer's to handle.

        Args:
            keys: Requests that have failed if the work does.
            work: Function that does it.
        """
        try:
            work()
        except OSError as error:
            if not isinstance(error, TimeoutError):  # the trainer is gone
                raise
            self._answer_error(error, keys)
        except ENGINE_ERRORS as error:
            self._answer_error(error, keys)
        else:
            return True
        self._unfinished.difference_update(keys)
        return False

    def _do(self, do: str, message: dict[str, Any]) -> None:
        if do == "start":
            self._engine = self._make_engine(Recipe(**message["recipe"]))
            self._engine.start(torch.device("cuda", 0) if message["on_gpu"] else torch.device("cpu"))
        elif do == "load_weights":
            self._load_weights(message["version"])
        elif do == "join_trainer":
            self._vllm.join_trainer(message["invitation"])
        elif do == "start_weights":
            self._is_updating = True
            self._vllm.start_weights()
        elif do == "receive_weights":
            self._vllm.receive_weights(decode_info(message["info"]))
        elif do == "finish_weights":
            self._vllm.finish_weights(message["version"])
            self._is_updating = False
        elif do == "load_adapter":
            self._vllm.load_adapter(Path(message["folder"]), message["version"])
        elif do == "drop_caches":
            self._running.drop_caches()

    def _make_engine(self, recipe: Recipe) -> SteppingEngine:
        """Make the engine; subclasses make others."""
        options = recipe.options
        if recipe.kind == "vllm":
            return VLLMEngine(decode(VLLMConfig, options["config"]))
        return HFEngine(**options | {"config": decode(ModelConfig, options["config"])})

    def _answer(self, answer: dict[str, Any]) -> None:
        self._answers.put(json.dumps(answer).encode())

    def _send_answers(self) -> None:
        """Sends what is answered, in a thread of its own, until the trainer is gone."""
        with contextlib.suppress(OSError):
            while True:
                self.connection.send_bytes(self._answers.get())

    def _answer_error(self, error: Exception, keys: list[int]) -> None:
        told = {"error": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
        self._answer(told | {"keys": keys})

    @property
    def _running(self) -> SteppingEngine:
        assert self._engine is not None
        return self._engine

    @property
    def _vllm(self) -> VLLMEngine:
        assert isinstance(self._engine, VLLMEngine)
        return self._engine

    def _load_weights(self, version: int) -> None:
        weights = self._weights()
        try:
            self._running.load_weights(weights, version)
        finally:
            for _ in weights:  # the trainer sends them all
                pass

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        while bucket := self.connection.recv_bytes():
            yield from safetensors.torch.load(bucket).items()


def decode_info(values: dict[str, Any]) -> dict[str, Any]:
    """Decodes the description with which a chunk of weights was announced."""
    if "ipc_handles" not in values:
        return values
    return values | {"ipc_handles": decode_handles(values["ipc_handles"])}


def decode(kind: type[T], values: dict[str, Any]) -> T:
    """Rebuilds the dataclass of which ``dataclasses.asdict`` gave these values."""
    hints = get_type_hints(kind)
    return kind(**{name: _decode_field(hints[name], value) for name, value in values.items()})


def _decode_field(hint: Any, value: Any) -> Any:
    """Rebuilds a field: a dataclass, or None, or a mapping to dataclasses; other values are as JSON has them."""
    kinds: list[Any] = [each for each in (hint, *get_args(hint)) if dataclasses.is_dataclass(each)]
    if not kinds or not isinstance(value, dict):
        return value
    if get_origin(hint) is dict:
        return {key: decode(kinds[0], each) for key, each in value.items()}
    return decode(kinds[0], value)


def decode_request(values: dict[str, Any], images: Sequence[PromptImages]) -> Request:
    """Rebuilds a request that `encode_requests` made these values of, given the images that came with it."""
    sampling, place = values["sampling"], values["images"]
    guide = sampling["guide"] and Guide(**sampling["guide"])
    own = None if place is None else images[place]
    return Request(**values | {"sampling": SamplingConfig(**sampling | {"guide": guide}), "images": own})


def decode_images(values: dict[str, Any]) -> PromptImages:
    """Rebuilds the images that `encode_images` made these values of."""
    tensors = safetensors.torch.load(base64.b64decode(values["tensors"]))
    files = [tensors.pop(f"file {number}") for number in range(sum(name.startswith("file ") for name in tensors))]
    state = {name: values[name] for name in ("mm_token_type_ids", "short_ids")}
    return PromptImages.from_state_dict(state | {"inputs": tensors, "files": files})


def main() -> None:
    """Serves the pipe whose file descriptor is the only argument; what this process prints goes to stderr."""
    os.dup2(2, 1)
    Worker(Connection(int(sys.argv[1]))).run()
    os._exit(0)  # vLLM's threads would hold up an ordinary end


if __name__ == "__main__":
    main()
