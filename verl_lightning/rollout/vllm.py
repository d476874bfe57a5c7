"""The vLLM engine: fast sampling inside the training process, on the training devices.

One engine a process, or one that some processes share by tensor parallelism.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from verl_lightning.compat import vllm as compat
from verl_lightning.faults import RunError
from verl_lightning.processes import loopback
from verl_lightning.rollout.base import Completion, Request
from verl_lightning.rollout.stepping import Recipe, SteppingEngine, late_message
from verl_lightning.rollout.vllm_config import VLLMConfig
from verl_lightning.rollout.vllm_images import check_written_out, vllm_prompt
from verl_lightning.rollout.vllm_launch import import_vllm, llm_options, reads_images
from verl_lightning.rollout.vllm_sampling import check_guide, check_speculation, sampling_options
from verl_lightning.rollout.watchdog import end_if_stuck
from verl_lightning.rollout.weight_sums import WeightSums, weight_sums

STEPS = 16
"""Most steps of vLLM between two looks at who else wants something of the engine."""

STUCK_SECONDS = 120.0
"""Seconds after its deadline at which a call of vLLM counts as stuck; more than a parent's patience with a child."""


class Late(NamedTuple):
    """A request that is not finished."""

    name: str
    """The user's name for it."""

    since: float
    """Time on the monotonic clock at which it was asked."""

    stretches: list[tuple[int, int]]
    """Each earlier version of the weights, and the number of tokens when the next one came."""

    prompt_ids: list[int] | None
    """Prompt as vLLM must have written out the placeholders of its images; None for one of text alone."""


