"""Builds Megatron's models through mbridge, and takes weights to them and back.

mbridge 0.15 is older than transformers 5, and knows the names of TransformerEngine's fused layers alone. So it is shown
a config in the form that it reads, and each weight under the name that it knows.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from transformers import PretrainedConfig

from verl_lightning.models.config import ModelConfig
from verl_lightning.models.pretrained import read_config
from verl_lightning.models.scorer import Head
from verl_lightning.needs import installed_version
from verl_lightning.strategies.megatron.honoured import comparable, sentence, unhonoured
from verl_lightning.strategies.megatron.provider import ModelSettings, build_pieces, checked_overrides, provider_fields

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

VERSION = "0.15."

MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Those whose weights and scores are compared with transformers' in `test_checks.py`."""

ALWAYS = {"norm_topk_prob": True}
"""Settings that all models of mbridge have, whatever their configs say."""

FUSED_NAMES = (
    (r"\.to_wrap\.", "."),
    (r"\.input_layernorm\.weight", ".self_attention.linear_qkv.layer_norm_weight"),
    (r"\.mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight", r".mlp.experts.\2.weight\1"),
)
"""From Megatron's own layers, and those with adapters, to TransformerEngine's."""


class MBridge:
    """mbridge's map for one model, and the shape that it gives it.

    Args:
        config: Options of the model and of its training.
        head: Kind of scores that the model gives: those of a policy, of a critic, or both.
        settings: Settings of the strategy.

    Raises:
        MisconfigurationException: If mbridge is missing or of another version.
        ValueError: If it can't map the model, with the reason.
    """

    def __init__(self, config: ModelConfig, head: Head, settings: ModelSettings) -> None:
        import_mbridge()
        from mbridge import AutoBridge

        self.path = config.path
        self.head = head
        self._hf = readable_config(config.path)
        if unknown := unhonoured(read_config(config.path), _describe, always=ALWAYS):
            raise ValueError(sentence("megatron.bridge: mbridge", config.path, unknown))
        self._is_tied = bool(read_config(config.path).tie_word_embeddings) and head != "value"
        tensor = settings.sizes.tensor
        self._bridge = AutoBridge.from_config(
            self._hf,
            dtype=torch.bfloat16 if settings.is_bf16 else torch.float32,
            make_vocab_size_divisible_by=tensor,
        )
        self._bridge.vocab_size = self._hf.vocab_size
        self._bridge.padded_vocab_size = -(-self._hf.vocab_size // tensor) * tensor
        ours = provider_fields(config, settings, self.transformer)
        self._layers: Callable[..., Any] = ours.get("transformer_layer_spec", _fused_layers)
        known = {field.name for field in fields(type(self.transformer))}
        ours = {name: value for name, value in ours.items() if name in known}
        self._bridge.set_extra_args(**ours, **checked_overrides(self.transformer, settings.transformer))

    @property
    def transformer(self) -> TransformerConfig:
        """Megatron's config."""
        config: TransformerConfig = self._bridge.config
        return config

    def build(self) -> list[nn.Module]:
        """This rank's pieces of the model, with the folder's weights. Collective."""
        pieces = build_pieces(self._provide, self.transformer.virtual_pipeline_model_parallel_size or 1)
        with torch.no_grad():
            self._bridge.load_weights([self._shown(piece, loads=True) for piece in pieces], self.path)
        return pieces

    def export(self, pieces: list[nn.Module]) -> Iterator[tuple[str, Tensor]]:
        """Each whole weight by its name on the hub, without adapters and heads of ours. Collective."""
        weights: Iterator[tuple[str, Tensor]] = self._bridge.export_weights(
            [self._shown(piece, loads=False) for piece in pieces]
        )
        return weights

    def _provide(self, *, pre_process: bool, post_process: bool, vp_stage: int | None) -> nn.Module:
        from megatron.core.models.gpt.gpt_model import GPTModel

        config: Any = self.transformer
        stage = [vp_stage] if "vp_stage" in inspect.signature(self._layers).parameters else []
        config.vocab_size = self._hf.vocab_size
        config.share_embeddings_and_output_weights = self._is_tied
        piece: nn.Module = GPTModel(
            config=config,
            transformer_layer_spec=self._layers(config, *stage),
            vocab_size=self._bridge.padded_vocab_size,
            max_sequence_length=self._hf.max_position_embeddings,
            position_embedding_type="rope",
            rotary_base=self._hf.rope_theta,
            share_embeddings_and_output_weights=self._is_tied,
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
        )
        return piece

    def _shown(self, piece: nn.Module, *, loads: bool) -> _Shown:
        named = {}
        for name, parameter in piece.named_parameters():
            if ".adapter." in name or name == "value_head.weight":
                continue
            if name == "output_layer.weight" and (self.head == "value" or (self._is_tied and not loads)):
                continue  # ours, or a copy of the embedding on the last stage
            if name == "output_layer.weight" and self._is_tied:
                name = "embedding.word_embeddings.weight"
            named[self._name(name)] = parameter
        return _Shown(piece, named)

    def _name(self, name: str) -> str:
        for pattern, fused in FUSED_NAMES:
            name = re.sub(pattern, fused, name)
        if self.transformer.num_moe_experts is None:
            name = name.replace(".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight")
        return name


def _fused_layers(config: TransformerConfig, vp_stage: int | None) -> Any:
    """Return the specification of TransformerEngine's layers."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)


class _Shown:
    """A piece of a model as mbridge looks at it.

    Args:
        piece: Piece of Megatron's model.
        named: Weights of the piece by mbridge's names.
    """

    def __init__(self, piece: Any, named: dict[str, nn.Parameter]) -> None:
        self.decoder = piece.decoder
        self._named = named

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The weights, in order."""
        yield from self._named.items()

    def state_dict(self) -> dict[str, nn.Parameter]:
        """The weights themselves, to be written to."""
        return dict(self._named)


def import_mbridge() -> None:
    """See that mbridge is there.

    Raises:
        MisconfigurationException: If it is missing or of another version.
    """
    version = installed_version("mbridge")
    if not version.startswith(VERSION):
        raise MisconfigurationException(
            f"`megatron.bridge: mbridge` needs `mbridge` {VERSION}x, found {version}. Run `pip install --no-deps"
            " mbridge==0.15.1`, or leave the option out: Megatron-Bridge maps more models."
        )


def readable_config(path: str) -> PretrainedConfig:
    """A model's config with `rope_theta` where it was before transformers 5; ties are left to us.

    Raises:
        ValueError: If mbridge would build another model than transformers does.
    """
    config = read_config(path)
    obstacle = _obstacle(config)
    if obstacle is not None:
        raise ValueError(
            f"`megatron.bridge: mbridge` can't map `path: {path}`: {obstacle}. Use `bridge: megatron_bridge`."
        )
    return _as_before(config)


def _as_before(config: PretrainedConfig) -> PretrainedConfig:
    """Return a config as transformers had it before its version 5."""
    config = copy.deepcopy(config)
    config.rope_theta = config.rope_parameters["rope_theta"]
    # mbridge writes ties into a table that all models of a class share, tied or not.
    config.tie_word_embeddings = False
    return config


def _describe(config: PretrainedConfig) -> object:
    """Return all that mbridge makes of a model's config, and what `MBridge` reads there itself, to be compared."""
    from mbridge import AutoBridge

    bridge = AutoBridge.from_config(_as_before(config), dtype=torch.float32)
    own = (config.rope_parameters["rope_theta"], config.vocab_size, config.tie_word_embeddings)
    return comparable(vars(bridge.config)), own


def _obstacle(config: PretrainedConfig) -> str | None:
    if config.model_type not in MODEL_TYPES:
        return f"a `{config.model_type}` was not compared with transformers; {', '.join(MODEL_TYPES)} were"
    kind = config.rope_parameters.get("rope_type", "default")
    if kind != "default":
        return f"it takes rotary positions of the type `{kind}` for plain ones"
    if getattr(config, "use_sliding_window", False):
        return "it knows no sliding window"
    if getattr(config, "mlp_bias", False):
        return "it knows no biases of dense layers (`mlp_bias`)"
    if config.model_type == "qwen3_moe" and not config.norm_topk_prob:
        return "it always normalises the weights of the chosen experts (`norm_topk_prob`)"
    if getattr(config, "mlp_only_layers", None) or getattr(config, "decoder_sparse_step", 1) != 1:
        return "it knows no dense layers among those with experts"
    return None
