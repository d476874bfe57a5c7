"""A profiled GRPO step: how much of its time the timeline names.

On one GPU, from the root of the repository::

    python benchmarks/profile_ppo_step.py --out results.json --folder profile

Trains a randomly initialised Llama on the quick start's prompts, records two steps with `ProfilerCallback`, and fails
if less than ``--least`` of a step's wall time lies within phases and named actions. ``--tiny`` fits a CPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
import transformers
from lightning.pytorch import Trainer, seed_everything

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.runs import make_ppo, make_prompts
from tests.tiny import quickstart, tiny_tokenizer, write_prompt_file
from verl_lightning.callbacks import HFRollout, ProfilerCallback, RolloutCallback, StepRange, VLLMRollout
from verl_lightning.callbacks.profile_report import summary_rows
from verl_lightning.modules.ppo_config import KLConfig, UpdateConfig
from verl_lightning.rollout.base import SamplingConfig


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much work a step is."""

    hidden_size: int
    """Width of the model; its heads have 64 channels."""

    num_layers: int
    """Depth of the model."""

    prompts: int
    """Of one step."""

    samples: int
    """Responses to each."""

    tokens: int
    """Of a response, at most."""


TINY = Size(hidden_size=128, num_layers=2, prompts=4, samples=4, tokens=8)
LARGE = Size(hidden_size=1024, num_layers=16, prompts=64, samples=8, tokens=128)


def make_rollout(engine: str, size: Size) -> RolloutCallback:
    """The callback of the engine with that name."""
    sampling = SamplingConfig(num_samples=size.samples, max_new_tokens=size.tokens)
    if engine == "vllm":
        return VLLMRollout(sampling=sampling, val_sampling=sampling)
    return HFRollout(sampling=sampling, val_sampling=sampling)


def measure(arguments: argparse.Namespace, size: Size, folder: Path) -> dict[str, Any]:
    """Trains for four steps and reports the last two."""
    seed_everything(1)
    model = folder / "model"
    tiny_tokenizer().save_pretrained(model)
    quickstart.build_model(
        tiny_tokenizer(), hidden_size=size.hidden_size, num_layers=size.num_layers, num_heads=size.hidden_size // 64
    ).save_pretrained(model)
    update = UpdateConfig(mini_batch_size=size.prompts // 2, micro_batch_size=32)
    module = make_ppo(model, kl=KLConfig(), update=update)
    data = make_prompts(write_prompt_file(folder / "prompts.jsonl", num_rows=256), prompts_per_step=size.prompts)
    profiler = ProfilerCallback(steps=StepRange(first=3, last=4), folder=str(arguments.folder))
    trainer = Trainer(
        accelerator="auto",
        devices=1,
        max_steps=4,
        precision="bf16-mixed" if torch.cuda.is_available() else "32-true",
        callbacks=[profiler, make_rollout(arguments.engine, size)],
        logger=False,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data)
    rows = summary_rows(profiler.records, {work.phase: work.name for work in module.work})
    return {
        "coverage": [round(record.coverage, 4) for record in profiler.records],
        "seconds": [round(record.end - record.start, 4) for record in profiler.records],
        "rows": [row._asdict() for row in rows],
    }


def main() -> None:
    """Measure, write JSON, and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["hf", "vllm"], default="hf")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument("--least", type=float, default=0.97, help="share of the wall time that must be named")
    parser.add_argument("--folder", type=Path, default=Path("profile"), help="for traces and the timeline")
    parser.add_argument("--out", type=Path, help="for the numbers, as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        numbers = measure(arguments, TINY if arguments.tiny else LARGE, Path(folder))
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
    versions = {package.__name__: package.__version__ for package in (torch, lightning, transformers)}
    numbers |= {"card": card, "versions": versions, "command": shlex.join(sys.argv)}
    text = json.dumps(numbers, indent=2)
    sys.stdout.write(f"{text}\n")
    if arguments.out:
        arguments.out.write_text(text)
    if (least := min(numbers["coverage"])) < arguments.least:
        raise SystemExit(f"Only {least:.1%} of a step's wall time is named; wanted {arguments.least:.0%}.")


if __name__ == "__main__":
    main()
