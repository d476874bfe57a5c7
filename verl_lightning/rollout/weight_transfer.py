"""Routes of weights to an engine in another process: through the host, or from GPU to GPU as vLLM itself takes them."""

from __future__ import annotations

import base64
import importlib
import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from verl_lightning.needs import missing_for_ipc
from verl_lightning.processes import loopback

Transfer = Literal["host", "nccl", "ipc"]
"""``host`` copies through the host's memory; ``nccl`` broadcasts between two GPUs; ``ipc`` lends memory of one GPU."""

BUCKET_BYTES = 2**28
"""Approximate size of the groups in which weights are sent."""


def choose_transfer(wanted: Transfer | Literal["auto"], *, trainer_gpu: int | None, engine_gpu: int | None) -> Transfer:
    """Choose the route of the weights between two processes; ``auto`` takes the fastest.

    Args:
        wanted: Route that the user wants.
        trainer_gpu: Index of the trainer's GPU, None on a CPU.
        engine_gpu: Index of the engine's GPU, None on a CPU.

    Raises:
        MisconfigurationException: If the wanted route does not lead from the trainer to the engine, or lacks a package.
    """
    possible: list[Transfer] = ["host"]
    if trainer_gpu is not None and engine_gpu is not None:
        route: Transfer = "ipc" if trainer_gpu == engine_gpu else "nccl"
        missing = missing_for_ipc() if route == "ipc" else None
        if missing is not None and wanted == "ipc":
            raise MisconfigurationException(missing)
        possible = possible if missing else [route, *possible]
    if wanted == "auto":
        return possible[0]
    if wanted not in possible:
        raise MisconfigurationException(
            f"`rollout.placement.transfer: {wanted}` can't send weights from {place(trainer_gpu)} to"
            f" {place(engine_gpu)}: `nccl` needs two GPUs, `ipc` one that both share. Set it to one of"
            f" {['auto', *possible]}."
        )
    return wanted


def place(gpu: int | None) -> str:
    """Name a device in words."""
    return "the CPU" if gpu is None else f"GPU {gpu}"


def chunks(weights: Iterable[tuple[str, Tensor]], size: int = BUCKET_BYTES) -> Iterator[dict[str, Tensor]]:
    """Yield weights in order, in groups of about ``size`` bytes."""
    chunk: dict[str, Tensor] = {}
    for name, weight in weights:
        chunk[name] = weight.detach()
        if sum(each.nbytes for each in chunk.values()) >= size:
            yield chunk
            chunk = {}
    if chunk:
        yield chunk


def chunks_on_host(weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield `chunks` on the CPU, to which each weight is copied as it comes."""
    return chunks((name, weight.cpu()) for name, weight in weights)


def describe(chunk: Mapping[str, Tensor]) -> dict[str, Any]:
    """Describe a chunk to vLLM before it comes: names, types and shapes of its weights."""
    return {
        "names": list(chunk),
        "dtype_names": [str(weight.dtype).removeprefix("torch.") for weight in chunk.values()],
        "shapes": [list(weight.shape) for weight in chunk.values()],
    }


def encode_handles(handles: list[dict[str, Any]]) -> str:
    """Encode handles of a GPU's memory as text."""
    buffer = io.BytesIO()
    torch.save(handles, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def decode_handles(text: str) -> list[dict[str, Any]]:
    """Decode the text of `encode_handles`: types of tensors, numbers and bytes, none of which can run."""
    with torch.serialization.safe_globals([bytes]):  # how empty ones are written
        handles: list[dict[str, Any]] = torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
    return handles


class GPUSender:
    """The trainer's end of a transfer between GPUs.

    Args:
        transfer: Route of the weights, ``nccl`` or ``ipc``.
        device: The trainer's GPU.
    """

    def __init__(self, transfer: Transfer, device: torch.device) -> None:
        self.transfer = transfer
        self.device = device
        self._group: Any = None

    def invitation(self) -> dict[str, Any]:
        """Make the arguments with which the engine's end is started: an address for ``nccl``, none for ``ipc``."""
        if self.transfer == "ipc":
            return {}
        address = {"master_address": loopback.ADDRESS, "master_port": loopback.free_port()}
        return address | {"rank_offset": 1, "world_size": 2}

    def join(self, invitation: dict[str, Any]) -> None:
        """Meet the engine, which has this invitation. Collective with it."""
        if self.transfer == "nccl":
            with torch.cuda.device(self.device):
                common = importlib.import_module("vllm.distributed.weight_transfer.nccl_common")
                self._group = common.trainer_init(invitation)

    def announce(self, chunk: Mapping[str, Tensor]) -> dict[str, Any]:
        """Describe a chunk to the engine; the chunk's memory must stay until the engine has answered."""
        if self.transfer == "nccl":
            return describe(chunk)
        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        reduced = [reduce_tensor(weight) for weight in chunk.values()]  # type: ignore[no-untyped-call]
        handles = [{uuid: arguments} for _, arguments in reduced]
        return describe(chunk) | {"ipc_handles": encode_handles(handles)}

    def send(self, chunk: Mapping[str, Tensor]) -> None:
        """Send a chunk that was announced. Collective with the engine."""
        if self.transfer == "nccl":
            for weight in chunk.values():
                self._group.broadcast(weight, src=0, stream=torch.cuda.current_stream(self.device))

    def on_gpu(self, chunk: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the chunk on the trainer's GPU, from which it can be sent."""
        return {name: weight.to(self.device).contiguous() for name, weight in chunk.items()}
