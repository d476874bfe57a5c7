"""Attention for sequences packed in a row: which kernel a model gets, and whether it can be packed at all.

Our own kernel, `varlen`, is torch's variable-length attention, registered with transformers by its public interface. It
reads where sequences begin from ``cu_seq_lens_q``, which a packed batch carries once for all layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from verl_lightning.compat.torch import varlen_options
from verl_lightning.compat.transformers import (
    attention_of,
    goes_through_attention_interface,
    has_state,
    takes_other_kernels,
)
from verl_lightning.models.sequence_parallel import SequencePart
from verl_lightning.needs import missing_attention

VARLEN: Final = "varlen"

UNTESTED = "it was not tested; set `packing: always` to try it"
"""Reason not to pack a model that could be packed."""

PACKS_BY_DEFAULT = frozenset(
    {"granite", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3"}
)
"""Model types whose packed scores are tested to be their padded ones."""

_sdpa: Callable[..., tuple[Tensor, None]] = AttentionInterface()["sdpa"]  # type: ignore[no-untyped-call]

_GROUPED = varlen_options()

_SCORE_CHANGES = {"softcap": "capped attention scores", "s_aux": "attention sinks"}

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def attention_options(name: str, config: PreTrainedConfig) -> str | dict[str, str] | None:
    """Returns transformers' ``attn_implementation`` for a model: `best_attention`, for its tokens alone if `varlen`.

    A vision tower looks both ways within an image, which our causal kernel would not.

    Args:
        name: The user's ``attn_implementation``.
        config: Config of the model.
    """
    kernel, text = best_attention(name, config), config.get_text_config()
    if kernel != VARLEN or text is config:
        return kernel
    return {key: VARLEN for key in config.sub_configs if getattr(config, key, None) is text}


def best_attention(name: str, config: PreTrainedConfig) -> str | None:
    """Returns the kernel for a model, or None for the one that transformers chooses, `sdpa` where the model has it.

    ``auto`` is `varlen` on a GPU that has it and for a model that it fits, and `eager` for a model that caps its
    attention scores, which `sdpa` and `varlen` would leave out in silence.

    Args:
        name: The user's ``attn_implementation``.
        config: Config of the model.

    Raises:
        ValueError: If the kernel's package is not installed, or it would compute another model.
    """
    if (complaint := missing_attention(name)) is not None:
        raise ValueError(complaint)
    text = config.get_text_config()
    if (cap := getattr(text, "attn_logit_softcapping", None)) is not None:
        if name in ("sdpa", VARLEN):
            raise ValueError(
                f"`attn_implementation: {name}` leaves out the cap on attention scores (`attn_logit_softcapping:"
                f" {cap}`) of a `{text.model_type}`. Set `auto` or `eager`, or `flex_attention` for long sequences."
            )
        return "eager" if name == "auto" else name
    if name != "auto":
        return name
    return VARLEN if has_varlen_kernel() and takes_other_kernels(config) else None


def has_varlen_kernel() -> bool:
    """Tells whether torch's variable-length attention runs on this machine's GPU: Ampere or newer."""
    return torch.cuda.is_available() and torch.version.cuda is not None and torch.cuda.get_device_capability() >= (8, 0)


def knows_boundaries(attention: str | None) -> bool:
    """Tells whether a kernel computes nothing for pairs of tokens of different sequences; `sdpa` masks them instead."""
    return attention in (VARLEN, "flash_attention_2", "flex_attention")


def packing_obstacle(backbone: PreTrainedModel) -> str | None:
    """Returns the reason why a model cannot score sequences packed in a row; None if it can."""
    config = backbone.config.get_text_config()
    unknown = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if has_state(backbone) or unknown:
        kinds = f" ({', '.join(sorted(unknown))})" if unknown else ""
        return f"its layers{kinds} would carry a state from one sequence to the next"
    if not goes_through_attention_interface(backbone):
        return "it does not go through transformers' attention interface"
    if "position_ids" not in inspect.signature(backbone.base_model.forward).parameters:
        return "it takes no `position_ids`, so positions cannot restart"
    if attention_of(backbone) == VARLEN and getattr(config, "attn_logit_softcapping", None):
        return "the `varlen` kernel cannot cap attention logits; use `attn_implementation: flex_attention`"
    return None


def varlen_attention(
    module: nn.Module,
    query: Float[Tensor, "batch heads sequence dim"],
    key: Float[Tensor, "batch kv_heads sequence dim"],
    value: Float[Tensor, "batch kv_heads sequence dim"],
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: Int[Tensor, " sequences_plus_1"] | None = None,
    max_length_q: int | None = None,
    sequence_part: SequencePart | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each of the sequences that lie in one row; see transformers' ``AttentionInterface``.

    Sequences of equal length go through `scaled_dot_product_attention`, which has the faster kernels; ragged ones
    through torch's variable-length kernel in half precision on a GPU, and under a block-diagonal mask elsewhere.

    Args:
        module: The attention layer.
        query: Queries of one row, rotated already.
        key: Keys, likewise; fewer heads under grouped queries.
        value: Values, of as many heads as the keys.
        attention_mask: Mask of a padded batch; not read if the batch is packed.
        scaling: Factor of the logits; None is ``dim ** -0.5``.
        dropout: Dropout of attention weights; must be 0 in a packed batch.
        sliding_window: Tokens that each one sees, itself included; None is all before it.
        cu_seq_lens_q: Start of each sequence, and the end; None where the batch is padded, as in generation.
        max_length_q: Tokens of the longest sequence.
        sequence_part: This rank's run of the tokens, where ranks share the row; the call is then collective.
        others: Further options that transformers gives its kernels.

    Returns:
        ``[batch, sequence, heads, dim]``, and no attention weights.

    Raises:
        ValueError: If the model changes its attention scores in a way that these kernels don't know, or if a packed
            batch has dropout.
    """
    check_scores(module, others)
    if cu_seq_lens_q is None or max_length_q is None:
        options = {"scaling": scaling, "dropout": dropout, "sliding_window": sliding_window} | others
        return _sdpa(module, query, key, value, attention_mask, **options)
    if dropout:
        raise ValueError("packed sequences have no attention dropout: set the model's `attention_dropout` to 0.")
    if torch.is_autocast_enabled(query.device.type):  # which knows no variable-length kernel; rotation makes float32
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    if sequence_part is not None:
        query, key, value = sequence_part.exchange_for_heads(query, key, value)
    output = _packed_attention(query, key, value, cu_seq_lens_q, max_length_q, scaling, sliding_window)
    return output if sequence_part is None else sequence_part.exchange_for_tokens(output), None


