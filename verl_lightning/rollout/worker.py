"""An engine's process: ``python -m verl_lightning.rollout.worker``, started and spoken to by `ProcessEngine`."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from verl_lightning.rollout.base import Guide, Prompts, SamplingConfig
from verl_lightning.rollout.vllm import VLLMEngine
from verl_lightning.rollout.vllm_config import SpeculationConfig, VLLMConfig
from verl_lightning.rollout.weight_transfer import decode_handles

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
    """Does what the trainer asks, one thing at a time.

    Args:
        connection: Connection to the trainer.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._engine: VLLMEngine | None = None

    def run(self) -> None:
        """Serves until the trainer closes the pipe."""
        while True:
            try:
                request = json.loads(self.connection.recv_bytes())
            except EOFError:
                return
            self._serve(request.pop("do"), request)

    def _serve(self, do: str, request: dict[str, Any]) -> None:
        """Answers one request, by what it raised if need be: an error is the trainer's to handle, not this loop's."""
        try:
            self._do(do, request)
        except OSError as error:
            if not isinstance(error, TimeoutError):  # the trainer is gone
                raise
            self._answer_error(error)
        except ENGINE_ERRORS as error:
            self._answer_error(error)
        else:
            self._answer({"done": do, "pid": os.getpid()})

    def _do(self, do: str, request: dict[str, Any]) -> None:
        if do == "start":
            self._engine = self._make_engine(decode_config(request["config"]))
            self._engine.start(torch.device("cuda", 0) if request["on_gpu"] else torch.device("cpu"))
        elif do == "load_weights":
            self._load_weights()
        elif do == "join_trainer":
            self._running.join_trainer(request["invitation"])
        elif do == "start_weights":
            self._running.start_weights()
        elif do == "receive_weights":
            self._running.receive_weights(decode_info(request["info"]))
        elif do == "finish_weights":
            self._running.finish_weights()
        elif do == "load_adapter":
            self._running.load_adapter(Path(request["folder"]))
        elif do == "drop_caches":
            self._running.drop_caches()
        elif do == "generate":
            self._generate(request)

    def _make_engine(self, config: VLLMConfig) -> VLLMEngine:
        return VLLMEngine(config)

    def _answer(self, answer: dict[str, Any]) -> None:
        self.connection.send_bytes(json.dumps(answer).encode())

    def _answer_error(self, error: Exception) -> None:
        self._answer({"error": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()})

    @property
    def _running(self) -> VLLMEngine:
        assert self._engine is not None
        return self._engine

    def _load_weights(self) -> None:
        weights = self._weights()
        try:
            self._running.load_weights(weights)
        finally:
            for _ in weights:  # the trainer sends them all
                pass

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        while bucket := self.connection.recv_bytes():
            yield from safetensors.torch.load(bucket).items()

    def _generate(self, request: dict[str, Any]) -> None:
        prompts = Prompts(
            prompt_ids=torch.tensor(request["prompt_ids"]),
            prompt_mask=torch.tensor(request["prompt_mask"]),
            seeds=request["seeds"],
        )
        for row, completion in self._running.stream(prompts, decode_sampling(request["sampling"])):
            self._answer({"row": row, "completion": completion})


def decode_info(values: dict[str, Any]) -> dict[str, Any]:
    """Decodes the description with which a chunk of weights was announced."""
    if "ipc_handles" not in values:
        return values
    return values | {"ipc_handles": decode_handles(values["ipc_handles"])}


def decode_config(values: dict[str, Any]) -> VLLMConfig:
    """Rebuilds the configuration of which ``dataclasses.asdict`` gave these values."""
    speculation = values["speculation"]
    guides = {key: Guide(**guide) for key, guide in values["guides"].items()}
    speculation = None if speculation is None else SpeculationConfig(**speculation)
    return VLLMConfig(**values | {"guides": guides, "speculation": speculation})


def decode_sampling(values: dict[str, Any]) -> SamplingConfig:
    """Rebuilds the configuration of which ``dataclasses.asdict`` gave these values."""
    guide = values["guide"]
    return SamplingConfig(**values | {"guide": None if guide is None else Guide(**guide)})


def main() -> None:
    """Serves the pipe whose file descriptor is the only argument; what this process prints goes to stderr."""
    os.dup2(2, 1)
    Worker(Connection(int(sys.argv[1]))).run()
    os._exit(0)  # vLLM's threads would hold up an ordinary end


if __name__ == "__main__":
    main()
