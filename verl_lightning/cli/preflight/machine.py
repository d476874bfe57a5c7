"""Obstacles to a run on this machine: files, packages and devices that the settings ask for and it does not have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from verl_lightning.cli.errors import did_you_mean
from verl_lightning.cli.preflight.reading import Reading
from verl_lightning.cli.preflight.sources import names_without
from verl_lightning.needs import (
    ADAPTER_WEIGHTS,
    OWN_STRATEGIES,
    broken_weights,
    has_certainly_no_gpu,
    missing_accelerator,
    missing_adapter,
    missing_attention,
    missing_checkpoint,
    missing_data_file,
    missing_for_remote_teacher,
    missing_megatron,
    missing_model,
    missing_package,
    missing_strategy,
    missing_vllm,
    no_anew,
    no_data,
    no_files,
    no_gpu,
    no_last_checkpoint,
    strayed_flag,
    unwritable_folder,
    wrong_seed,
)
from verl_lightning.rewards.loading import check_exists, no_function
from verl_lightning.run_records import RUNS, wrong_name
from verl_lightning.trainer_numbers import LEAST, SHARES, nothing_to_train, wrong_numbers

LOGGERS = {
    "WandbLogger": "wandb",
    "MLFlowLogger": "mlflow",
    "CometLogger": "comet_ml",
    "NeptuneLogger": "neptune",
    "LitLogger": "litlogger",
}
"""Package that each of Lightning's loggers needs."""

ACCELERATORS = ("auto", "cpu", "cuda", "gpu", "mps")
"""Devices on which models are trained."""

LIGHTNINGS_STRATEGIES = ("ddp", "deepspeed", "fsdp", "single", "xla")
"""Beginnings of the names of Lightning's own strategies."""


def obstacles(reading: Reading, words: Sequence[str]) -> Iterator[str]:
    """Yields sentences about what is missing, in the order in which the run would meet it.

    Args:
        reading: Settings of the command line.
        words: Words of the command line.
    """
    yield from about_parts(reading)
    yield from about_strategy(reading)
    strategy = reading.get("trainer.strategy") or "auto"
    if "trainer.strategy" not in reading.classes and not reading.has_foreign_classes:
        yield from told(strayed_flag(words, strategy))
    yield from about_packages(reading)
    yield from about_files(reading)


def about_parts(reading: Reading) -> Iterator[str]:
    """Yields complaints about a missing model, missing data, a bad seed or a number out of its range."""
    if isinstance(seed := reading.get("seed_everything"), int):
        yield from told(wrong_seed(seed))
    numbers = {name: reading.get(f"trainer.{name}") for name in (*LEAST, *SHARES, "devices")}
    yield from wrong_numbers(numbers)
    if reading.command == "fit":
        yield from nothing_to_train(numbers)
    if isinstance(name := reading.get("name"), str):
        yield from told(wrong_name(name))
    if "model" not in reading.mentioned:
        yield "`verl-fit` needs `model`."
    module = reading.own_class("model")
    if module is not None and "data" not in reading.classes:
        yield no_data(module)


def about_strategy(reading: Reading) -> Iterator[str]:
    """Yields complaints about a strategy or accelerator that can't work here."""
    strategy, module = reading.get("trainer.strategy"), reading.own_class("model")
    if isinstance(strategy, str) and module is not None and not reading.has_foreign_classes:
        complaint = missing_strategy(strategy, module)
        if complaint is not None and not strategy.startswith(LIGHTNINGS_STRATEGIES):
            known = ("auto", *OWN_STRATEGIES)
            hint = did_you_mean(strategy, known) or f" Choose from {', '.join(known)}."
            complaint = f"`trainer.strategy` has no choice {strategy!r}.{hint}"
        yield from told(complaint)
    if strategy == "megatron":
        yield from told(missing_megatron())
    accelerator = reading.get("trainer.accelerator")
    if isinstance(accelerator, str) and module is not None:
        yield from told(missing_accelerator(accelerator))
        if accelerator.lower() not in ACCELERATORS and not reading.has_foreign_classes:
            yield f"`trainer.accelerator` has no choice {accelerator!r}.{did_you_mean(accelerator, ACCELERATORS)}"
    if accelerator in ("gpu", "cuda") and has_certainly_no_gpu():
        yield no_gpu()