def check_scores(module: nn.Module, options: Mapping[str, Any]) -> None:
    """Refuses a layer that caps its attention scores or adds sinks to them, which the `varlen` kernel would leave out.

    Raises:
        ValueError: If the layer does either; names the setting to change.
    """
    for name, what in _SCORE_CHANGES.items():
        if options.get(name) is not None:
            raise ValueError(
                f"`{type(module).__name__}` has {what} (`{name}`), which the `{VARLEN}` kernel (`auto` on GPUs) leaves"
                " out. Set the model's `attn_implementation: flex_attention` or `eager`."
            )


def block_diagonal_mask(
    cu_seq_lens: Int[Tensor, " sequences_plus_1"], length: int, *, sliding_window: int | None = None
) -> Bool[Tensor, "length length"]:
    """Makes a mask, True where a token (row) sees another (column): its own sequence's, before it, within its window.

    Args:
        cu_seq_lens: Start of each sequence, and the end of the last.
        length: Tokens of all sequences together.
        sliding_window: Tokens that each one sees, itself included; None is all before it.
    """
    index = torch.arange(length, device=cu_seq_lens.device)
    sequence = torch.bucketize(index, cu_seq_lens[1:], right=True)
    distance = index[:, None] - index[None, :]
    is_seen = (sequence[:, None] == sequence[None, :]) & (distance >= 0)
    return is_seen if sliding_window is None else is_seen & (distance < sliding_window)


def _packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_lens: Tensor,
    max_length: int,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """Computes attention by the fastest kernel for these lengths, this type and this device."""
    count, sequence = cu_seq_lens.shape[0] - 1, query.shape[2]
    window = sliding_window if sliding_window is not None and sliding_window < max_length else None
    if window is None and max_length * count == sequence:
        return _equal_attention(query, key, value, count, scaling)
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        return _ragged_attention(query, key, value, cu_seq_lens, max_length, scaling, window)
    mask = block_diagonal_mask(cu_seq_lens, sequence, sliding_window=window)
    output = F.scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=True)
    return output.transpose(1, 2)


def _equal_attention(query: Tensor, key: Tensor, value: Tensor, count: int, scaling: float | None) -> Tensor:
    """Computes attention in one causal call over ``count`` sequences of one length."""
    queries, keys, values = (x.reshape(x.shape[1], count, -1, x.shape[3]).transpose(0, 1) for x in (query, key, value))
    output = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scaling, enable_gqa=True)
    return output.transpose(1, 2).flatten(0, 1).unsqueeze(0)


def _ragged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_lens: Tensor,
    max_length: int,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    output: Any = varlen_attn(
        query.squeeze(0).transpose(0, 1),
        key.squeeze(0).transpose(0, 1),
        value.squeeze(0).transpose(0, 1),
        cu_seq_lens,
        cu_seq_lens,
        max_length,
        max_length,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        **_GROUPED,
    )
    return cast(Tensor, output.unsqueeze(0))


AttentionInterface.register(VARLEN, varlen_attention)
AttentionMaskInterface.register(VARLEN, AttentionMaskInterface()["sdpa"])  # type: ignore[no-untyped-call]
