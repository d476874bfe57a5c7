"""Refuses a model whose `config.json` says what a map to Megatron does not carry over: it would be another model.

Nothing is known here of families. Each field that differs from its class' default is set to the default in a copy of
the config; a map that makes the same of both does not honour the field.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

NO_EFFECT = frozenset(
    {
        *("architectures", "auto_map", "dtype", "torch_dtype", "model_type", "transformers_version", "tokenizer_class"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "prefix"),
        *("id2label", "label2id", "problem_type", "return_dict", "output_attentions", "output_hidden_states"),
        *("initializer_range", "use_cache", "pretraining_tp", "chunk_size_feed_forward", "max_window_layers"),
        *("output_router_logits", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "is_decoder"),
        *("max_position_embeddings", "num_nextn_predict_layers", "ep_size", "attn_implementation"),
    }
)
"""Fields that change no score: of tokenizers, generation, initialisation and losses beside ours, or that others repeat.

`max_window_layers` is repeated by ``layer_types``; an auxiliary loss is never asked for.
"""

FIXED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Numbers that Megatron's Llama-3 scaling of positions always has, whatever the config says."""

MISSING = object()


def unhonoured(
    config: PreTrainedConfig, describe: Callable[[PreTrainedConfig], object], *, always: Mapping[str, Any] = {}
) -> dict[str, Any]:
    """Find fields of a model's config that a map does not carry over, with their values.

    Args:
        config: Config of the model.
        describe: Function that returns all that the map makes of a config, in a form that can be compared.
        always: Values that the map's models have whatever their configs say, by field.
    """
    ours = describe(config)
    owners = {"": config} | ({} if (text := config.get_text_config()) is config else {"text_config": text})
    return {
        f"{place}.{name}".lstrip("."): value
        for place, owner in owners.items()
        for name, value, changes in _differing(owner)
        if always.get(name, MISSING) != value
        and not _is_fixed(name, owner)
        and not _differs(ours, _changed(config, place, *changes), describe)
    }


def comparable(value: Any) -> Any:
    """Return a value of a config in a form of which two copies are equal: functions by name, objects by their text."""
    if isinstance(value, partial):
        return "partial", comparable(value.func), comparable(value.args), comparable(value.keywords)
    if isinstance(value, Mapping):
        return {key: comparable(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [comparable(each) for each in value]
    if callable(value):
        return getattr(value, "__qualname__", repr(value))
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)


def sentence(key: str, path: str, fields: Mapping[str, Any]) -> str:
    """Say what a map does not honour, and what to use.

    Args:
        key: The map, by the setting that chooses it.
        path: Path of the model.
        fields: Result of `unhonoured`, not empty.
    """
    named = ", ".join(f"`{name}: {value}`" for name, value in fields.items())
    return (
        f"`path: {path}`: `{key}` does not carry over {named} of its `config.json`, so Megatron would train another"
        " model. Use `fsdp`, which trains any model of transformers."
    )


def _differing(config: PreTrainedConfig) -> Iterator[tuple[str, Any, tuple[str, Any]]]:
    """Yield fields with their value, and the change that makes it the usual one; a dictionary's keys each by itself."""
    sizes = {"num_hidden_layers": config.num_hidden_layers} if hasattr(config, "num_hidden_layers") else {}
    usual = type(config).from_dict(sizes)
    for name, value in config.to_dict().items():
        theirs = getattr(usual, name, MISSING)  # transformers makes nothing of fields that the class does not have
        is_nested = isinstance(getattr(config, name, None), PreTrainedConfig)
        is_free = name in NO_EFFECT or name.startswith("_") or _has_no_window(name, config)
        if theirs is MISSING or value == theirs or is_nested or is_free:
            continue
        if isinstance(value, dict):
            table = theirs if isinstance(theirs, dict) else {}
            for key, each in value.items():
                if each != table.get(key, MISSING) and not (key == "type" and "rope_type" in value):
                    yield f"{name}.{key}", each, (name, _with_another(value, key, table))
        elif not _is_derived(name, value, config):
            yield name, value, (name, theirs)


def _is_derived(name: str, value: Any, config: PreTrainedConfig) -> bool:
    """Tell whether a field's value follows from the others, which are looked at too."""
    rest = {key: each for key, each in config.to_dict().items() if key != name}
    try:
        return bool(getattr(type(config).from_dict(rest), name, MISSING) == value)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, StrictDataclassError):
        return False  # the others do not go without it


def _with_another(table: Mapping[str, Any], key: str, usual: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table with another value of a key: the usual one, another number, or none."""
    rest = {name: each for name, each in table.items() if name not in (key, "type")}  # an older name of `rope_type`
    if key in usual:
        return rest | {key: usual[key]}
    is_number = isinstance(table[key], (int, float)) and not isinstance(table[key], bool)
    return rest | ({key: 2 * table[key] + 1} if is_number else {})


def _has_no_window(name: str, config: PreTrainedConfig) -> bool:
    """Tell whether a field is about sliding windows, of which the model has none."""
    is_full = set(getattr(config, "layer_types", None) or ()) == {"full_attention"}
    return is_full and name in ("layer_types", "sliding_window", "use_sliding_window")


def _changed(config: PreTrainedConfig, place: str, name: str, value: Any) -> PreTrainedConfig:
    changed = copy.deepcopy(config)
    object.__setattr__(getattr(changed, place) if place else changed, name, value)
    return changed


def _is_fixed(name: str, config: PreTrainedConfig) -> bool:
    positions, _, key = name.partition(".")
    table = getattr(config, positions, None)
    return isinstance(table, dict) and table.get("rope_type") == "llama3" and FIXED.get(key, MISSING) == table.get(key)


def _differs(ours: object, other: PreTrainedConfig, describe: Callable[[PreTrainedConfig], object]) -> bool:
    try:
        return describe(other) != ours
    except (ArithmeticError, AttributeError, AssertionError, LookupError, TypeError, ValueError):
        return True  # it looks at the field, since the usual value does not fit the others
