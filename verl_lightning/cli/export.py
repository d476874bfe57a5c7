"""`verl-export`: turns a trainer checkpoint into a folder that transformers or PEFT loads; needs no accelerator."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse import ArgumentParser
from lightning.fabric.utilities import rank_zero_info
from torch import Tensor

from verl_lightning.cli.deprecation import renamed_value
from verl_lightning.cli.errors import describe, read_failure
from verl_lightning.cli.preflight.words import read_file
from verl_lightning.models.build import build_scorer
from verl_lightning.models.classifier import classifier_of
from verl_lightning.models.config import ModelConfig
from verl_lightning.models.digests import write_digests
from verl_lightning.models.fingerprint import base_fingerprint, with_frozen
from verl_lightning.models.hf_folder import atomic_folder, write_model, write_value_head
from verl_lightning.models.lora import adapter_weights, write_adapter
from verl_lightning.models.pretrained import copy_processor
from verl_lightning.models.processor import image_processor
from verl_lightning.models.scorer import Head, TokenScorer
from verl_lightning.models.tokenizer import load_tokenizer
from verl_lightning.models.weights import base_weights, merged_weights, value_head_weights
from verl_lightning.modules.checkpoint_contents import BASES_KEY
from verl_lightning.strategies import checkpoints

Role = Literal["actor", "critic"]
Form = Literal["hf", "peft", "merged"]


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        args: Words after the program's name; by default those of this process.
    """
    parser = make_parser()
    options = parser.parse_args(args)
    dtype = getattr(torch, options.dtype) if options.dtype else None
    try:
        export(options.ckpt_path, options.output, to=options.to, role=options.role, config=options.config, dtype=dtype)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    rank_zero_info(f"Wrote `{options.output}`.")


def make_parser() -> argparse.ArgumentParser:
    """The options of `verl-export`."""
    parser = argparse.ArgumentParser("verl-export", description=__doc__, usage=argparse.SUPPRESS, allow_abbrev=False)
    parser.add_argument("--ckpt_path", type=Path, required=True, help="checkpoint that `verl-fit` wrote")
    parser.add_argument("--output", type=Path, required=True, help="folder to make; must not hold anything yet")
    forms = "hf: the model; peft: the LoRA adapter alone; merged: the model with the LoRA adapter in it"
    parser.add_argument("--to", choices=["hf", "peft", "merged"], required=True, help=forms)
    parser.add_argument("--config", type=Path, help="settings of the run; by default its own `config.yaml`")
    parser.add_argument("--role", choices=["actor", "critic"], default="actor", help="which model")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="stored type; by default as trained"
    )
    return parser