class VLLMEngine(SteppingEngine):
    """Continuous batching with paged attention, in this process.

    Requests with the same prompt share its key-value cache. Each has a seed of its own, so a response depends on
    neither batch nor rank, up to rounding. Tokens go in and come out as ids; text is never made.

    Processes that share an engine ask it the same requests in the same order: `generate` is collective among them, see
    `gather_requests`.

    Args:
        config: Settings of the engine.
    """

    def __init__(self, config: VLLMConfig) -> None:
        super().__init__()
        self.config = config
        self._version = 0
        self._late: dict[int, Late] = {}  # requests that are not finished
        self._llm: Any = None
        self._adapter: Any = None
        self._device = torch.device("cpu")
        self._owns_process_group = False
        self._is_asleep = False

    def recipe(self) -> Recipe:
        """Tell another process how to make such an engine."""
        options = {"config": dataclasses.asdict(self.config)}
        return Recipe(kind="vllm", options=options, deadline=self.config.deadline)

    def start(self, device: torch.device) -> None:
        """Start vLLM in this process with random weights; the global random streams stay as they were. Collective.

        Raises:
            MisconfigurationException: If vLLM is not installed, or can't run on this device.
            ValueError: If vLLM does not understand a guide.
        """
        vllm = import_vllm()
        for key, guide in self.config.guides.items():
            check_guide(key, guide)
        if device.type == "cuda":
            compat.import_before_weights()
        compat.register_float32_residual()
        self._device = device
        self._owns_process_group = not dist.is_initialized()
        if self._owns_process_group:  # it is alone, but would listen where others can reach it
            loopback.use_for("GLOO")
            os.environ.setdefault("VLLM_HOST_IP", loopback.ADDRESS)
        with isolate_rng(), compat.thread_setter_kept():
            self._llm = vllm.LLM(
                model=self.config.path, trust_remote_code=False, **llm_options(self.config, self._device)
            )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace the policy's weights, wake up if asleep, and drop what was cached from the old ones.

        Raises:
            RunError: If the engine did not get all of its weights.
        """
        llm = self._running
        with self._watch("vLLM or the ranks that send it weights did not finish `load_weights`"):
            self._wake_weights()
            missing = compat.load_weights(llm, weights, repacks=self._device.type == "cpu")
            if missing:
                raise RunError(missing_weights(self.config.path, missing))
            self._wake_cache()
        self._begin_version(version)

    def join_trainer(self, invitation: dict[str, Any]) -> None:
        """Meet the trainer for vLLM's own transfer of weights. Collective with `GPUSender.join`."""
        self._running.init_weight_transfer_engine({"init_info": invitation})

    def start_weights(self) -> None:
        """Make ready for weights that `receive_weights` takes."""
        self._running.start_weight_update()

    def receive_weights(self, info: dict[str, Any]) -> None:
        """Take a chunk of weights from the trainer, as `GPUSender.announce` tells of it. Collective with its `send`."""
        self._running.update_weights({"update_info": info})

    def finish_weights(self, version: int) -> None:
        """Use the weights that came."""
        self._running.finish_weight_update()
        self._begin_version(version)

    def _begin_version(self, version: int) -> None:
        """Tell tokens and prompts of the new weights from those of the old."""
        if not self._late or self.config.rereads:
            self.drop_caches()  # else their salt alone keeps new prompts from finding old ones
        lengths = compat.response_lengths(self._running) if self._late else {}
        for key, late in self._late.items():
            late.stretches.append((self._version, lengths[str(key)]))
        self._version = version

    @property
    def holds_adapter(self) -> bool:
        """True once an adapter was loaded from a folder: the next may come from this process' memory."""
        return self._adapter is not None

    def load_adapter(self, folder: Path, version: int, weights: Mapping[str, Tensor] | None = None) -> None:
        """Replace the policy's adapter by that of a PEFT folder, wake up if asleep, and drop what was cached.

        Args:
            folder: The folder.
            version: Number of these weights.
            weights: Weights by their names in the folder's file, which then need not be there; None reads the file.

        Raises:
            RuntimeError: If the engine does not confirm that it serves this version and no other.
        """
        engine = self._running.llm_engine
        self._wake_weights()
        number = 1
        if self._adapter is not None:
            number += self._adapter.lora_int_id
            engine.remove_lora(self._adapter.lora_int_id)
        request = importlib.import_module("vllm.lora.request").LoRARequest
        self._adapter = request("policy", number, str(folder))
        with nullcontext() if weights is None else compat.adapters_from_memory(self._running, weights):
            engine.add_lora(self._adapter)
        if (served := set(engine.list_loras())) != {number}:
            raise RuntimeError(f"vLLM was given number {number} of the adapter, but serves the numbers {served}.")
        self._wake_cache()
        self._begin_version(version)

    def _wake_weights(self) -> None:
        if self._is_asleep:
            self._wake(["weights"])

    def _wake(self, tags: list[str] | None = None) -> None:
        """Map memory that sleep gave back, of these tags or all."""
        torch.cuda.empty_cache()  # vLLM maps memory itself and can't use what torch keeps for later
        self._running.wake_up(tags=tags)

    def _wake_cache(self) -> None:
        if self._is_asleep:
            self._running.wake_up(tags=["kv_cache"])
            self._is_asleep = False

    def drop_caches(self) -> None:
        """Forget the key-value cache of every prompt, and have responses on their way make theirs anew.

        Raises:
            RuntimeError: If vLLM keeps some of it.
        """
        if not self._running.reset_prefix_cache(reset_running_requests=bool(self._late)):
            raise RuntimeError("vLLM kept a part of its prefix cache.")
        if self._reads_images:
            self._running.llm_engine.reset_encoder_cache()

    def weight_sums(self) -> WeightSums:
        """Sum the weights that the engine holds in this process; of one that is shared, none."""
        if self.config.tensor_parallel_size > 1:
            return {}
        [sums] = self._running.apply_model(lambda model: weight_sums(model.named_parameters()))
        return dict(sums)

    def sleep(self) -> None:
        """Give weights and cache back to the device until they are loaded next; does nothing on a CPU."""
        if self._device.type == "cuda":
            # Weights that are sent anew are forgotten; a base that is not waits in the host's memory.
            with self._watch("vLLM did not finish `sleep`"):
                self._running.sleep(level=2 if self.config.lora_rank is None else 1)
            self._is_asleep = True

    def add(self, key: int, request: Request) -> None:
        """Take a request; see `SteppingEngine.add`.

        Raises:
            ValueError: If they don't fit into `max_model_len`, or a CPU is to sample with speculation.
            RuntimeError: If the engine is asleep.
        """
        if self._is_asleep:
            raise RuntimeError("the engine is asleep and has no weights. Call `load_weights` first.")
        if self.config.speculation is not None:
            check_speculation(self._device, request.sampling)
        engine = self._running.llm_engine
        self._check_length(len(request.prompt_ids), request.sampling.max_new_tokens)
        params = importlib.import_module("vllm").SamplingParams
        options = sampling_options(request.sampling, self.config)
        prompt = vllm_prompt(request) | {"cache_salt": str(self._version)}
        engine.add_request(str(key), prompt, params(seed=request.seed, **options), lora_request=self._adapter)
        self._late[key] = Late(request.name, time.monotonic(), [], request.prompt_ids if request.images else None)

    @torch.no_grad()
    def step(self) -> list[tuple[int, Completion]]:
        """Take some of vLLM's steps, until one finishes requests.

        Raises:
            TimeoutError: If a request is not finished `deadline` seconds after it was asked. A hang inside one step of
                vLLM ends the process instead, see `end_if_stuck`.
        """
        engine, num_steps = self._running.llm_engine, 0
        with self._watch(lambda: f"step {num_steps} of vLLM did not return. {self._late_message()}"):
            while self._late and num_steps < STEPS:
                num_steps += 1
                outputs = {int(output.request_id): output for output in engine.step()}
                for key, output in outputs.items():
                    check_written_out(self._late[key].name, self._late[key].prompt_ids, output.prompt_token_ids)
                ended = [
                    (key, self._completion(output.outputs[0], self._late.pop(key))) for key, output in outputs.items()
                ]
                self._check_deadline()
                if ended:
                    return ended
        return []

    def _late_message(self) -> str:
        return late_message([late.name for late in self._late.values()], self.config.deadline)

    def _check_deadline(self) -> None:
        oldest = min((late.since for late in self._late.values()), default=math.inf)
        if time.monotonic() - oldest > self.config.deadline:
            message = self._late_message()
            self.abort()
            raise TimeoutError(message)

    def abort(self) -> None:
        """Give up all requests."""
        if self._late:
            self._running.llm_engine.abort_request([str(key) for key in self._late])
            self._late = {}

    def _completion(self, output: Any, late: Late) -> Completion:
        """Convert vLLM's answer to one request."""
        tokens, log_probs = list(output.token_ids), list(output.logprobs.logprobs)
        versions: list[int] = []
        for version, end in [*late.stretches, (self._version, len(tokens))]:
            versions += [version] * (end - len(versions))
        is_cut = output.finish_reason == "length"
        return Completion(tokens, log_probs, is_cut, self._version, versions=versions if late.stretches else None)

    def _watch(self, culprit: str | Callable[[], str]) -> AbstractContextManager[None]:
        """Ends the process if vLLM is stuck."""
        seconds = self.config.deadline + STUCK_SECONDS
        return end_if_stuck(seconds, (lambda: culprit) if isinstance(culprit, str) else culprit)

    def stop(self) -> None:
        """Give back all memory, so that another engine can start in this process; may be called twice."""
        if self._llm is None:
            return
        if self._is_asleep:
            self._wake_to_end()
        self._llm.llm_engine.engine_core.shutdown()
        self._llm = self._adapter = None
        self._is_asleep = False
        parallel_state = importlib.import_module("vllm.distributed.parallel_state")
        if self._owns_process_group:
            parallel_state.cleanup_dist_env_and_memory()
        else:
            parallel_state.destroy_model_parallel()
            gc.collect()  # as vLLM's own cleanup does: the engine's parts refer to each other

    def _wake_to_end(self) -> None:
        """Have all memory once more: vLLM frees only what is mapped, and else ends in an error of CUDA's."""
        try:
            self._wake()
        except RuntimeError as error:
            warnings.warn(
                f"vLLM could not wake up to end in good order ({error}). Start no other engine in this process.",
                stacklevel=2,
            )

    @property
    def _running(self) -> Any:
        if self._llm is None:
            raise RuntimeError("`start` the engine before using it.")
        return self._llm

    @functools.cached_property
    def _reads_images(self) -> bool:
        """True if the policy is one that images can be asked of."""
        return reads_images(self.config)

    def _check_length(self, prompt: int, response: int) -> None:
        limit = self._running.llm_engine.model_config.max_model_len
        if prompt + response > limit:
            raise ValueError(
                f"a prompt of {prompt} tokens and a response of {response} don't fit into the engine's {limit} tokens."
                " Lower `data.max_prompt_length` or `rollout.sampling.max_new_tokens`."
            )


def missing_weights(path: str, names: list[str]) -> str:
    """Say that vLLM's model has weights that no sync fills."""
    return (
        f"vLLM's model for `path: {path}` did not get {len(names)} of its weights from the trainer, such as"
        f" `{names[0]}`, and would sample from random ones. Sample with `HFRollout`, or another version of vLLM."
    )


def gather_requests(own: Sequence[Request]) -> tuple[list[Request], slice]:
    """Gather the requests of all processes that share the engine, and find this one's. Collective among them."""
    group = importlib.import_module("vllm.distributed.parallel_state").get_tp_group()
    parts: list[Any] = [None] * group.world_size
    dist.all_gather_object(parts, own, group=group.cpu_group)
    before = sum(len(part) for part in parts[: group.rank_in_group])
    return [request for part in parts for request in part], slice(before, before + len(own))
