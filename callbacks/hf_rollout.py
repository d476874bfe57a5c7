"""Samples with a copy of the policy in the training process."""

from __future__ import annotations

from typing import cast

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from verl_lightning.callbacks.placement import Placement
from verl_lightning.callbacks.rollout import RolloutCallback
from verl_lightning.callbacks.rollout_queue import InFlight
from verl_lightning.environments.config import EpisodesConfig, Given
from verl_lightning.models.pretrained import read_config
from verl_lightning.modules.base import PostTrainingModule
from verl_lightning.modules.sampling import SamplingModule
from verl_lightning.options import typed
from verl_lightning.rollout.base import SamplingConfig, with_short_forms
from verl_lightning.rollout.hf import HFEngine, check_cache
from verl_lightning.rollout.turns import TurnsConfig
from verl_lightning.telemetry.memory_plan import EngineMemory


class HFRollout(RolloutCallback):
    """Samples with a copy of the policy in the training process: no extra package, any device, not fast.

    Args:
        sampling: Settings by which training responses are sampled.
        val_sampling: Settings by which validation and test responses are sampled.
        batch_size: Most sequences sampled at once; bounds the memory of the key-value cache.
        environment: World in which the policy acts turn by turn, such as a game or tools: the import path of a class,
            a file (``path/to/file.py:Game``), either as ``path`` beside ``arguments``, or several by the names that
            rows have in their column ``environment``. Null samples single responses.
        episodes: Limits of the episodes in environments.
        turns: Sample conversations with replies of plain text; ``environment`` can do more.
        max_staleness: Most optimizer steps by which a token may be older than the policy that learns from it. Batches
            are sampled so many steps ahead, while the policy learns; see `docs/async.md`.
        placement: Where engines run: `Beside` the trainer in processes of their own, or in `RayActors`; null is in the
            training processes.
        canary_limit: Largest gap of the canary, in nats per token; see `VLLMRollout`. Null follows the type, and has no
            canary in the training process, where weights are copied name by name.
        in_flight: Treatment of responses that are on their way when new weights come: ``finish`` waits for them;
            ``continue`` has them go on with the new weights and what they have read; ``abort`` has them read it anew.
        num_samples: Short for ``sampling.num_samples``.
        max_new_tokens: Short for ``max_new_tokens`` of both samplings.
        temperature: Short for ``sampling.temperature``.

    Raises:
        ValueError: If an option of the sampling needs vLLM, or the model does, or one is out of its range.
    """

    memory_key = "rollout.batch_size"

    @typed("rollout")
    def __init__(
        self,
        sampling: SamplingConfig = SamplingConfig(),
        val_sampling: SamplingConfig = SamplingConfig(),
        batch_size: int = 1024,
        environment: Given | None = None,
        episodes: EpisodesConfig = EpisodesConfig(),
        turns: TurnsConfig | None = None,
        max_staleness: int = 0,
        placement: Placement | None = None,
        canary_limit: float | None = None,
        in_flight: InFlight = "finish",
        *,
        num_samples: int | None = None,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
    ) -> None:
        sampling, val_sampling = with_short_forms(
            sampling, val_sampling, num_samples=num_samples, max_new_tokens=max_new_tokens, temperature=temperature
        )
        super().__init__(
            sampling, val_sampling, turns, max_staleness, placement, canary_limit, environment, episodes, in_flight
        )
        if placement is None and canary_limit is None:
            self._canary = None  # weights are copied in this process, and each name is looked for
        for name, each in {"sampling": sampling, "val_sampling": val_sampling}.items():
            if each.stop or each.guide is not None:
                raise ValueError(
                    f"`rollout.{name}` sets `stop` or `guide`, which `HFRollout` doesn't know. Take it out, or sample"
                    " with `VLLMRollout`."
                )
        self.batch_size = batch_size
        self._most = 0, 0  # sequences of an iteration on this rank, and tokens of each, where they are known

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        module = cast(SamplingModule, pl_module)
        prompts = 0 if module.prompt_source is None else module.prompt_source.prompts_per_step
        sequences = -(-prompts // module.contract.data_parallel_size) * self.sampling.num_samples
        self._most = sequences, module.max_tokens or 0

    def engine_memory(self, device_bytes: int) -> EngineMemory:
        """Return the engine's memory on a training device: a whole policy always, its cache while it samples."""
        del device_bytes
        if not isinstance(self._engine, HFEngine):
            return EngineMemory()
        weights, (sequences, tokens) = self._engine.weight_bytes, self._most
        # Ahead, it samples while the policy learns, and several batches at once where the longest take several steps.
        sampling = weights + self._engine.cache_bytes(sequences * max(1, self.max_staleness), tokens)
        return EngineMemory(sampling=sampling, learning=sampling if self.max_staleness else weights)

    @override
    def make_engine(self, module: PostTrainingModule) -> HFEngine:
        config = module.policy_config
        check_cache(read_config(config.path))
        return HFEngine(
            config,
            eos_token_ids=module.eos_token_ids,
            pad_token_id=module.tokenizer.pad_token_id,
            batch_size=self.batch_size,
            rereads=self.in_flight == "abort",
        )
