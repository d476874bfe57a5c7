"""Checks of what a run needs and no checkpoint holds: compared on resume by content, never by path."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.fabric.utilities import rank_zero_warn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from verl_lightning.models.config import ModelConfig
from verl_lightning.rewards.config import RewardConfig

IDENTITIES_KEY = "identities"
CONFIGS_KEY = "model_configs"

REFERENCE = "reference"
"""Beginning of the names of identities of the policy before its training."""

PROBES = ("Hello, world! 12345 + 6.7", "  two  spaces\n\tand a tab\r\n", "Ünïcödé 漢字 🙂", "def f(x): return x ** 2")
"""Texts in which tokenizers with the same vocabulary differ."""

INCIDENTAL = (
    *("architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "chunk_size_feed_forward"),
    *("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout", "dropout"),
)
"""Fields of a model's config that change nothing of what it computes, or are settings of training; beside names with a
leading underscore."""

EDGE = 65536
"""Bytes of a file's beginning and end that its digest looks at."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Something that must be the same in the run that wrote a checkpoint and in the one that goes on."""

    key: str
    """The user's setting that names the thing."""

    what: str
    """Name of the thing as a noun phrase, such as ``the tokenizer``."""

    shown: str
    """Path or value of the thing, for people."""

    digest: str
    """Text that tells the thing from others; may equal ``shown``."""

    is_needed: bool = True
    """False if this run does without the thing, which is kept for runs that go on from it."""


def digest_of(*parts: object) -> str:
    """Returns a short text that tells values from others, by their ``repr``."""
    return hashlib.blake2b(repr(parts).encode(errors="surrogatepass"), digest_size=8).digest().hex()


def tokenizer_identities(tokenizer: PreTrainedTokenizerBase, path: str) -> dict[str, Identity]:
    """Identifies a tokenizer by its vocabulary and its ids of some texts, and its chat template.

    Args:
        tokenizer: Tokenizer of the policy.
        path: Path that the tokenizer was loaded from.
    """
    made = [tokenizer(text)["input_ids"] for text in PROBES]
    tokens = digest_of(sorted(tokenizer.get_vocab().items()), made)
    key, template = "model.actor.path", digest_of(tokenizer.chat_template)
    return {
        "tokenizer": Identity(key=key, what="the tokenizer", shown=path, digest=tokens),
        "chat_template": Identity(key=key, what="the chat template", shown=path, digest=template),
    }


def reward_identities(config: RewardConfig) -> dict[str, Identity]:
    """Identifies the models whose paths reward functions are given, by their files' names, sizes and edges."""
    path = {} if config.model is None else {"path": config.model.path}
    found = argument_identities("model.reward.model", "reward model", path)
    if config.function is not None:
        return found | argument_identities("model.reward.arguments", "reward model", config.arguments)
    for index, part in enumerate(config.functions):
        place, name = f"model.reward.functions[{index}].arguments", f"reward model of {part.label}:"
        found |= argument_identities(place, name, part.arguments)
    return found


def argument_identities(place: str, kind: str, arguments: Mapping[str, Any]) -> dict[str, Identity]:
    """Identifies the models among the arguments of one function."""
    folders = {name: Path(value) for name, value in arguments.items() if isinstance(value, str)}
    return {
        f"{kind} {name}": Identity(
            key=f"{place}.{name}",
            what="the reward model",
            shown=str(folder),
            digest=digest_of([(file.name, file.stat().st_size, *edges(file)) for file in files_of(folder)]),
        )
        for name, folder in folders.items()
        if (folder / "config.json").is_file()
    }


def files_of(folder: Path) -> list[Path]:
    """The files of a model."""
    return sorted(file for file in folder.glob("[!.]*") if file.is_file())


def edges(file: Path) -> tuple[bytes, bytes]:
    """The first and the last bytes of a file."""
    with file.open("rb") as content:
        first = content.read(EDGE)
        content.seek(max(0, file.stat().st_size - EDGE))
        return first, content.read()


