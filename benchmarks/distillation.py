"""A student that distils against one that is fine-tuned, on the quick start's task at equal tokens.

From the root of the repository::

    python benchmarks/distillation.py --steps 60 --seeds 0 1 2 --out distillation.json

Prepares the task, trains a teacher on all answers, and warms a student up for a few steps. From there three arms learn
from as many sequences of five tokens, 128 a step: ``sft`` the right answers, ``offline`` the teacher's distributions
along them, ``on-policy`` its distributions along the student's own responses. Each has the learning rate of those tried
that serves it best. Prints the accuracy of greedy answers to 256 held-out questions. Models of an earlier run in
``--workdir`` are not trained again.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
import warnings
from pathlib import Path

from lightning.pytorch import LightningDataModule, Trainer, seed_everything

from verl_lightning import (
    ChatDataModule,
    HFCheckpoint,
    HFRollout,
    PPOModule,
    PromptDataModule,
    SFTModule,
    TeacherConfig,
)
from verl_lightning.modules.base import PostTrainingModule

PREPARE = Path(__file__).parents[1] / "examples/quickstart/prepare.py"
SEQUENCES = 128


def chats(task: Path) -> ChatDataModule:
    """Questions with their answers."""
    return ChatDataModule(str(task / "sft.jsonl"), batch_size=SEQUENCES, max_length=32)


def prompts(task: Path) -> PromptDataModule:
    """Questions."""
    sizes = {"prompts_per_step": SEQUENCES, "val_batch_size": 256, "max_prompt_length": 32}
    return PromptDataModule(str(task / "train.jsonl"), str(task / "val.jsonl"), **sizes)


def trainer(folder: Path, steps: int, *callbacks: object) -> Trainer:
    """A quiet trainer on one CPU process that validates nothing by itself."""
    return Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        default_root_dir=folder,
        callbacks=[HFCheckpoint(str(folder / "hf")), *callbacks],
        logger=False,
        limit_val_batches=0,
        enable_checkpointing=True,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def train(folder: Path, steps: int, module: PostTrainingModule, data: LightningDataModule, *callbacks: object) -> str:
    """Train, unless a run before has, and give the folder of the model."""
    folder = folder / f"{steps} steps"
    model = folder / "hf" / "last"
    if not model.exists():
        trainer(folder, steps, *callbacks).fit(module, datamodule=data)
    return str(model)


def accuracy(task: Path, model: str) -> float:
    """Share of held-out questions that a model answers rightly."""
    rollout = HFRollout(num_samples=1, max_new_tokens=12)
    measure = Trainer(
        accelerator="cpu", devices=1, callbacks=[rollout], logger=False, enable_progress_bar=False,
        enable_checkpointing=False, inference_mode=False,
    )  # fmt: skip
    module = PPOModule(model, reward="exact_match", advantage="GRPO")
    (found,) = measure.validate(module, datamodule=prompts(task), verbose=False)
    return float(found["val/reward"])


def arm(name: str, task: Path, folder: Path, student: str, teacher: str, *, steps: int, lr: float) -> str:
    """Train a student in one of three ways."""
    if name == "sft":
        return train(folder, steps, SFTModule(student, lr=lr), chats(task))
    told = TeacherConfig(path=teacher, beta=1.0 if name == "on-policy" else 0.0)
    if name == "on-policy":
        update = {"mini_batch_size": SEQUENCES, "micro_batch_size": SEQUENCES}
        policy = PPOModule(student, teacher=told, update=update, lr=lr)
        return train(folder, steps, policy, prompts(task), HFRollout(num_samples=1, max_new_tokens=5))
    taught = SFTModule(student, teacher=told, cross_entropy_coef=0.0, lr=lr)
    return train(folder, steps, taught, chats(task))


def main() -> None:
    """Run the arms and print their table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="steps of each arm")
    parser.add_argument("--warm-up", type=int, default=30, help="steps of SFT that all arms begin from")
    parser.add_argument("--teacher-steps", type=int, default=200, help="steps of SFT of the teacher")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[6e-4, 1.5e-3, 3e-3], help="learning rates to try")
    parser.add_argument("--workdir", type=Path, default=Path("runs/distillation"))
    parser.add_argument("--out", type=Path, help="file for the numbers")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    task = options.workdir / "task"
    subprocess.run([sys.executable, str(PREPARE), "--out", str(task)], check=True, capture_output=True)
    seed_everything(0, verbose=False)
    base = str(task / "model")
    teacher = train(options.workdir / "teacher", options.teacher_steps, SFTModule(base, lr=3e-3), chats(task))
    student = train(options.workdir / "student", options.warm_up, SFTModule(base, lr=3e-3), chats(task))
    found: dict[str, object] = {"teacher": accuracy(task, teacher), "student": accuracy(task, student)}
    sys.stdout.write(f"{found}\n")
    for name in ("sft", "offline", "on-policy"):
        by_rate = {}
        for lr in options.rates:
            scores = []
            for seed in options.seeds:
                seed_everything(seed, verbose=False)
                begun = f"{options.warm_up} of {options.teacher_steps}"
                folder = options.workdir / f"{name} {lr} {seed} after {begun}"
                scores.append(accuracy(task, arm(name, task, folder, student, teacher, steps=options.steps, lr=lr)))
            by_rate[lr] = scores
            sys.stdout.write(f"{name} lr {lr}: {scores}\n")
            sys.stdout.flush()
        found[name] = max(by_rate.values(), key=statistics.mean)
    sys.stdout.write(json.dumps(found, indent=2) + "\n")
    if options.out:
        options.out.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
