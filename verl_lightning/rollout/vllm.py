"""The vLLM engine: fast sampling inside the training process, on the training devices.

One engine a process, or one that some processes share by tensor parallelism.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib
import os
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from verl_lightning.compat import vllm as compat
from verl_lightning.models.pretrained import read_config
from verl_lightning.needs import missing_vllm, no_vllm
from verl_lightning.processes import loopback
from verl_lightning.rollout.base import Guide, Prompts, SamplingConfig
from verl_lightning.rollout.completions import Completion, request_name, to_rollout
from verl_lightning.rollout.vllm_config import VLLMConfig
from verl_lightning.rollout.watchdog import end_if_stuck
from verl_lightning.types import Rollout

CPU_CACHE_BYTES = 2**30
"""Size of the key-value cache on a CPU; on a GPU, vLLM fills its share of the memory."""

STUCK_SECONDS = 120.0
"""Seconds after its deadline at which a call of vLLM counts as stuck; more than a parent's patience with a child."""


class VLLMEngine:
    """Continuous batching with paged attention, in this process.

    Requests with the same prompt share its key-value cache. Each has a seed of its own, so a response depends on
    neither batch nor rank, up to rounding. Tokens go in and come out as ids; text is never made.

    Processes that share an engine answer all their prompts together: `generate` is then collective among them.

    Args:
        config: Settings of the engine.
    """

    def __init__(self, config: VLLMConfig) -> None:
        self.config = config
        self._llm: Any = None
        self._adapter: Any = None
        self._device = torch.device("cpu")
        self._owns_process_group = False
        self._is_asleep = False

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
            self._llm = vllm.LLM(model=self.config.path, trust_remote_code=False, **self._llm_options())

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the policy's weights, wake up if asleep, and drop what was cached from the old ones."""
        llm = self._running
        with self._watch("vLLM or the ranks that send it weights did not finish `load_weights`"):
            self._wake_weights()
            if self._device.type == "cuda":
                llm.apply_model(lambda model: len(model.load_weights(weights)))
            else:  # vLLM repacks weights for CPUs, which a plain `load_weights` can't write into
                llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
                llm.apply_model(compat.repack_output_heads)
            self._wake_cache()

    def join_trainer(self, invitation: dict[str, Any]) -> None:
        """Meet the trainer for vLLM's own transfer of weights. Collective with `GPUSender.join`."""
        self._running.init_weight_transfer_engine({"init_info": invitation})

    def start_weights(self) -> None:
        """Make ready for weights that `receive_weights` takes."""
        self._running.start_weight_update()

    def receive_weights(self, info: dict[str, Any]) -> None:
        """Take a chunk of weights from the trainer, as `GPUSender.announce` tells of it. Collective with its `send`."""
        self._running.update_weights({"update_info": info})

    def finish_weights(self) -> None:
        """Use the weights that came, and drop what was cached from the old ones."""
        self._running.finish_weight_update()
        self.drop_caches()

    def load_adapter(self, folder: Path) -> None:
        """Replace the policy's adapter by that of a PEFT folder, wake up if asleep, and drop what was cached.

        Raises:
            RuntimeError: If the engine does not confirm that it serves this version and no other.
        """
        engine = self._running.llm_engine
        self._wake_weights()
        version = 1
        if self._adapter is not None:
            version += self._adapter.lora_int_id
            engine.remove_lora(self._adapter.lora_int_id)
        request = importlib.import_module("vllm.lora.request").LoRARequest
        self._adapter = request("policy", version, str(folder))
        engine.add_lora(self._adapter)
        if (served := set(engine.list_loras())) != {version}:
            raise RuntimeError(f"vLLM was given version {version} of the adapter, but serves the versions {served}.")
        self._wake_cache()

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
        self.drop_caches()

    def drop_caches(self) -> None:
        """Forget the key-value cache of every prompt.

        Raises:
            RuntimeError: If requests still use it.
        """
        if not self._running.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache, since requests are still running. Wait for them first.")

    def sleep(self) -> None:
        """Give weights and cache back to the device until they are loaded next; does nothing on a CPU."""
        if self._device.type == "cuda":
            # Weights that are sent anew are forgotten; a base that is not waits in the host's memory.
            with self._watch("vLLM did not finish `sleep`"):
                self._running.sleep(level=2 if self.config.lora_rank is None else 1)
            self._is_asleep = True

    @torch.no_grad()
    def generate(self, prompts: Prompts, sampling: SamplingConfig) -> Rollout:
        """Sample ``sampling.num_samples`` responses to each prompt.

        Raises:
            ValueError: If the longest prompt and its response don't fit into `max_model_len`, or if a CPU is to sample
                with speculation.
            RuntimeError: If the engine is asleep.
            TimeoutError: If some responses are not finished after `deadline` seconds. A hang inside one step of vLLM
                ends the process instead, see `end_if_stuck`.
        """
        answers = dict(self.stream(prompts, sampling))
        completions = [answers[row] for row in range(len(answers))]
        return to_rollout(prompts, sampling, completions, pad_token_id=self.config.pad_token_id)

    def stream(self, prompts: Prompts, sampling: SamplingConfig) -> Iterator[tuple[int, Completion]]:
        """Yield each row of the rollout with its answer, as they are finished; raises what `generate` raises."""
        if self._is_asleep:
            raise RuntimeError("the engine is asleep and has no weights. Call `load_weights` first.")
        if self.config.speculation is not None:
            check_speculation(self._device, sampling)
        asked, own = (prompts, slice(0, len(prompts))) if self.config.tensor_parallel_size == 1 else gather(prompts)
        first, last = own.start * sampling.num_samples, own.stop * sampling.num_samples
        engine, late = self._running.llm_engine, self._add_requests(asked, sampling)
        start, num_steps = time.monotonic(), 0
        late_now = functools.partial(late_message, asked, late.values(), self.config.deadline)
        with self._watch(lambda: f"step {num_steps} of vLLM did not return. {late_now()}"):
            while engine.has_unfinished_requests():
                num_steps += 1
                for output in engine.step():
                    row = late.pop(output.request_id)
                    if first <= row < last:
                        yield row - first, _completion(output.outputs[0])
                if late and time.monotonic() - start > self.config.deadline:
                    engine.abort_request(list(late))
                    raise TimeoutError(late_now())

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

    def _llm_options(self) -> dict[str, Any]:
        """Return the arguments of ``vllm.LLM``."""
        is_cuda = self._device.type == "cuda"
        memory = (
            {"gpu_memory_utilization": self.config.gpu_memory_utilization, "enable_sleep_mode": True}
            if is_cuda
            else {"kv_cache_memory_bytes": CPU_CACHE_BYTES}
        )
        sources = memory | self._weights_options()
        model_type = read_config(self.config.path).model_type
        return sources | {
            "dtype": self.config.dtype,
            # As the trainer: rounding logits to 16 bits can part the two by about as much as all layers before do.
            "hf_overrides": {"head_dtype": "float32"} if is_cuda else None,
            "additional_config": {} if self._has_draft_model else compat.residual_options(model_type),
            "max_model_len": self.config.max_model_len,
            "enforce_eager": self.config.enforce_eager,
            "logprobs_mode": self.config.log_probs_mode,
            "distributed_executor_backend": launcher(self._device),
            "tensor_parallel_size": self.config.tensor_parallel_size,
            "generation_config": "vllm",  # the model's own would add penalties that the trainer knows nothing of
            "skip_tokenizer_init": not self.config.makes_text,
            "enable_prefix_caching": True,
            "speculative_config": None if self.config.speculation is None else self.config.speculation.vllm_options(),
        }

    @property
    def _has_draft_model(self) -> bool:
        """True if another model guesses tokens; it may read the policy's residual stream, in the engine's type."""
        return self.config.speculation is not None and self.config.speculation.method != "ngram"

    def _weights_options(self) -> dict[str, Any]:
        """Return the arguments of ``vllm.LLM`` that say where weights come from."""
        if self.config.lora_rank is None:
            transfer = {} if self.config.transfer == "host" else {"backend": self.config.transfer}
            return {"load_format": "dummy", "weight_transfer_config": transfer or None}
        ranks = [rank for rank in compat.LORA_RANKS if rank >= self.config.lora_rank]
        if not ranks:
            raise ValueError(
                f"vLLM takes adapters of rank {compat.LORA_RANKS[-1]} at the most, got {self.config.lora_rank}."
            )
        return {"enable_lora": True, "max_loras": 1, "max_lora_rank": ranks[0]}

    def _add_requests(self, prompts: Prompts, sampling: SamplingConfig) -> dict[str, int]:
        """Hand over one request for each response; returns the rollout's row of each."""
        engine, params = self._running.llm_engine, importlib.import_module("vllm").SamplingParams
        self._check_length(int(prompts.prompt_mask.sum(-1).max()), sampling.max_new_tokens)
        options = self._sampling_options(sampling)
        tokens = prompts.tokens()
        seeds = [seed for samples in prompts.seeds for seed in samples]
        for row, seed in enumerate(seeds):
            engine.add_request(
                str(row),
                {"prompt_token_ids": tokens[row // sampling.num_samples]},
                params(seed=seed, **options),
                lora_request=self._adapter,
            )
        return {str(row): row for row in range(len(seeds))}

    def _sampling_options(self, sampling: SamplingConfig) -> dict[str, Any]:
        """Return the arguments of ``vllm.SamplingParams``, but for the seed."""
        module = importlib.import_module("vllm.sampling_params")
        options = {
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop_token_ids": self.config.eos_token_ids,
            "ignore_eos": True,  # the model's own end token; ours are in `stop_token_ids`
            "logprobs": 0,  # of the sampled token alone
            "flat_logprobs": True,
            "detokenize": bool(sampling.stop),
            "stop": sampling.stop,
            "output_kind": module.RequestOutputKind.FINAL_ONLY,
        }
        if sampling.guide is not None:
            options["structured_outputs"] = structured_outputs(sampling.guide)
        return options

    def _check_length(self, prompt: int, response: int) -> None:
        limit = self._running.llm_engine.model_config.max_model_len
        if prompt + response > limit:
            raise ValueError(
                f"a prompt of {prompt} tokens and a response of {response} don't fit into the engine's {limit} tokens."
                " Lower `data.max_prompt_length` or `rollout.sampling.max_new_tokens`."
            )


def gather(prompts: Prompts) -> tuple[Prompts, slice]:
    """Gather the prompts of all processes that share the engine, and find this one's. Collective among them."""
    group = importlib.import_module("vllm.distributed.parallel_state").get_tp_group()
    parts: list[Any] = [None] * group.world_size
    dist.all_gather_object(parts, (prompts.tokens(), prompts.seeds), group=group.cpu_group)
    everyone = Prompts.from_tokens([row for part, _ in parts for row in part], [each for _, s in parts for each in s])
    before = sum(len(part) for part, _ in parts[: group.rank_in_group])
    return everyone, slice(before, before + len(prompts))


def _completion(output: Any) -> Completion:
    """Convert vLLM's answer to one request."""
    return Completion(list(output.token_ids), list(output.logprobs.logprobs), output.finish_reason == "length")


def late_message(prompts: Prompts, late: Collection[int], deadline: float) -> str:
    """Say why a `generate` gave up while these rows of its rollout were late."""
    total = len(prompts) * len(prompts.seeds[0])
    return (
        f"{len(late)} of {total} responses were not finished after `rollout.deadline` = {deadline:g} s; the first is"
        f" that to {request_name(prompts, min(late))} of this rank's batch. Sample shorter or fewer responses, give the"
        " engine more memory, or raise the deadline."
    )


def structured_outputs(guide: Guide) -> Any:
    """Convert a guide to the form in which vLLM takes it."""
    form = {name: value for name, value in dataclasses.asdict(guide).items() if value}
    return importlib.import_module("vllm.sampling_params").StructuredOutputsParams(**form)


def check_guide(key: str, guide: Guide) -> None:
    """Refuse a form that neither of vLLM's two back ends understands.

    Raises:
        ValueError: If neither does, with what they say.
    """
    reasons = compat.guide_complaints(structured_outputs(guide))
    if not reasons:
        return
    [(field, value)] = [pair for pair in dataclasses.asdict(guide).items() if pair[1]]
    raise ValueError(f"`{key}.{field}` is nothing that vLLM can guide by, got {value!r}. " + " ".join(reasons))


def check_speculation(device: torch.device, sampling: SamplingConfig) -> None:
    """Refuse what vLLM gets wrong: on CPUs, it divides the logits of guessed tokens by temperatures that it never sets.

    Raises:
        ValueError: If responses would not come from the policy.
    """
    if device.type == "cpu" and sampling.temperature > 0:
        raise ValueError(
            "`rollout.speculation` on a CPU can decode greedily alone: vLLM's CPU build does not sample from the policy"
            f" there. Got `temperature: {sampling.temperature}`; set it to 0, or take `speculation` out."
        )


def import_vllm() -> Any:
    """Import the package, told to run its engine in this process.

    Raises:
        MisconfigurationException: If the package can't be imported.
    """
    try:
        return compat.import_in_process()
    except ImportError as error:
        raise MisconfigurationException(no_vllm(str(error))) from error


def check_vllm() -> None:
    """See that the package is there, without the time that its import takes.

    Raises:
        MisconfigurationException: If the package is not installed.
    """
    if (complaint := missing_vllm()) is not None:
        raise MisconfigurationException(complaint)


def launcher(device: torch.device) -> Literal["external_launcher"] | None:
    """Choose the way vLLM finds its device: by itself when alone, by the trainer's process group otherwise.

    Raises:
        MisconfigurationException: If the only process trains on another GPU than the first, where vLLM can't follow.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        # What `torchrun` sets and Lightning's own launchers don't.
        os.environ.setdefault("RANK", str(dist.get_rank()))
        os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
        return "external_launcher"
    if device.type == "cuda" and device.index:
        raise MisconfigurationException(
            f"`VLLMRollout` in a single process runs on the first visible GPU, but the trainer uses {device}."
            f" Set `CUDA_VISIBLE_DEVICES={device.index}` and `trainer.devices: 1`."
        )
    return None