def reference_identity(config: ModelConfig, digest: str, *, is_needed: bool) -> dict[str, Identity]:
    """Identifies the policy before its training, which is the reference of a KL penalty or a preference loss.

    Args:
        config: Settings of the policy.
        digest: Fingerprint of its weights. Rounded to another type, the same weights look like others.
        is_needed: True if this run has such a reference.
    """
    what, key = "the reference (the policy before its training)", "model.actor.path"
    found = Identity(key=key, what=what, shown=config.path, digest=digest, is_needed=is_needed)
    return {f"{REFERENCE} in {config.dtype}": found}


def references(saved: Mapping[str, Mapping[str, str]]) -> dict[str, Mapping[str, str]]:
    """Returns the identities of the policy before its training, which runs without a reference pass on."""
    return {name: identity for name, identity in saved.items() if name.startswith(REFERENCE)}


def check_identities(saved: Mapping[str, Mapping[str, str]], ours: Mapping[str, Identity]) -> None:
    """Refuses to go on with other things than the run that wrote a checkpoint had.

    Args:
        saved: Identities as `saved_identities` gave them; without those that an older version did not keep.
        ours: Identities of this run.

    Raises:
        ValueError: If a digest differs.
    """
    for name, here in ours.items():
        there = saved.get(name)
        if here.is_needed and there is None and name.startswith(REFERENCE):
            rank_zero_warn(
                f"`{here.key}`: `ckpt_path` does not tell whether `{here.shown}`, {here.what}, is the model that its"
                f" run began with{' in another `dtype`' if references(saved) else ''}. Make sure that it is."
            )
        if here.is_needed and there is not None and there["digest"] != here.digest:
            raise ValueError(
                f"`{here.key}`: {here.what} is not that of `ckpt_path`: {for_people(**there)} there,"
                f" {for_people(here.shown, here.digest)} here. Use that of the checkpoint's run, whatever its path; or"
                " make a folder of its weights with `verl-export` and start a new run from that by `model.actor.path`."
            )


def for_people(shown: str, digest: str) -> str:
    """Shows a value, with its digest if that is another text."""
    return f"`{shown}`" + (f" ({digest})" if digest != shown else "")


def saved_identities(identities: Mapping[str, Identity]) -> dict[str, dict[str, str]]:
    """Returns the part of identities that a checkpoint keeps."""
    return {name: {"shown": each.shown, "digest": each.digest} for name, each in identities.items()}


def config_text(config: PretrainedConfig) -> str:
    """Returns a model's whole config as JSON, as a checkpoint keeps it."""
    return json.dumps(config.to_dict(), sort_keys=True, default=str)


def check_config(key: str, saved: str, ours: str) -> None:
    """Refuses a model of the same shapes that computes something else, such as by another base of its rotary embedding.

    Args:
        key: The user's setting that names the model.
        saved: Text of `config_text` in the run that wrote the checkpoint. Fields that only one of both has, as with
            another version of transformers, are not compared.
        ours: Text of `config_text` in this run.

    Raises:
        ValueError: With the first field that differs.
    """
    there, here = (meaningful(text) for text in (saved, ours))
    for name in sorted(there.keys() & here.keys()):
        if there[name] != here[name]:
            raise ValueError(
                f"`{key}`: `config.json` is not that of the model in `ckpt_path`: `{name}` was {there[name]} there and"
                f" is {here[name]} here. Use the model of that run."
            )


def meaningful(text: str) -> dict[str, Any]:
    """Returns the fields of a model's config that change what it computes, by their dotted names.

    Args:
        text: Text of `config_text`.
    """
    fields = dict(flat(json.loads(text)))
    lasts = {name: name.rpartition(".")[2] for name in fields}
    return {n: v for n, v in fields.items() if lasts[n] not in INCIDENTAL and not lasts[n].startswith("_")}


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Each leaf of nested mappings by its dotted name."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from flat(item, f"{name}.{key}" if name else key)
    else:
        yield name, value
