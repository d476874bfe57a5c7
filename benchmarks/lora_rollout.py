"""GRPO of adapters with vLLM on the training GPU: what a sync costs with adapters merged in, and sent alone.

    python benchmarks/lora_rollout.py --out lora.json               # one H100; random weights, the shape of Qwen2-0.5B
    python benchmarks/lora_rollout.py --tiny --accelerator cpu      # every line of it, with a small model
    python benchmarks/lora_rollout.py --shape 7b --sync-only --precision bf16-true    # how long adapters alone take

Prints one line for each value of ``lora.merge_for_rollout``: median seconds of the phases ``update_weights`` and
``gen``, the largest ``rollout/canary_gap`` in nats, and the peak of the GPU's memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override
from vllm_rollout import __file__ as bench_file
from vllm_rollout import seconds, write_model, write_prompts

from verl_lightning.algorithms.advantages.grpo import GRPO
from verl_lightning.callbacks import VLLMRollout
from verl_lightning.data import PromptDataModule
from verl_lightning.models.config import LoraConfig, ModelConfig, OptimConfig
from verl_lightning.modules import PPOModule
from verl_lightning.modules.ppo_config import UpdateConfig
from verl_lightning.rewards.pool import RewardConfig
from verl_lightning.rollout.base import SamplingConfig
from verl_lightning.strategies import STRATEGIES

PROMPTS, SAMPLES = 16, 8
PHASES = ("update_weights", "gen")


class Keeper(Callback):
    """The metrics of each step, and the seconds of a sync after a validation."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.sync: dict[str, float] = {}

    @override
    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        [rollout] = [each for each in trainer.callbacks if isinstance(each, VLLMRollout)]  # type: ignore[attr-defined]

        def sync() -> None:
            rollout.sync_weights(cast(Any, pl_module))

        sync()  # vLLM's engine is awake from here on
        awake = [seconds(sync) for _ in range(5)]
        asleep = []
        for _ in range(3):
            rollout._vllm.sleep()
            asleep.append(seconds(sync))
        self.sync = {"sync_s": statistics.median(awake), "wake_and_sync_s": statistics.median(asleep)}

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def measure(arguments: argparse.Namespace, *, merges: bool) -> dict[str, Any]:
    """One fit."""
    shape = "tiny" if arguments.tiny else arguments.shape
    folder, prompts = arguments.folder / shape, arguments.folder / "prompts.jsonl"
    write_model(folder, shape)
    write_prompts(prompts, PROMPTS * (arguments.steps + 1), 64)
    sampling = SamplingConfig(num_samples=SAMPLES, max_new_tokens=64)
    rollout = VLLMRollout(
        sampling=sampling,
        val_sampling=sampling,
        gpu_memory_utilization=arguments.gpu_memory_utilization or None,
        enforce_eager=arguments.tiny or arguments.sync_only,
    )
    lora = LoraConfig(rank=arguments.rank, merge_for_rollout=merges)
    module = PPOModule(
        ModelConfig(
            path=str(folder),
            dtype="bfloat16" if arguments.precision == "bf16-true" else "float32",
            optim=OptimConfig(lr=1e-4),
            lora=lora,
        ),
        RewardConfig(function=f"{Path(bench_file).resolve()}:even_length"),
        GRPO(),
        update=UpdateConfig(mini_batch_size=PROMPTS, micro_batch_size=8),
    )
    own = STRATEGIES.get(arguments.strategy)
    keeper, quiet = Keeper(), {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        accelerator=arguments.accelerator,
        devices=1,
        strategy="auto" if own is None else own(),
        precision=arguments.precision,
        limit_val_batches=1 if arguments.sync_only else 0,
        max_steps=arguments.steps,
        callbacks=[rollout, keeper],
        enable_model_summary=False,
        **quiet,
    )
    sizes = {"prompts_per_step": PROMPTS, "val_batch_size": PROMPTS, "max_prompt_length": 64}
    data = PromptDataModule(str(prompts), str(prompts), **sizes)
    if arguments.sync_only:
        trainer.validate(module, data, verbose=False)
        return {"merges": merges, "shape": shape, "rank": arguments.rank, **keeper.sync}
    trainer.fit(module, data)
    return report(keeper.steps, module, shape=shape, merges=merges, rank=arguments.rank)


def report(steps: list[dict[str, float]], module: PPOModule, **settings: Any) -> dict[str, Any]:
    """What was measured; the first step, which compiles, does not count."""
    medians = {name: statistics.median(step[f"timing_s/{name}"] for step in steps[1:]) for name in PHASES}
    return settings | {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        **{f"{name}_s": round(value, 4) for name, value in medians.items()},
        "canary_gap": max(step["rollout/canary_gap"] for step in steps),
        "peak_gib": round(module.clock.peak_memory() / 2**30, 1),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/vllm-bench"), help="for the model and the prompts")
    parser.add_argument("--shape", choices=["0.5b", "7b"], default="0.5b")
    parser.add_argument("--tiny", action="store_true", help="a small model, eager")
    parser.add_argument("--strategy", choices=["auto", *STRATEGIES], default="auto")
    parser.add_argument("--accelerator", default="gpu")
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--sync-only", action="store_true", help="no training: how long adapters alone take")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.0, help="0: by the memory plan")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    for merges in (False,) if arguments.sync_only else (True, False):
        results.append(measure(arguments, merges=merges))
        print(json.dumps(results[-1]), flush=True)  # noqa: T201
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
