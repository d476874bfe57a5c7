"""Takes one step with every YAML file of the repository under one strategy, on the tiny model.

``python tests/examples/run_shipped.py --strategy ddp --devices 2 --folder inputs --out results.json``, from the root of
the repository; Lightning starts the other processes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import yaml
from typing_extensions import override

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.runs import REWARDS, Recorder
from tests.tiny import write_chat_file, write_prompt_file, write_tiny_folder
from verl_lightning.lightning_cli import CLI

ROOT = Path(__file__).parents[2]
BASES = {"ppo": "configs/ppo.yaml", "sft": "configs/sft.yaml"}
"""What a file lies over, by the end of its name; all others lie over GRPO's."""

TINY = """
--trainer.fast_dev_run true --trainer.accelerator cpu --trainer.num_nodes 1 --trainer.precision 32-true
--trainer.enable_model_summary false --model.actor.path model --model.actor.optim.warmup_steps 0
"""
PROMPTS = f"""
--data.train_files prompts.jsonl --data.val_files prompts.jsonl --data.prompts_per_step 4 --data.val_batch_size 4
--data.max_prompt_length 32 --model.reward.function {REWARDS}:even_share --model.reward.num_workers 1
--model.update.mini_batch_size 4 --model.update.micro_batch_size 4
--rollout HFRollout --rollout.sampling.num_samples 2 --rollout.sampling.max_new_tokens 6
--rollout.val_sampling.num_samples 1 --rollout.val_sampling.max_new_tokens 6
"""
CHATS = """
--data.train_files chats.jsonl --data.val_files chats.jsonl --data.batch_size 2 --data.max_length 64 --rollout null
"""
SIZES = "--megatron.tensor_parallel_size 2 --megatron.pipeline_parallel_size 1 --megatron.sequence_parallel false"


class RecordedCLI(CLI):
    """Keeps the metrics of the step."""

    recorder: Recorder

    @override
    def before_fit(self) -> None:
        self.recorder = Recorder()
        self.trainer.callbacks.append(self.recorder)


def shipped_files() -> list[str]:
    """Paths in the repository; Ray's is run by ``tests/ray``."""
    files = [path for folder in ("configs", "examples") for path in (ROOT / folder).rglob("*.yaml")]
    return sorted(str(path.relative_to(ROOT)) for path in files if path.parent.name != "ray")


def words_for(file: str, strategy: str, devices: int) -> list[str]:
    """The command line of one file's step."""
    base = next((base for end, base in BASES.items() if Path(file).stem == f"cpu_{end}"), "configs/grpo.yaml")
    own = yaml.safe_load((ROOT / file).read_text())
    files = [file] if "class_path" in own.get("model", {}) else [base, file]
    settings = [yaml.safe_load((ROOT / name).read_text()) for name in files]
    is_sft = settings[0]["model"]["class_path"] == "SFTModule"
    words = [*TINY.split(), *(CHATS if is_sft else PROMPTS).split(), "--trainer.devices", str(devices)]
    critic = [(part.get("model", {}).get("init_args", {}).get("critic") or {}).get("model") for part in settings]
    words += ["--model.critic.model.path", "model"] if critic[-1] else []
    words += SIZES.split() if strategy == "megatron" and "megatron" in own else []
    return [word for name in files for word in ("--config", str(ROOT / name))] + ["--strategy", strategy, *words]


def launch(strategy: str, devices: int, folder: Path, *, timeout: float) -> dict[str, tuple[int, float]]:
    """The trainer's counter and the gradient's norm after each file's step, in processes of their own."""
    out = folder / "results.json"
    words = ["--strategy", strategy, "--devices", str(devices), "--folder", str(folder), "--out", str(out)]
    run = subprocess.run(
        [sys.executable, __file__, *words], cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return {file: tuple(numbers) for file, numbers in json.loads(out.read_text()).items()}


def main() -> None:
    """Runs all files; rank 0 saves each one's counter and gradient norm."""
    parser = argparse.ArgumentParser(description="Take one step with every shipped YAML file.")
    parser.add_argument("--strategy", required=True, help="ours by name, or auto")
    parser.add_argument("--devices", type=int, required=True, help="processes")
    parser.add_argument("--folder", type=Path, required=True, help="for the model and the data")
    parser.add_argument("--out", type=Path, required=True, help="file for the results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.strategy == "megatron":
        from tests.strategies.megatron.cpu import pretend_cuda

        pretend_cuda()
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    if is_first:
        write_tiny_folder(arguments.folder / "model")
        write_prompt_file(arguments.folder / "prompts.jsonl")
        write_chat_file(arguments.folder / "chats.jsonl")
    os.chdir(arguments.folder)
    results = {}
    for file in shipped_files():
        cli = RecordedCLI(words_for(file, arguments.strategy, arguments.devices))
        (step,) = cli.recorder.steps
        results[file] = [cli.trainer.global_step, step.get("actor/grad_norm", step.get("train/grad_norm"))]
    if is_first:
        arguments.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
