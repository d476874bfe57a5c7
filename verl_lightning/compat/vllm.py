"""Work-arounds for vLLM 0.26 to 0.32, and its names that no documentation promises."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks of adapters that vLLM can be told: its `vllm.config.lora.MaxLoRARanks`."""

FLOAT32_RESIDUAL = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"})
"""Model types whose sum of layers' outputs can be float32: in vLLM's source of them, `RMSNorm` alone adds to it."""

RESIDUAL_OPTIONS = {"residual": "float32"}
"""vLLM's ``additional_config`` of an engine that does; it also keeps its compiled graphs apart from other engines'."""


def import_in_process() -> Any:
    """Import vLLM, told to run its engine in this process, for which `LLM` has no argument, and to log errors only."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it warns of what is as it should be
    return importlib.import_module("vllm")


def import_before_weights() -> None:
    """Import what vLLM imports while it allocates weights on a GPU.

    FlashInfer makes a table on torch's default device as it is imported. Among the weights, sleep would wipe it, and
    it would outlive the engine: vLLM then starts no other in the process.
    """
    if importlib.util.find_spec("flashinfer") is not None:
        importlib.import_module("flashinfer")


@contextmanager
def thread_setter_kept() -> Iterator[None]:
    """Put `torch.set_num_threads` back after an engine's start: on CPUs, vLLM replaces it for the whole process."""
    own = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = own


def guide_complaints(structured_outputs: Any) -> list[str]:
    """Say what is wrong with the form of a response, through functions that vLLM's engine calls for each request.

    Args:
        structured_outputs: vLLM's description of the form.

    Returns:
        One text from each of the two back ends, of which vLLM chooses by itself; empty if either understands the form.
    """
    options = importlib.import_module("vllm").SamplingParams(structured_outputs=structured_outputs)
    # Of a request; up to some version before 0.32 a `ValueError`.
    refusals = (ValueError, getattr(importlib.import_module("vllm.exceptions"), "VLLMClientError", ValueError))
    reasons = []
    for name in ("xgrammar", "guidance"):
        backend = importlib.import_module(f"vllm.v1.structured_output.backend_{name}")
        try:
            getattr(backend, f"validate_{name}_grammar")(options)
        except refusals as error:
            reasons.append(f"{name}: {error}")
        else:
            return []
    return reasons


def load_weights(llm: Any, weights: Iterable[tuple[str, Tensor]], *, repacks: bool) -> list[str]:
    """Load weights by the names that a model's folder has, and return the parameters that got none.

    vLLM says which ones it loaded where `load_weights` of a model returns it, and tells nobody of the others.

    Args:
        llm: A `vllm.LLM` whose engine runs in this process.
        weights: Names and values.
        repacks: True on CPUs, where vLLM keeps weights in a form that a model's own `load_weights` can't write into.

    Returns:
        Names of the parameters that got no value, empty if all did or the model doesn't say.
    """
    if not repacks:
        (missing,) = llm.apply_model(lambda model: _not_loaded(model, weights))
        return cast(list[str], missing)
    missing = []

    def record(model: nn.Module) -> None:
        def load(given: Iterable[tuple[str, Tensor]]) -> None:
            del model.load_weights
            missing.extend(_not_loaded(model, given))

        model.load_weights = load  # type: ignore[assignment]

    llm.apply_model(record)
    llm.apply_model(_forget_expert_kernels)
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
    llm.apply_model(repack_output_heads)
    return missing


def response_lengths(llm: Any) -> dict[str, int]:
    """Count the tokens so far of each response that is not finished, by the name of its request.

    vLLM tells of unfinished responses only where it is to return a part of each after every step.
    """
    states = llm.llm_engine.output_processor.request_states.values()
    return {state.external_req_id: state.detokenizer.num_output_tokens() for state in states}


@contextmanager
def adapters_from_memory(llm: Any, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Have vLLM take an adapter's weights from this process' memory, where it would read its folder's file.

    Args:
        llm: A `vllm.LLM` whose engine runs in this process.
        weights: Values by their names in that file; they are copied.
    """
    base: Any = importlib.import_module("vllm.lora.lora_model").LoRAModel
    device = next(iter(weights.values())).device

    class AdapterInMemory(base):  # type: ignore[misc]
        """An adapter that is made of tensors at hand."""

        @classmethod
        def from_local_checkpoint(cls, *_: Any, dtype: torch.dtype, **options: Any) -> Any:
            tensors = {name: weight.to(dtype, copy=True) for name, weight in weights.items()}  # vLLM scales in place
            taken = ("lora_model_id", "peft_helper", "model_vocab_size", "weights_mapper", "skip_prefixes")
            named = {name: options[name] for name in taken}
            return base.from_lora_tensors(tensors=tensors, device=str(device), dtype=dtype, **named)

    def use(worker: Any, kind: type) -> None:
        worker.model_runner.lora_manager._lora_model_cls = kind

    llm.collective_rpc(use, args=(AdapterInMemory,))
    try:
        yield
    finally:
        llm.collective_rpc(use, args=(base,))


def _forget_expert_kernels(model: nn.Module) -> None:
    """Have a CPU's experts be packed anew: where vLLM finds their kernel, it takes new weights as they come."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None  # type: ignore[union-attr]


def _not_loaded(model: Any, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
    loaded: set[str] | None = model.load_weights(weights)
    if loaded is None:
        return []
    # A tied head is sent as the embedding; on CPUs, repacking has made it a parameter of its own.
    is_tied = bool(getattr(model.config, "tie_word_embeddings", False))
    missing = {name for name, _ in model.named_parameters()} - loaded
    return sorted(name for name in missing if not (is_tied and name.endswith("lm_head.weight")))


def repack_output_heads(model: nn.Module) -> None:
    """Have a CPU's output head follow the embedding that it is tied to: vLLM computes it from a packed copy."""
    for layer in model.modules():
        if type(layer).__name__ == "ParallelLMHead":
            method: Any = layer.quant_method
            method.process_weights_after_loading(layer)


def residual_options(model_type: str) -> dict[str, str]:
    """The ``additional_config`` for a type of model; empty if its sum of layers' outputs keeps the engine's type."""
    return RESIDUAL_OPTIONS if model_type in FLOAT32_RESIDUAL else {}


@cache
def register_float32_residual() -> None:
    """Have engines with `RESIDUAL_OPTIONS` sum their layers' outputs in float32 where they compute in 16 bits.

    The trainer does so: rounded after every layer, this sum, the residual stream, errs as much as all else that is
    rounded. vLLM has no option for it, but lets other classes take the place of its own (``CustomOp.register_oot``).
    Its models hand the stream from norm to norm and read it nowhere else. Calling it again changes nothing.
    """
    custom_op = importlib.import_module("vllm.model_executor.custom_op").CustomOp
    layers = importlib.import_module("vllm.model_executor.layers.layernorm")
    config = importlib.import_module("vllm.config")
    base: Any = layers.RMSNorm

    class Float32ResidualRMSNorm(base):  # type: ignore[misc]
        """`RMSNorm` that returns the stream in float32, whatever comes in."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            options = config.get_current_vllm_config().additional_config
            self._sums_in_float32 = RESIDUAL_OPTIONS.items() <= options.items()

        @override
        def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
            if residual is None or not self._sums_in_float32:
                return super().forward(x, residual)
            stream = x.float() + residual.float()
            scale = torch.rsqrt(stream.square().mean(-1, keepdim=True) + self.variance_epsilon)
            return (stream * scale).to(x.dtype) * self.weight, stream

    custom_op.register_oot(Float32ResidualRMSNorm, name=base.__name__)