def export(
    ckpt_path: Path,
    output: Path,
    *,
    to: Form,
    role: Role = "actor",
    config: Path | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write one role of a checkpoint as a folder, which appears when it is complete.

    Args:
        ckpt_path: Checkpoint that `fit` wrote, a file, or the folder that `fsdp` or `megatron` makes.
        output: Folder to make.
        to: Form of the folder: ``hf``, the model of a run without LoRA; ``peft``, a LoRA run's adapter; or ``merged``,
            its model with the adapter merged in.
        role: Which model of the run.
        config: Settings of the run; None takes the ``config.yaml`` beside the checkpoint or its folder.
        dtype: Stored type of the weights; None leaves them as they were trained.

    Raises:
        ValueError: If something is missing, does not fit, or would be overwritten.
    """
    if output.exists() and (output.is_file() or any(output.iterdir())):
        raise ValueError(f"`--output {output}` exists already. Remove it, or name another folder.")
    settings = config or find_config(ckpt_path)
    model_config, head = read_role(settings, role)
    policy_config, _ = read_role(settings, "actor")  # whose tokenizer is the run's
    if (to == "hf") != (model_config.lora is None):
        way = "`--to peft` or `--to merged`" if to == "hf" else "`--to hf`"
        have = "was trained with LoRA" if to == "hf" else "has no LoRA adapter"
        raise ValueError(f"`--to {to}` does not fit: the {role} {have}. Use {way}.")
    model = load_role(ckpt_path, model_config, head, role)
    with atomic_folder(output) as folder:
        tokenizer = load_tokenizer(policy_config.path)
        tokenizer.save_pretrained(folder)
        if image_processor(policy_config.path) is not None:
            copy_processor(policy_config.path, folder)
        value_head = value_head_weights(model.value_head)
        classifier = classifier_of(role, head, value_head, tokenizer.pad_token_id)
        write_value_head(folder, {} if classifier else value_head)
        if to == "peft":
            fingerprint = base_fingerprint(model.backbone)
            write_adapter(folder, model.backbone, adapter_weights(model.backbone), fingerprint, dtype)
        else:
            weights = merged_weights(model.backbone)
            weights = changed_weights(weights, model) if to == "merged" else weights
            write_model(folder, model.backbone, weights, dtype, classifier=classifier)
        write_digests(folder)


def find_config(ckpt_path: Path) -> Path:
    """The settings that `verl-fit` saved in the run's folder.

    Raises:
        ValueError: If there are none.
    """
    for folder in ckpt_path.absolute().parents[:2]:
        if (path := folder / "config.yaml").is_file():
            return path
    raise ValueError(f"no `config.yaml` lies beside `--ckpt_path {ckpt_path}` or one folder up. Give it by `--config`.")


def read_role(path: Path, role: Role) -> tuple[ModelConfig, Head]:
    """Reads one model's settings and its head from those of a run, changed so that it is built without an accelerator.

    Raises:
        ValueError: If the file is not a run's, or the run had no such model.
    """
    try:
        written = renamed_value(read_file(path), group="")  # an older version may have
        settings: dict[str, Any] = written["model"]["init_args"]
        actor, critic = settings["actor"], settings.get("critic")
        critic_model = critic.get("model") if critic else None
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"`--config {path}` does not hold the settings of a run: there is no `model.init_args.actor`."
        ) from error
    if role == "critic" and critic_model is None:
        raise ValueError("`--role critic`: the run had no critic with a trunk of its own.")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument(f"--{role}", type=ModelConfig)
    chosen = actor if role == "actor" else critic_model
    chosen = {"path": chosen} if isinstance(chosen, str) else chosen
    try:
        config: ModelConfig = parser.instantiate(parser.parse_object({role: chosen}))[role]
    except argparse.ArgumentError as error:
        failure = dataclasses.replace(read_failure(str(error)), class_path=ModelConfig.__name__)
        problem = describe(failure, (), (), "verl-fit fit --model.help PPOModule")
        raise ValueError(
            f"`--config {path}` has settings of the {role} that this version can't read: {problem}"
        ) from error
    lora = config.lora and dataclasses.replace(config.lora, adapter_path=None)  # the checkpoint brings the adapter
    is_reward_model = str(written["model"].get("class_path", "")).endswith("RewardModule")
    head: Head = "value" if is_reward_model else "policy_and_value" if critic and critic_model is None else "policy"
    config = dataclasses.replace(config, lora=lora, attn_implementation="eager", activation_checkpointing="none")
    return config, "value" if role == "critic" else head


def read_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint of any strategy, whole.

    Raises:
        ValueError: If there is none, or it is not one of ours.
    """
    try:
        checkpoint = checkpoints.read_checkpoint(path, with_optimizers=False, mmap=True)
    except FileNotFoundError as error:
        raise ValueError(f"`--ckpt_path {path}` does not exist. Give a checkpoint's file or folder.") from error
    except checkpoints.NoCheckpointError as error:
        raise ValueError(f"`--ckpt_path {path}` {error.what}") from error
    if BASES_KEY not in checkpoint:
        raise ValueError(f"`--ckpt_path {path}` was not written by `verl-fit`.")
    return checkpoint


def load_role(ckpt_path: Path, config: ModelConfig, head: Head, role: Role) -> TokenScorer:
    """Build one model of a run and load its weights from a checkpoint.

    Raises:
        ValueError: If the checkpoint is not one of such a run.
    """
    checkpoint = read_checkpoint(ckpt_path)
    model = build_scorer(config, head, trainable=True).eval()
    if config.lora is not None and checkpoint[BASES_KEY].get(role) != base_fingerprint(model.backbone):
        raise ValueError(
            f"`--ckpt_path {ckpt_path}` holds adapters for another base than `path: {config.path}`: the frozen weights"
            " differ. Use the base model of that run."
        )
    prefix = f"{role}."
    state = {name.removeprefix(prefix): w for name, w in checkpoint["state_dict"].items() if name.startswith(prefix)}
    try:
        model.load_state_dict(with_frozen(model, state))
    except RuntimeError as error:
        first = str(error).strip().splitlines()[1].strip()  # after the name of torch's class
        raise ValueError(f"`--ckpt_path {ckpt_path}` does not fit the settings of the run: {first}") from error
    return model


def changed_weights(weights: Iterator[tuple[str, Tensor]], model: TokenScorer) -> Iterator[tuple[str, Tensor]]:
    """Yields the same weights, with an error at the end if each of them is equal to the base's.

    Raises:
        ValueError: If merging has changed nothing.
    """
    base = dict(base_weights(model.backbone))
    is_changed = False
    for name, weight in weights:
        is_changed = is_changed or not torch.equal(weight, base[name])
        yield name, weight
    if not is_changed:
        raise ValueError("the adapter adds nothing to the base: it was never trained. Export a later checkpoint.")
