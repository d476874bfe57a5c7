"""Samples with vLLM on the training devices, and checks after each sync that engine and trainer agree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar, cast

import torch
from lightning.fabric.utilities import rank_zero_warn
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from verl_lightning.callbacks.engine_share import MOST, planned_share
from verl_lightning.callbacks.placement import Beside, Placement, trainer_gpu
from verl_lightning.callbacks.rollout import RolloutCallback
from verl_lightning.callbacks.rollout_checks import sends_adapters
from verl_lightning.callbacks.rollout_queue import InFlight
from verl_lightning.environments.config import EpisodesConfig, Given
from verl_lightning.models.hf_folder import stored_weights
from verl_lightning.models.lora import write_adapter, write_adapter_config
from verl_lightning.modules.base import PostTrainingModule
from verl_lightning.modules.sampling import SamplingModule
from verl_lightning.options import typed
from verl_lightning.rollout.base import Completion, Request, SamplingConfig, with_short_forms
from verl_lightning.rollout.completions import Listener
from verl_lightning.rollout.process import ProcessEngine
from verl_lightning.rollout.turns import TurnsConfig
from verl_lightning.rollout.vllm import VLLMEngine, gather_requests
from verl_lightning.rollout.vllm_config import LogProbsMode, SpeculationConfig, VLLMConfig
from verl_lightning.rollout.vllm_launch import check_vllm
from verl_lightning.rollout.vllm_sampling import check_speculation
from verl_lightning.telemetry.memory_plan import EngineMemory
from verl_lightning.types import PromptBatch

T = TypeVar("T")


class VLLMRollout(RolloutCallback):
    """Samples with vLLM inside the training processes: one engine on each device, asleep while the policy learns.

    After each sync of weights a canary is sampled: short responses to a few fixed prompts, scored by the engine while
    it samples and by the trainer afterwards. Their mean absolute difference is logged as ``rollout/canary_gap``, in
    nats per token; a run in which it exceeds ``canary_limit`` stops, since it would learn from another policy.

    Args:
        sampling: Settings by which training responses are sampled.
        val_sampling: Settings by which validation and test responses are sampled.
        gpu_memory_utilization: Share of each GPU's memory for the engine's weights and key-value cache, in ``(0, 1]``.
            While it sleeps all of it is free for training. Null takes what the run's memory plan leaves, and 0.9 of a
            GPU that the engine has for itself. Ignored on CPUs.
        enforce_eager: Do without CUDA graphs and compilation: starts in seconds, samples slower.
        sleeps: Whether the engine gives its GPU memory back while the policy learns.
        canary_limit: Largest gap, in nats per token. Null is 0.05 where both sides compute in bfloat16, 0.02 in float16
            and in float32 on GPUs, 0.0005 in float32 on CPUs. A healthy gap is below 0.0001 in float32, and in bfloat16
            about 0.01, or several times that for models with sharp scores; raise the limit for one whose sync is known
            good.
        deadline: Most seconds for the responses to one batch of prompts; then the run stops and names a stuck one.
        tensor_parallel_size: Training processes that share one engine, for models that don't fit on one GPU; it must
            divide their number.
        beside: Old name of ``placement: Beside``.
        environment: World in which the policy acts turn by turn, such as a game or tools: the import path of a class,
            a file (``path/to/file.py:Game``), either as ``path`` beside ``arguments``, or several by the names that
            rows have in their column ``environment``. Null samples single responses.
        episodes: Limits of the episodes in environments.
        turns: Sample conversations with replies of plain text; ``environment`` can do more.
        speculation: Guess tokens ahead, which the policy then keeps or not; null guesses none. On GPUs.
        max_staleness: Most optimizer steps by which a token may be older than the policy that learns from it. Batches
            are sampled so many steps ahead, while the policy learns; see `docs/async.md`. Needs a
            ``placement``.
        placement: Where engines run: `Beside` the trainer in processes of their own, of which a dead one is replaced,
            or in `RayActors`; null shares the trainer's GPUs. An engine that is placed elsewhere never sleeps.
        in_flight: Treatment of responses that are on their way when new weights come: ``finish`` waits for them;
            ``continue`` has them go on with the new weights and what they have read; ``abort`` has them read it anew.
        num_samples: Short for ``sampling.num_samples``.
        max_new_tokens: Short for ``max_new_tokens`` of both samplings.
        temperature: Short for ``sampling.temperature``.

    Raises:
        ValueError: If an option is out of its range, or training responses are drawn with ``top_p`` or ``top_k`` at
            another temperature than 1: vLLM can't give their log-probs over the whole vocabulary.
        MisconfigurationException: Before the first step, if vLLM is not there or can't run on the trainer's device.
    """

    memory_key = "rollout.gpu_memory_utilization"

    @typed("rollout")
    def __init__(
        self,
        sampling: SamplingConfig = SamplingConfig(),
        val_sampling: SamplingConfig = SamplingConfig(),
        gpu_memory_utilization: float | None = None,
        enforce_eager: bool = False,
        sleeps: bool = True,
        canary_limit: float | None = None,
        deadline: float = 1800.0,
        tensor_parallel_size: int = 1,
        beside: Beside | None = None,
        environment: Given | None = None,
        episodes: EpisodesConfig = EpisodesConfig(),
        turns: TurnsConfig | None = None,
        speculation: SpeculationConfig | None = None,
        max_staleness: int = 0,
        placement: Placement | None = None,
        in_flight: InFlight = "finish",
        *,
        num_samples: int | None = None,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
    ) -> None:
        sampling, val_sampling = with_short_forms(
            sampling, val_sampling, num_samples=num_samples, max_new_tokens=max_new_tokens, temperature=temperature
        )
        if beside is not None:
            if placement is not None:
                raise ValueError("`rollout.beside` and `rollout.placement` are one option. Leave out `beside`.")
            rank_zero_warn(
                "`rollout.beside` is `rollout.placement: Beside` since version 0.1, and will be gone in 0.3.",
                category=FutureWarning,
            )
            placement = beside
        super().__init__(
            sampling, val_sampling, turns, max_staleness, placement, canary_limit, environment, episodes, in_flight
        )
        if gpu_memory_utilization is not None and not 0 < gpu_memory_utilization <= 1:
            raise ValueError(f"`rollout.gpu_memory_utilization` must lie in (0, 1], got {gpu_memory_utilization}.")
        if deadline <= 0:
            raise ValueError(f"`rollout.deadline` must be above 0 seconds, got {deadline}.")
        self.gpu_memory_utilization = gpu_memory_utilization
        self.enforce_eager = enforce_eager
        self.sleeps = sleeps
        self.deadline = deadline
        if tensor_parallel_size < 1:
            raise ValueError(f"`rollout.tensor_parallel_size` must be at least 1, got {tensor_parallel_size}.")
        if tensor_parallel_size > 1 and placement is not None:
            raise ValueError(
                "`rollout.tensor_parallel_size` shares an engine of the training processes, which `rollout.placement`"
                f" puts elsewhere. Set it to 1, or take `placement` out; got {tensor_parallel_size}."
            )
        if self._environments is not None and tensor_parallel_size > 1:
            given = "environment" if turns is None else "turns"
            raise ValueError(
                f"`rollout.{given}` needs an engine for each training process: those that share one would hear the"
                " environment's replies at different times. Set `rollout.tensor_parallel_size` to 1."
            )
        self.tensor_parallel_size = tensor_parallel_size
        if max_staleness and placement is None:
            raise ValueError(
                f"`rollout.max_staleness: {max_staleness}` needs engines outside of the training processes: set"
                " `rollout.placement`."
            )
        self.speculation = speculation
        self._gpu_share = 0.0
        self._is_elsewhere = False
        self._log_probs_mode = log_probs_mode(sampling)

    takes_adapters = True

    @override
    def make_engine(self, module: PostTrainingModule) -> VLLMEngine:
        if module.trainer.world_size % self.tensor_parallel_size:
            raise MisconfigurationException(
                f"`rollout.tensor_parallel_size: {self.tensor_parallel_size}` does not divide the"
                f" {module.trainer.world_size} training processes. Change it, or `trainer.devices`."
            )
        self._is_elsewhere = self.placement is not None and not self._shares_gpus(module)
        self._gpu_share = self._memory_share(module)
        return VLLMEngine(self._engine_config(module))

    def _memory_share(self, module: PostTrainingModule) -> float:
        """Return the share of a GPU's memory for the engine."""
        if self.gpu_memory_utilization is not None:
            return self.gpu_memory_utilization
        if not self._shares_gpus(module):
            return MOST
        return planned_share(
            module,
            dtype=self.engine_dtype(module),
            num_devices=self.tensor_parallel_size,
            sleeps=self._can_sleep,
        )

    def _shares_gpus(self, module: PostTrainingModule) -> bool:
        """Tell whether engines lie on the trainer's GPUs."""
        gpu, placement = trainer_gpu(module.trainer), self.placement
        return gpu is not None and (placement is None or placement.gpu(module.trainer) == gpu)

    @property
    def _can_sleep(self) -> bool:
        return self.sleeps and self.placement is None

    def engine_memory(self, device_bytes: int) -> EngineMemory:
        """Return the engine's memory on a training device with so many bytes; none before its share is known."""
        if self._is_elsewhere:
            return EngineMemory()
        sampling = int(self._gpu_share * device_bytes)
        return EngineMemory(sampling=sampling, learning=0 if self._can_sleep else sampling)

    def _engine_config(self, module: PostTrainingModule) -> VLLMConfig:
        lora = module.policy_config.lora
        return VLLMConfig(
            path=module.policy_config.path,
            eos_token_ids=module.eos_token_ids,
            pad_token_id=module.tokenizer.pad_token_id,
            max_model_len=self._max_model_len(module),
            dtype=self.engine_dtype(module),
            log_probs_mode=self._log_probs_mode,
            lora_rank=lora.rank if lora is not None and sends_adapters(module) else None,
            gpu_memory_utilization=self._gpu_share,
            enforce_eager=self.enforce_eager,
            deadline=self.deadline,
            tensor_parallel_size=self.tensor_parallel_size,
            makes_text=any(each.stop or each.guide is not None for each in self._samplings.values()),
            guides={f"rollout.{name}.guide": s.guide for name, s in self._samplings.items() if s.guide is not None},
            speculation=self.speculation,
            rereads=self.in_flight == "abort",
        )

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        check_vllm()
        device = trainer.strategy.root_device if self.placement is None else self.placement.device()
        self.check_speculation(device)

    def check_speculation(self, device: torch.device) -> None:
        """Refuse to guess tokens where engines on a device would get them wrong, before they are started.

        Raises:
            ValueError: If so.
        """
        for sampling in self._samplings.values() if self.speculation is not None else ():
            check_speculation(device, sampling)

    @property
    def _samplings(self) -> dict[str, SamplingConfig]:
        """All ways to sample, by their option."""
        return {"sampling": self.sampling, "val_sampling": self.val_sampling}

    @override
    def start_engine(self, device: torch.device) -> None:
        super().start_engine(device)
        self._rest()

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: PromptBatch, batch_idx: int
    ) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self._rest()

    @property
    def _vllm(self) -> VLLMEngine | ProcessEngine:
        assert isinstance(self._engine, VLLMEngine | ProcessEngine)
        return self._engine

    def _rest(self) -> None:
        """Make room for the trainer until the next sync."""
        if self._can_sleep:
            self._vllm.sleep()
            self._weights_step = -1  # sleep forgets the weights

    @override
    def complete(
        self, module: PostTrainingModule, requests: Sequence[Request], hear: Listener | None = None
    ) -> list[Completion]:
        if self.tensor_parallel_size == 1 or not isinstance(self._engine, VLLMEngine):
            return super().complete(module, requests, hear)
        asked, own = gather_requests(requests)

        def hear_own(position: int, completion: Completion) -> None:
            if hear is not None and own.start <= position < own.stop:
                hear(position - own.start, completion)

        return super().complete(module, asked, hear=hear_own)[own]

    @override
    def weights_type(self, module: PostTrainingModule) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.engine_dtype(module))
        return dtype

    @override
    def _weights(self, module: PostTrainingModule) -> Iterable[tuple[str, Tensor]]:
        """Yield what the policy's own folder would hold, which is what vLLM reads: experts one by one, and buffers."""
        return stored_weights(module.policy.backbone, super()._weights(module))

    @override
    def sync_weights(self, module: PostTrainingModule) -> None:
        if not sends_adapters(module):
            super().sync_weights(module)
            return
        backbone, weights = module.policy.backbone, module.contract.adapter_weights(module.policy)
        engine, version = self._vllm, self._weights_version
        with TemporaryDirectory() as name:
            folder = Path(name)
            # The first comes from a file, as vLLM refuses there what it can't serve; files are slow.
            if isinstance(engine, VLLMEngine) and engine.holds_adapter:
                write_adapter_config(folder, backbone)
                engine.load_adapter(folder, version, weights)
            else:
                write_adapter(folder, backbone, weights, fingerprint="")
                engine.load_adapter(folder, version)

    def _max_model_len(self, module: PostTrainingModule) -> int | None:
        """The longest prompt and response; without a limit on prompts, what the model can read."""
        source = cast(SamplingModule, module).prompt_source
        longest_response = max(self.sampling.max_new_tokens, self.val_sampling.max_new_tokens)
        return None if source is None else source.max_prompt_length + longest_response


def log_probs_mode(sampling: SamplingConfig) -> LogProbsMode:
    """Choose the kind of vLLM's log-probs that are those of the trainer: at the temperature, over the whole vocabulary.

    Raises:
        ValueError: If no kind is.
    """
    if not sampling.is_truncated:
        return "processed_logprobs"
    if sampling.temperature == 1:
        return "raw_logprobs"
    raise ValueError(
        "`rollout.sampling` sets `top_p` or `top_k`, after which vLLM gives log-probs over the whole vocabulary at"
        f" temperature 1 only, but `temperature` is {sampling.temperature}. Set it to 1, or `top_p: 1` and `top_k: 0`."
    )
