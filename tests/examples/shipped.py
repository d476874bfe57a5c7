"""One step with each YAML file of the repository under one strategy, on the tiny model."""

from __future__ import annotations

import os
from pathlib import Path

import yaml
from typing_extensions import override

from tests.processes import on_ranks
from tests.runs import REWARDS, Recorder
from tests.tiny import write_chat_file, write_pair_file, write_prompt_file, write_tiny_folder
from verl_lightning.cli.lightning_cli import CLI

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
PAIRS = CHATS.replace("chats", "pairs") + "--trainer.accumulate_grad_batches 1"
CACHED = f"{PAIRS} --model.reference_cache reference"
WORDS = {"SFTModule": CHATS, "DPOModule": CACHED, "RewardModule": PAIRS, "PPOModule": PROMPTS}
SIZES = "--megatron.tensor_parallel_size 2 --megatron.pipeline_parallel_size 1 --megatron.sequence_parallel false"


class RecordedCLI(CLI):
    """Keeps the metrics of the step."""

    recorder: Recorder

    @override
    def before_fit(self) -> None:
        self.recorder = Recorder()
        self.trainer.callbacks.append(self.recorder)


def shipped_files(strategy: str) -> list[str]:
    """Paths in the repository of what runs under a strategy; Ray's is run by ``tests/ray``, others by their own tests.

    Recipes choose an algorithm, of which strategies know nothing, and the quick start is ``configs/`` in small: one
    strategy runs them.
    """
    elsewhere = {"ray", "agents", "tutorial", "vision"}
    elsewhere |= set() if strategy == "auto" else {"recipes", "quickstart"}
    paths = [path for folder in ("configs", "examples") for path in (ROOT / folder).rglob("*.yaml")]
    files = sorted(
        str(path.relative_to(ROOT)) for path in paths if path.parent.name not in elsewhere and path.stem != "phases"
    )
    return [file for file in files if strategy != "megatron" or not has_teacher(file)]  # which Megatron refuses


def has_teacher(file: str) -> bool:
    """Whether a policy learns from a teacher."""
    model = yaml.safe_load((ROOT / file).read_text()).get("model", {})
    return "teacher" in model.get("init_args", {})


def words_for(file: str, strategy: str, devices: int) -> list[str]:
    """The command line of one file's step."""
    base = next((base for end, base in BASES.items() if Path(file).stem == f"cpu_{end}"), "configs/grpo.yaml")
    own = yaml.safe_load((ROOT / file).read_text())
    files = [file] if "class_path" in own.get("model", {}) else [base, file]
    settings = [yaml.safe_load((ROOT / name).read_text()) for name in files]
    words = [*TINY.split(), *WORDS[settings[0]["model"]["class_path"]].split(), "--trainer.devices", str(devices)]
    critic = [(part.get("model", {}).get("init_args", {}).get("critic") or {}).get("model") for part in settings]
    words += ["--model.critic.model.path", "model"] if critic[-1] else []
    words += ["--model.teacher.path", "teacher", "--model.teacher.dtype", "float32"] if has_teacher(file) else []
    shaping = [part.get("model", {}).get("init_args", {}).get("shaping") for part in settings]
    words += ["--model.shaping.overlong_buffer", "2"] if shaping[-1] else []  # below the longest response
    words += SIZES.split() if strategy == "megatron" and "megatron" in own else []
    return [word for name in files for word in ("--config", str(ROOT / name))] + ["--strategy", strategy, *words]


def take_steps(strategy: str, folder: Path) -> dict[str, tuple[int, float]]:
    """The trainer's counter and the gradient's norm after each file's step, on this rank."""
    if strategy == "megatron":
        from tests.strategies.megatron.cpu import pretend_cuda

        pretend_cuda()
    os.chdir(folder)
    results = {}
    for file in shipped_files(strategy):
        cli = RecordedCLI(words_for(file, strategy, int(os.environ["WORLD_SIZE"])))
        (step,) = cli.recorder.steps
        results[file] = (cli.trainer.global_step, step.get("actor/grad_norm", step.get("train/grad_norm")))
    return results


def launch(strategy: str, devices: int, folder: Path) -> dict[str, tuple[int, float]]:
    """What the first of several ranks saw."""
    write_tiny_folder(folder / "model")
    write_tiny_folder(folder / "teacher", seed=7)
    write_prompt_file(folder / "prompts.jsonl")
    write_chat_file(folder / "chats.jsonl")
    write_pair_file(folder / "pairs.jsonl")
    results: dict[str, tuple[int, float]] = on_ranks(devices, take_steps, strategy, folder)[0]
    return results
