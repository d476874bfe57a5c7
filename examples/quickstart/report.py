"""What came of the quick start: a table of accuracies, curves, and an exported policy that answers; see ``run.py``."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import matplotlib
import torch
from matplotlib import pyplot
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_lightning.models.config import ModelConfig
from verl_lightning.rollout.base import SamplingConfig
from verl_lightning.rollout.completions import answer, make_requests, wait_for
from verl_lightning.rollout.hf import HFEngine
from verl_lightning.seeding import derive_seed

LEAST_LIFT = {"grpo": 0.4, "ppo": 0.3}
MODELS = {"before": "model", "after SFT": "sft/hf/last", "after GRPO": "grpo/hf/last", "after PPO": "ppo/hf/last"}


def accuracy(folder: Path, questions: list[dict], *, temperature: float) -> float:
    """Share of held-out questions whose sampled answer is exactly right."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    texts = [
        tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in questions
    ]
    tokens = tokenizer(texts, add_special_tokens=False).input_ids
    engine = HFEngine(
        ModelConfig(path=str(folder)), eos_token_ids=[tokenizer.eos_token_id], pad_token_id=tokenizer.pad_token_id
    )
    engine.start(torch.device("cpu"))
    seeds = [[derive_seed("quickstart", row)] for row in range(len(questions))]
    requests = make_requests(tokens, seeds, SamplingConfig(max_new_tokens=12, temperature=temperature))
    responses = [completion.token_ids for completion in wait_for(answer(engine.generate, requests))]
    answers = tokenizer.batch_decode(responses, skip_special_tokens=True)
    right = [answer == row["reward_model"]["ground_truth"] for answer, row in zip(answers, questions, strict=True)]
    return sum(right) / len(right)


def read_curve(file: Path, metric: str) -> tuple[list[int], list[float]]:
    """Steps and values of a metric in a CSV log."""
    with file.open() as lines:
        points = [(int(row["step"]) + 1, float(row[metric])) for row in csv.DictReader(lines) if row.get(metric)]
    return [step for step, _ in points], [value for _, value in points]


def newest_log(folder: Path) -> Path:
    """The metrics of the last run that logged here."""
    return max(folder.glob("*/metrics.csv"), key=lambda file: file.stat().st_mtime)


def draw(folder: Path) -> Path:
    """Reward and held-out accuracy over the steps of both trainings, as a PNG."""
    matplotlib.use("Agg")
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for name in LEAST_LIFT:
        log = newest_log(folder / name)
        axes[0].plot(*read_curve(log, "critic/score/mean"), label=name.upper())
        axes[1].plot(*read_curve(log, "val/reward"), marker="o", label=name.upper())
    for axis, title in zip(axes, ("reward of training responses", "accuracy on held-out questions"), strict=True):
        axis.set(title=title, xlabel="iteration", ylim=(0, 1))
        axis.grid(alpha=0.3)
        axis.legend()
    target = folder / "curves.png"
    figure.savefig(target, dpi=120)
    pyplot.close(figure)
    return target


def check_export(folder: Path) -> None:
    """The exported policy is an ordinary Hugging Face model."""
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    chat = [{"role": "user", "content": "sort 7301"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    print(f"{folder} loads with AutoModelForCausalLM; it answers 'sort 7301' with {answer!r}")


def report(folder: Path, *, title: str) -> bool:
    """Print the table, draw the curves and try an export; whether both trainings lifted the accuracy as they should."""
    questions = [json.loads(line) for line in (folder / "test.jsonl").read_text().splitlines()]
    table = Table(title=title, title_justify="left")
    for column in ("model", "sampled", "greedy"):
        table.add_column(column, justify="left" if column == "model" else "right")
    sampled = {}
    for name, path in MODELS.items():
        sampled[name] = accuracy(folder / path, questions, temperature=1.0)
        greedy = accuracy(folder / path, questions, temperature=0.0)
        table.add_row(name, f"{sampled[name]:.3f}", f"{greedy:.3f}")
    Console(width=80).print(table)
    lifts = {name: sampled[f"after {name.upper()}"] - sampled["after SFT"] for name in LEAST_LIFT}
    for name, lift in lifts.items():
        print(f"{name.upper()} lifted the sampled accuracy by {lift:+.3f} (at least {LEAST_LIFT[name]:+.1f} wanted)")
    print(f"Curves: {draw(folder)}")
    check_export(folder / MODELS["after GRPO"])
    return all(lifts[name] >= LEAST_LIFT[name] for name in lifts)