def about_packages(reading: Reading) -> Iterator[str]:
    """Yields complaints about optional packages that are not installed."""
    if reading.own_class("rollout") == "VLLMRollout":
        yield from told(missing_vllm())
    if reading.own_class("rollout") == "RayRollout":
        yield from told(missing_package("`RayRollout`", "ray", "Install it: `pip install 'verl-lightning[ray]'`."))
    if reading.own_class("model") is not None and reading.get("model.reward.backend") == "ray":
        way_out = "Install it, `pip install 'verl-lightning[ray]'`, or set `model.reward.backend: processes`."
        yield from told(missing_package("`model.reward.backend: ray`", "ray", way_out))
    if reading.own_class("model") is not None and reading.get("model.teacher.base_url") is not None:
        yield from told(missing_for_remote_teacher())
    if reading.get("trainer.precision") in ("transformer-engine", "transformer-engine-float16"):
        way_out = "Install `transformer-engine[pytorch]`, or choose another precision, such as `bf16-mixed`."
        yield from told(missing_package("`trainer.precision: transformer-engine`", "transformer_engine", way_out))
    logger = reading.classes.get("trainer.logger")
    if logger is not None and logger.name in LOGGERS and not logger.is_ours:
        package = LOGGERS[logger.name]
        way_out = f"Install it, `pip install {package.replace('_', '-')}`, or choose another logger."
        yield from told(missing_package(f"`trainer.logger: {logger.name}`", package, way_out))


def about_files(reading: Reading) -> Iterator[str]:
    """Yields complaints about files and folders that are missing or can't be written to."""
    if isinstance(path := reading.get("trainer.default_root_dir"), str):
        yield from told(unwritable_folder(path))
    if isinstance(path := reading.get("ckpt_path"), str):
        yield from told(missing_checkpoint(path))
        yield from about_last_checkpoint(reading, path)
    if reading.own_class("model") is not None:
        for role in ("model.actor", "model.critic.model", "model.teacher", "model.reward.model"):
            yield from about_model(reading, role)
        for function in reward_functions(reading):
            check_exists(function)
            yield from told(missing_function(function))
    if reading.own_class("data") is not None:
        names = {"validate": ("val_files",), "test": ("test_files",)}.get(reading.command, ("train_files", "val_files"))
        if reading.command != "fit" and not reading.mentioned & {f"data.{names[0]}", "data.val_sets"}:
            yield no_files(names[0])
        for key, files in data_files(reading, names):
            for file in [files] if files and isinstance(files, str) else files or ():
                yield from told(missing_data_file(Path(str(file))), key)


def about_last_checkpoint(reading: Reading, path: str) -> Iterator[str]:
    """Yields a complaint if a checkpoint is looked up where there certainly is none."""
    if path == "auto" and reading.command != "fit":
        yield no_anew(reading.command)
    has_own_folder = "trainer.logger" in reading.mentioned and not isinstance(reading.get("trainer.logger"), bool)
    if path != "last" or has_own_folder or reading.has_dirpath:
        return
    root = Path(str(reading.get("trainer.default_root_dir") or RUNS), str(reading.get("name") or ""))
    if "://" not in str(root) and not any(root.rglob("*.ckpt")):
        yield no_last_checkpoint([root], reading.command)


def missing_function(name: str) -> str | None:
    """Says that a file has no reward function of a name; None if it has, or may have."""
    file, _, function = name.rpartition(":")
    names = names_without(Path(file).expanduser(), function) if file.endswith(".py") else None
    return None if names is None else no_function(name, names)


def data_files(reading: Reading, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yields the options of these names, and each set of validation rows among them, with their files."""
    yield from ((f"data.{name}", reading.get(f"data.{name}")) for name in names)
    sets = reading.get("data.val_sets") if "val_files" in names else None
    for name, each in sets.items() if isinstance(sets, dict) else ():
        if isinstance(each, dict):
            yield f"data.val_sets.{name}", each.get("files")


def reward_functions(reading: Reading) -> list[str]:
    """Returns the names of the functions that judge responses, as far as they are certain."""
    parts = reading.get("model.reward.functions")
    several = [part.get("function") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return [name for name in (reading.get("model.reward.function"), *several) if isinstance(name, str)]


def about_model(reading: Reading, role: str) -> Iterator[str]:
    """Yields complaints about the folders of one model, and about the package of its attention kernel."""
    path = reading.get(f"{role}.path")
    if isinstance(path, str) and not path.startswith("phase:"):  # which an earlier phase of the run will write
        yield from told(missing_model(path), role)
    if isinstance(attention := reading.get(f"{role}.attn_implementation"), str):
        yield from told(missing_attention(attention), role)
    if isinstance(path := reading.get(f"{role}.lora.adapter_path"), str):
        yield from told(missing_adapter(Path(path)) or broken_weights(Path(path, ADAPTER_WEIGHTS)), role)


def told(complaint: str | None, key: str = "") -> Iterator[str]:
    """Yields the complaint, if there is one, behind the key that it is about."""
    if complaint is not None:
        yield f"`{key}`: {complaint}" if key else complaint
