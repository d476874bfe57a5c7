"""Settings of a model and its optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from verl_lightning.options import Options

Packing = Literal["auto", "always", "never"]
ActivationCheckpointing = Literal["none", "full"] | int


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Options, key="lora"):
    """Low-rank adapters beside frozen base weights: ``W + B A * alpha / rank``."""

    rank: int = 16
    """Inner dimension of the adapters."""

    alpha: float = 32.0
    """Scale of the adapters; their product is multiplied by ``alpha / rank``."""

    dropout: float = 0.0
    """Dropout on the adapters' input while training, in ``[0, 1)``."""

    target_modules: str | list[str] = "all-linear"
    """Modules that get adapters: the ends of their names, a regular expression for whole names, or ``all-linear``:
    every linear layer but the output head."""

    exclude_modules: list[str] = field(default_factory=list)
    """Modules that get none although ``target_modules`` names them, by the ends of their names."""

    modules_to_save: list[str] = field(default_factory=list)
    """Modules that are trained whole, by the ends of their names."""

    init: Literal["kaiming", "gaussian"] = "kaiming"
    """Distribution of ``A``; ``B`` starts at zero, so the first policy is the base. Initialisations that change the
    base (PiSSA, OLoRA) are left out: the reference would not be the model at ``path``."""

    adapter_path: str | None = None
    """PEFT folder whose adapter is trained on; null starts a new one."""

    merge_for_rollout: bool = True
    """Send the rollout engine whole weights with the adapters merged in. False sends the adapters alone, which copies
    far less, to an engine that takes them: `VLLMRollout`, which reads the base from ``path`` by itself."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"`lora.rank` must be at least 1, got {self.rank}.")
        if self.alpha <= 0:
            raise ValueError(f"`lora.alpha` must be above 0 (at 0 the adapters do nothing), got {self.alpha}.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"`lora.dropout` must lie in [0, 1), got {self.dropout}.")
        if self.adapter_path is not None and self.init != "kaiming":
            raise ValueError(f"`lora.init: {self.init}` has no effect on the adapter of `lora.adapter_path`. Drop one.")
        if not self.merge_for_rollout and self.modules_to_save:
            raise ValueError(
                "`lora.merge_for_rollout: false` sends adapters alone, but `lora.modules_to_save` trains whole modules"
                f" ({', '.join(self.modules_to_save)}), which engines don't take. Drop one."
            )


def check_no_rollout(lora: LoraConfig | None, name: str) -> None:
    """Refuse a rollout's option for a model that samples nothing.

    Args:
        lora: Adapters of the model.
        name: Key of these adapters in the user's settings.

    Raises:
        ValueError: If the option is set.
    """
    if lora is not None and not lora.merge_for_rollout:
        raise ValueError(f"`{name}.merge_for_rollout` has no effect: this model samples nothing. Leave it out.")


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Options, key="optim"):
    """AdamW and its learning-rate schedule; a step is one ``trainer.global_step``."""

    lr: float = 1e-6
    """Peak learning rate."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""

    eps: float = 1e-8
    """Constant added to AdamW's denominator."""

    weight_decay: float = 0.01
    """Decoupled weight decay of the weights in training."""

    decay_norms_and_biases: bool = False
    """Decay norms and biases too, as verl does under FSDP; False spares them, as TRL and Megatron do."""

    max_grad_norm: float = 1.0
    """Largest global norm of the gradients, to which larger ones are scaled down; 0 does not clip."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay after warm-up; all but ``constant`` end at ``trainer.max_steps``."""

    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly from 0."""

    min_lr_ratio: float = 0.0
    """Learning rate at the end of the decay as a share of ``lr``, in ``[0, 1]``."""

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ValueError(f"`optim.lr` must be above 0 and finite, got {self.lr}.")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"`optim.betas` must lie in [0, 1), got {self.betas}.")
        if not 0 <= self.eps < math.inf:
            raise ValueError(f"`optim.eps` must not be negative, and be finite, got {self.eps}.")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"`optim.weight_decay` must not be negative, and be finite, got {self.weight_decay}.")
        if self.max_grad_norm < 0:
            raise ValueError(f"`optim.max_grad_norm` must not be negative, got {self.max_grad_norm}.")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ValueError(f"`optim.min_lr_ratio` must lie in [0, 1], got {self.min_lr_ratio}.")
        if self.warmup_steps < 0:
            raise ValueError(f"`optim.warmup_steps` must not be negative, got {self.warmup_steps}.")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Options):
    """A causal language model, with or without a vision tower, and how it is trained."""

    path: str
    """Folder or hub name of a Hugging Face causal language model."""

    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer and learning-rate schedule."""

    lora: LoraConfig | None = None
    """Train adapters instead of the weights; null trains all weights."""

    train_vision_tower: bool = False
    """Train the weights that read images too: the vision tower and its projection. False freezes them."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the stored weights. A learning rate near 1e-6 is lost in bfloat16: prefer float32 with
    ``trainer.precision: bf16-mixed``."""

    attn_implementation: Literal["auto", "sdpa", "eager", "varlen", "flash_attention_2", "flex_attention"] = "auto"
    """Attention kernel: one of transformers', or ``varlen``, torch's for sequences of unequal lengths. ``auto`` is
    ``varlen`` on GPUs that have it, else ``sdpa``; and ``eager`` for models that have neither, or that cap their
    attention scores, as Gemma-2 does, which the others leave out."""

    packing: Packing = "auto"
    """Packing of sequences in one row without padding: the same scores, sooner. ``auto`` packs models that are tested
    with it if the attention kernel knows where sequences end; ``always`` refuses a model that can't be packed."""

    activation_checkpointing: ActivationCheckpointing = "none"
    """Blocks whose activations are not kept but computed again in the backward pass: ``none``, ``full`` for all, with
    about a third more compute, or a number k of at least 2 for every k-th block."""

    def __post_init__(self) -> None:
        if self.train_vision_tower and self.lora is not None:
            raise ValueError("`train_vision_tower` trains whole weights, but `lora` trains adapters alone. Drop one.")
        which = self.activation_checkpointing
        if which not in ("none", "full") and (isinstance(which, bool) or not isinstance(which, int) or which < 2):
            raise ValueError(
                "`activation_checkpointing` must be `none`, `full`, or a number k of at least 2 for every k-th block,"
                f" got {which!r}."
            )
