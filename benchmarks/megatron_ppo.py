"""PPO and GRPO with vLLM on the training GPUs, under Megatron and under `fsdp`: the shipped files, through `verl-fit`.

On 1 or 2 GPUs, from the root of the repository::

    python benchmarks/megatron_ppo.py --devices 1 --out megatron_ppo_1.json
    python benchmarks/megatron_ppo.py --devices 2 --configs grpo --layouts fsdp megatron TP2 PP2 --out ppo_2.json
    python benchmarks/megatron_ppo.py --devices 1 --configs grpo --layouts megatron --kill --out resume.json

The model has random weights in the shape of Qwen2-0.5B and a tokenizer of bytes; prompts are random letters. It prints
medians of the phases of each run, and losses, gradient norms and log-prob gaps of each step. With ``--kill`` the run
is killed with signal 9 in the middle, resumed, and compared with the uninterrupted one: every logged number and every
exported weight.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import safe_open
from vllm_rollout import __file__ as bench_file
from vllm_rollout import write_model, write_prompts

LAYOUTS: dict[str, list[str]] = {
    "fsdp": ["--strategy", "fsdp", "--fsdp.compile", "true", "--fsdp.reshard_after_forward", "false"],
    "megatron": ["--strategy", "megatron"],
    "TP2": ["--strategy", "megatron", "--megatron.tensor_parallel_size", "2", "--megatron.sequence_parallel", "true"],
    "PP2": ["--strategy", "megatron", "--megatron.pipeline_parallel_size", "2"],
    "LoRA": ["--strategy", "megatron", "--model.actor.lora", "{}"],
    "LoRA alone": ["--strategy", "megatron", "--model.actor.lora", '{"merge_for_rollout": false}'],
    "profiled": ["--strategy", "megatron", "--trainer.callbacks+", "ProfilerCallback"],
}
"""Flags of each layout; `megatron` on two devices is data parallelism with the distributed optimizer."""

DETERMINISTIC = ["--megatron.transformer.overrides", '{"deterministic_mode": true}', "--model.actor.packing", "never"]
"""Flags of runs that are compared to the bit: TransformerEngine's attention adds up gradients in any order else, and in
a fixed order it wants terabytes for packed rows."""

DETERMINISTIC_VARIABLES = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

FIT = "verl-fit"
"""First word of this script where it stands for the command."""

MACHINE = re.compile("timing_|perf/|memory|time")
"""Columns of the metrics file that tell of the machine; all others must survive a kill."""


def flags_of(arguments: argparse.Namespace, config: str, layout: str, folder: Path) -> list[str]:
    """The words of `verl-fit` for one run.

    Args:
        arguments: Sizes and devices.
        config: Name of a shipped configuration.
        layout: Name in `LAYOUTS`.
        folder: Of the run.
    """
    shape = "tiny" if arguments.tiny else arguments.shape
    model, prompts = arguments.folder / shape, arguments.folder / "prompts.jsonl"
    write_model(model, shape)
    write_prompts(prompts, 256 * (arguments.steps + 1), arguments.prompt_length)
    folder.mkdir(parents=True, exist_ok=True)
    overlay = folder / "overlay.yaml"
    overlay.write_text(yaml.safe_dump(overlay_of(arguments, config, model, prompts, folder)))
    fixed = DETERMINISTIC if arguments.kill and layout != "fsdp" else []
    return ["fit", "--config", config, "--config", str(overlay), *LAYOUTS[layout], *fixed]


def overlay_of(arguments: argparse.Namespace, config: str, model: Path, prompts: Path, folder: Path) -> dict[str, Any]:
    """What differs from the shipped file: where things lie, lengths, and how often it is saved."""
    actor: dict[str, Any] = {"path": str(model)}
    critic = {"critic": {"model": {"path": str(model)}}} if config == "ppo" else {}
    sampling = {"max_new_tokens": arguments.response_length}
    callbacks = [
        {"class_path": "ModelCheckpoint",
         "init_args": {"save_top_k": 0, "save_last": True, "every_n_train_steps": 2}},
        {"class_path": "HFCheckpoint", "init_args": {}},
    ]  # fmt: skip
    return {
        "trainer": {
            "accelerator": arguments.accelerator,
            "devices": arguments.devices,
            "precision": "32-true" if arguments.tiny else "bf16-mixed",
            "max_steps": arguments.steps,
            "limit_val_batches": 0,
            "callbacks": callbacks,
            "logger": {"class_path": "ResumableCSVLogger", "init_args": {"save_dir": str(folder / "runs")}},
        },
        "model": {"init_args": {
            "actor": actor,
            "reward": {"function": f"{Path(bench_file).resolve()}:even_length"},
            "update": {"micro_batch_size": arguments.micro_batch_size or None},
        } | critic},
        "data": {"init_args": {"train_files": str(prompts), "val_files": str(prompts)}},
        "rollout": {"class_path": "VLLMRollout", "init_args": {
            "sampling": sampling, "val_sampling": sampling,
            "gpu_memory_utilization": arguments.gpu_memory_utilization, "enforce_eager": True,
        }},
    }  # fmt: skip


def start(arguments: argparse.Namespace, config: str, layout: str, folder: Path, *more: str) -> subprocess.Popen[str]:
    """Begin a run in processes of its own; its output goes to the folder."""
    command = [sys.executable, __file__, FIT, *flags_of(arguments, config, layout, folder), *more]
    variables = {**os.environ, **(DETERMINISTIC_VARIABLES if arguments.kill else {})}
    with (folder / "output.txt").open("a") as output:
        return subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, text=True, start_new_session=True, env=variables
        )


def rows_of(folder: Path) -> list[dict[str, str]]:
    """Rows of the metrics file that belong to a training step."""
    files = list(folder.glob("runs/*/metrics.csv"))
    if not files:
        return []
    with files[0].open() as file:
        return [row for row in csv.DictReader(file) if row.get("actor/grad_norm")]


def run(arguments: argparse.Namespace, config: str, layout: str, folder: Path) -> dict[str, Any]:
    """One whole run, and what its metrics say."""
    return ended(arguments, start(arguments, config, layout, folder), folder)


def ended(arguments: argparse.Namespace, process: subprocess.Popen[str], folder: Path) -> dict[str, Any]:
    """What a run's metrics say, once it has ended."""
    begun = time.monotonic()
    try:
        code = process.wait(arguments.timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        code = -int(signal.SIGKILL)
    if code != 0:
        return {"error": f"ended with {code}: {(folder / 'output.txt').read_text()[-1500:]}"}
    return report(rows_of(folder), arguments.warmup) | {"seconds": round(time.monotonic() - begun, 1)}


def report(rows: list[dict[str, str]], warmup: int) -> dict[str, Any]:
    """Medians of the phases after the first steps, and what was learnt in each step."""
    counted = rows[warmup:] or rows
    phases = sorted(name for name in counted[-1] if name.startswith("timing_s/") and counted[-1][name])
    medians = {p.removeprefix("timing_s/"): statistics.median(float(r[p]) for r in counted if r[p]) for p in phases}
    told = ("actor/pg_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm", "actor/ref_kl",
            "rollout/canary_gap", "rollout_corr/abs_log_prob_gap", "reward/mean")  # fmt: skip
    return {
        "phases_s": {name: round(value, 3) for name, value in medians.items()},
        "steps": {name: [row[name] for row in rows] for name in told if rows[0].get(name)},
        "perf": {name: value for name, value in counted[-1].items() if name.startswith("perf/") and value},
    }


def killed(arguments: argparse.Namespace, config: str, layout: str, folder: Path) -> dict[str, Any]:
    """Kill a run in the middle, resume it, and compare it with an uninterrupted one that goes on beside it."""
    broken = folder / "broken"
    uninterrupted = start(arguments, config, layout, folder / "whole")
    process = start(arguments, config, layout, broken)
    end = time.monotonic() + arguments.timeout
    while process.poll() is None and len(rows_of(broken)) < arguments.steps - 1 and time.monotonic() < end:
        time.sleep(0.1)
    killed_after = len(rows_of(broken))
    if process.poll() is not None:
        return {"error": f"ended before it was killed: {(broken / 'output.txt').read_text()[-1500:]}"}
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    resumed = ended(arguments, start(arguments, config, layout, broken, "--ckpt_path", "last"), broken)
    whole = ended(arguments, uninterrupted, folder / "whole")
    told = {"killed_after_steps": killed_after, "whole": whole, "resumed": resumed}
    if "error" in whole or "error" in resumed:
        return told
    return told | {"differences": differences(folder / "whole", broken)}


def differences(whole: Path, broken: Path) -> dict[str, Any]:
    """Logged numbers and exported weights that are not those of the uninterrupted run, to the bit."""
    expected, actual = rows_of(whole), rows_of(broken)
    columns = [name for name in expected[0] if not MACHINE.search(name)]
    numbers = [
        f"step {before['step']}: {name} {before[name]} != {after.get(name)}"
        for before, after in zip(expected, actual, strict=False)
        for name in columns
        if before[name] != after.get(name, "")
    ]
    weights = {folder: read_weights(folder) for folder in (whole, broken)}
    apart = [name for name, tensor in weights[whole].items() if not torch.equal(tensor, weights[broken][name])]
    return {"rows": [len(expected), len(actual)], "numbers": numbers[:20], "weights": apart[:20],
            "compared": [len(columns), len(weights[whole])]}  # fmt: skip


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Weights that the run exported at its end, by file and name."""
    weights = {}
    for file in sorted(folder.glob("runs/**/*.safetensors")):
        with safe_open(file, "pt") as opened:
            weights |= {f"{file.parent.name}/{name}": opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return weights


def main() -> None:
    """Run all, and write what came out after each run."""
    if sys.argv[1:2] == [FIT]:
        from verl_lightning.cli import main as fit

        fit(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", nargs="+", default=["grpo", "ppo"])
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=["fsdp", "megatron"])
    parser.add_argument("--kill", action="store_true", help="compare a killed and resumed run with a whole one")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--accelerator", default="gpu")
    parser.add_argument("--tiny", action="store_true", help="a tiny model")
    parser.add_argument("--shape", choices=["0.5b", "small"], default="0.5b")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2, help="steps that do not count for phases")
    parser.add_argument("--prompt-length", type=int, default=200, help="tokens")
    parser.add_argument("--response-length", type=int, default=512, help="tokens")
    parser.add_argument("--micro-batch-size", type=int, default=0, help="sequences; 0: by the plan")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.35)
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds of one run")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/megatron-ppo"), help="for models, prompts and runs")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    packages = [name for name in ("torch", "vllm", "megatron-core", "megatron-bridge", "transformer-engine",
                                  "transformers", "lightning") if has(name)]  # fmt: skip
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "command": " ".join(sys.argv),
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }
    for config in arguments.configs:
        for layout in arguments.layouts:
            name = f"{config}, {layout}" + (", killed" if arguments.kill else "")
            work = killed if arguments.kill else run
            results[name] = work(arguments, config, layout, arguments.folder / name.replace(", ", "-"))
            print(f"{name}: {json.dumps(results[name])}", flush=True)  # noqa: T201
            if arguments.out is not None:
                arguments.out.write_text(json.dumps(results, indent=1))


def has(package: str) -> bool:
    """Whether a package's version is known."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
