"""A Hugging Face model that scores response tokens: log-probabilities, values, or both from one trunk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float, Int
from lightning.fabric.utilities import rank_zero_info
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from verl_lightning.functional.log_probs import log_probs_and_entropy, token_log_probs, token_sum_squared_probs
from verl_lightning.models.config import ModelConfig
from verl_lightning.models.hf_folder import VALUE_HEAD_FILE
from verl_lightning.models.lora import CONFIG_FILE, adapters_off, add_adapters
from verl_lightning.types import Scores, TokenBatch

Head = Literal["policy", "value", "policy_and_value"]


class TokenScorer(nn.Module):
    """Scores each response token of a batch.

    Args:
        backbone: A causal language model, or its trunk alone for the head ``value``.
        value_head: Maps hidden states to values; None for a policy alone.
        head: What is scored.
    """

    def __init__(self, backbone: PreTrainedModel, value_head: nn.Linear | None, head: Head) -> None:
        super().__init__()
        self.backbone = backbone
        self.value_head = value_head
        self.head = head
        self.scores_squares = False  # set by modules whose advantages read `Scores.sum_squared_probs`

    def forward(self, batch: TokenBatch, with_entropy: bool = False) -> Scores:
        """Scores of the response tokens, each predicted from the position before it.

        Args:
            batch: On the model's device.
            with_entropy: Also return the entropy of each token's distribution.
        """
        num_positions = batch.response_mask.shape[1] + 1
        inputs = {
            "input_ids": batch.input_ids,
            "attention_mask": batch.attention_mask,
            "position_ids": position_ids(batch.attention_mask),
            "use_cache": False,
        }
        if self.head == "value":
            hidden = self.backbone(**inputs).last_hidden_state[:, -num_positions:-1]
            return Scores(values=self._values(hidden))
        needs_hidden = self.value_head is not None
        output = self.backbone(**inputs, logits_to_keep=num_positions, output_hidden_states=needs_hidden)
        values = self._values(output.hidden_states[-1][:, -num_positions:-1]) if needs_hidden else None
        logits = output.logits[:, :-1]
        if not with_entropy:
            log_probs = token_log_probs(logits, batch.response_ids, temperature=batch.temperature)
            return Scores(log_probs=log_probs, values=values)
        log_probs, entropy = log_probs_and_entropy(logits, batch.response_ids, temperature=batch.temperature)
        if self.scores_squares and not torch.is_grad_enabled():
            squares = token_sum_squared_probs(logits, temperature=batch.temperature)
            return Scores(log_probs=log_probs, entropy=entropy, sum_squared_probs=squares, values=values)
        return Scores(log_probs=log_probs, entropy=entropy, values=values)

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Within it the base weights alone answer; a no-op for a model without adapters."""
        with adapters_off(self.backbone):
            yield

    def _values(self, hidden: Float[Tensor, "batch response hidden"]) -> Float[Tensor, "batch response"]:
        assert self.value_head is not None
        values: Tensor = self.value_head(hidden)
        # A copy: FSDP2 hangs its backward hooks on what is returned, and cannot on a view.
        return values.squeeze(-1).to(torch.float32, copy=True)


def position_ids(attention_mask: Tensor) -> Int[Tensor, "batch sequence"]:
    """Positions that count real tokens only, so that left padding moves nothing."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def build_scorer(config: ModelConfig, head: Head, *, trainable: bool) -> TokenScorer:
    """Load a model from its Hugging Face folder and give it the heads it needs.

    Args:
        config: Which model, and how it is trained.
        head: What it scores.
        trainable: False freezes every weight.

    Raises:
        ValueError: If there is no model at ``config.path``.
    """
    backbone = load_backbone(config, _auto_class(head))
    value_head = None if head == "policy" else make_value_head(backbone)
    if value_head is not None:
        read_value_head(value_head, Path(config.path))
    return _assemble(backbone, value_head, config, head, trainable)


def build_skeleton(config: ModelConfig, head: Head, *, trainable: bool) -> TokenScorer:
    """The scorer that `build_scorer` builds, on the meta device: no weight is read, none takes memory.

    Args:
        config: Which model, and how it is trained.
        head: What it scores.
        trainable: False freezes every weight.
    """
    if config.lora is not None:
        config = replace(config, lora=replace(config.lora, adapter_path=None))
    with torch.device("meta"):
        backbone = _auto_class(head).from_config(  # type: ignore[no-untyped-call]
            AutoConfig.from_pretrained(config.path),
            dtype=getattr(torch, config.dtype),
            attn_implementation=config.attn_implementation,
        )
        value_head = None if head == "policy" else make_value_head(backbone)
        return _assemble(backbone, value_head, config, head, trainable)


def _auto_class(head: Head) -> type[AutoModel] | type[AutoModelForCausalLM]:
    return AutoModel if head == "value" else AutoModelForCausalLM


def _assemble(
    backbone: PreTrainedModel, value_head: nn.Linear | None, config: ModelConfig, head: Head, trainable: bool
) -> TokenScorer:
    if config.lora is not None and trainable:
        backbone = add_adapters(
            backbone, config.lora, task_type="FEATURE_EXTRACTION" if head == "value" else "CAUSAL_LM"
        )
    if config.gradient_checkpointing and trainable:
        backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    scorer = TokenScorer(backbone, value_head, head)
    return scorer.train() if trainable else scorer.requires_grad_(False).eval()


def make_value_head(backbone: PreTrainedModel) -> nn.Linear:
    """A value head for a trunk: zeros, since a random one makes the first updates huge."""
    head = nn.Linear(backbone.config.get_text_config().hidden_size, 1, bias=False, dtype=backbone.dtype)
    nn.init.zeros_(head.weight)
    return head


def read_value_head(head: nn.Linear, folder: Path) -> None:
    """Go on from the value head in a model's folder, if there is one."""
    if (file := folder / VALUE_HEAD_FILE).is_file():
        head.load_state_dict(load_file(file))
        rank_zero_info(f"The value head goes on from `{file}`.")


def load_backbone(config: ModelConfig, auto_class: type[AutoModel] | type[AutoModelForCausalLM]) -> PreTrainedModel:
    """Load the weights with one of transformers' auto classes.

    Raises:
        ValueError: If there is no model at ``config.path``.
    """
    if (adapter := Path(config.path) / CONFIG_FILE).is_file():
        base = json.loads(adapter.read_text()).get("base_model_name_or_path")
        raise ValueError(
            f"`path: {config.path}` is a PEFT adapter. Set `path` to its base (`{base}`) and `lora.adapter_path` to it,"
            " or merge it first: `verl-export --to merged`."
        )
    try:
        model: PreTrainedModel = auto_class.from_pretrained(
            config.path, dtype=getattr(torch, config.dtype), attn_implementation=config.attn_implementation
        )
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"no model could be loaded from `path: {config.path}` ({reason})."
            " Give a folder written by `save_pretrained`, or a name on the Hugging Face hub."
        ) from error
    return model
