"""Translates TRL's `GRPOConfig` and `SFTConfig`, from the YAML or the script arguments of its command line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from verl_lightning.migrate.composing import plain
from verl_lightning.migrate.parts import VerlConfig
from verl_lightning.migrate.reading import parse_value
from verl_lightning.migrate.shell import Command, Shell
from verl_lightning.migrate.shell_words import Value
from verl_lightning.migrate.trl_keys import MARKERS

SHARED: dict[str, Any] = {
    "num_processes": 1, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_train_epochs": 3,
    "max_steps": -1, "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0, "warmup_steps": 0, "warmup_ratio": 0.0, "lr_scheduler_type": "linear", "bf16": True,
    "fp16": False, "gradient_checkpointing": True, "save_strategy": "steps", "save_steps": 500, "eval_strategy": "no",
    "eval_steps": 500, "seed": 42, "dtype": "float32", "use_peft": False, "lora_r": 16, "lora_alpha": 32,
    "lora_dropout": 0.05, "lora_target_modules": None, "lora_modules_to_save": None,
}  # fmt: skip
GRPO: dict[str, Any] = SHARED | {
    "learning_rate": 1e-6, "num_generations": 8, "max_completion_length": 512, "temperature": 1.0, "top_p": 1.0,
    "top_k": 0, "beta": 0.0, "num_iterations": 1, "epsilon": 0.2, "delta": None, "epsilon_high": None,
    "importance_sampling_level": "token", "scale_rewards": "group", "loss_type": "dapo", "entropy_coef": 0.0,
    "mask_truncated_completions": False, "use_vllm": False, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3,
    "vllm_tensor_parallel_size": 1, "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None, "use_bias_correction_kl": True, "shuffle_dataset": True,
    "multi_objective_aggregation": "sum_then_normalize", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0,
}  # fmt: skip
SFT: dict[str, Any] = SHARED | {
    "learning_rate": 2e-5, "max_length": 1024, "shuffle_dataset": False, "packing": False, "padding_free": False,
    "assistant_only_loss": False, "completion_only_loss": None, "loss_type": "nll",
}  # fmt: skip
"""TRL 1.16's own values of the keys that make a setting."""

GRPO_KEYS = (
    "num_generations",
    "max_completion_length",
    "reward_funcs",
    "num_iterations",
    "epsilon",
    "beta",
    "use_vllm",
)
"""Keys that tell GRPO from SFT where the command does not."""


@dataclass(frozen=True)
class TRLRun:
    """What a run of TRL's was given."""

    method: str
    """``grpo`` or ``sft``."""

    given: dict[str, Any]
    """Values by TRL's names of its options."""

    notes: dict[str, tuple[str, ...]]
    """Sentences on what was taken where a shell decides, by key."""

    @property
    def config(self) -> VerlConfig:
        """The values on top of TRL's own."""
        return VerlConfig(self.given, GRPO if self.method == "grpo" else SFT)


def read_trl(path: str | None, words: Iterable[str]) -> TRLRun | None:
    """Reads a configuration of TRL's; None if the file is none.

    Args:
        path: A YAML file as for ``trl grpo --config``, or a run script (``.sh``), which is read and not run.
        words: Further options, ``name=value``, which win; and variables of a script's environment.

    Raises:
        ValueError: If the trainer is neither GRPO nor SFT.
    """
    further = dict(word.split("=", 1) for word in words if "=" in word)
    if path is None:
        return None
    if path.endswith(".sh"):
        found = read_script(Path(path), further)
    else:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        found = ("", dict(content), {}) if isinstance(content, dict) and is_trl(content) else None
    if found is None:
        return None
    method, given, notes = found
    given |= {name: parse_value(value) for name, value in further.items() if name in MARKERS or name in given}
    given = {str(name).replace("-", "_"): plain(value) for name, value in given.items()}
    method = method or ("grpo" if any(key in given for key in GRPO_KEYS) else "sft")
    if method not in ("grpo", "sft"):
        raise ValueError(f"`{path}` starts TRL's `{method}`. Nothing was written: `grpo` and `sft` are translated.")
    return TRLRun(method, given, notes)


def is_trl(keys: Iterable[Any]) -> bool:
    """Tells whether option names are TRL's: at least two that only it and transformers have, and none with a dot."""
    names = [str(key).replace("-", "_") for key in keys]
    return sum(name in MARKERS for name in names) >= 2 and not any("." in name for name in names)


def read_script(path: Path, environment: Mapping[str, str]) -> tuple[str, dict[str, Any], dict[str, Any]] | None:
    """Reads the method, the options and the notes of a run script; None if it does not start TRL."""
    for command in Shell(environment).run(path.read_text(encoding="utf-8")):
        options = dict(arguments(command.words))
        if not is_trl(options) and not any(word.text == "trl" for word in command.words):
            continue
        file = options.pop("config", None)
        below = path.parent / file.text if file is not None else None
        given = yaml.safe_load(below.read_text(encoding="utf-8")) if below is not None and below.is_file() else {}
        given |= {name: parse_value(value.text) for name, value in options.items()}
        notes = {name: value.notes for name, value in options.items() if value.notes}
        return method_of(command), given, notes | ({"": command.notes} if command.notes else {})
    return None


def arguments(words: Sequence[Value]) -> Iterable[tuple[str, Value]]:
    """Yields the options of a command: ``--name value``, ``--name=value``, several values, or none for a switch."""
    position = 0
    while position < len(words):
        match = re.fullmatch(r"--([A-Za-z][\w-]*)(?:=(.*))?", words[position].text, re.S)
        word, position = words[position], position + 1
        if match is None:
            continue
        values = [] if match[2] is None else [Value(match[2], word.is_known, word.notes)]
        while match[2] is None and position < len(words) and not words[position].text.startswith("--"):
            values.append(words[position])
            position += 1
            if match[1].replace("-", "_") not in ("reward_funcs", "reward_weights", "lora_target_modules", "report_to"):
                break
        name = match[1].replace("-", "_")
        if len(values) > 1 or name in ("reward_funcs", "reward_weights"):
            yield name, Value(f"[{', '.join(value.text for value in values)}]")
        else:
            yield name, values[0] if values else Value("true")


def method_of(command: Command) -> str:
    """Returns the trainer that a command starts; empty if it does not say."""
    texts = [word.text for word in command.words]
    if "trl" in texts[:-1]:
        return texts[texts.index("trl") + 1]
    named = re.search(r"\b(grpo|sft|dpo|kto|rloo|reward)[\w.]*", " ".join(t for t in texts if not t.startswith("-")))
    return named[1] if named else ""
