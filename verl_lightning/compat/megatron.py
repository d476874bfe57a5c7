"""Work-arounds for Megatron-Core 0.19 and Megatron-Bridge 0.6, and their private names."""

from __future__ import annotations

import contextlib
import importlib.machinery
import io
import logging
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from verl_lightning.compat.patching import replaced

RATES = ("max_lr", "min_lr")
"""Settings of Megatron's own scheduler, which is not used, in a group of parameters. Megatron-Core looks for groups in
a checkpoint by them too, so that none would be found once the learning rate is another."""

READERS = ("serialization", "strategies.torch")
"""Modules of `megatron.core.dist_checkpointing` that read checkpoints by `_get_filesystem_reader`."""


def import_bridge_without_transformer_engine() -> None:
    """Import Megatron-Bridge, which names TransformerEngine's classes meanwhile, though it can do without them.

    It would also tell at length what it could not import.
    """
    with warnings.catch_warnings(), _quiet_logs():
        warnings.simplefilter("ignore")
        # First Megatron-Core, so that it knows that there is no TransformerEngine.
        import megatron.core.extensions.transformer_engine
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.optimizer

        name = "transformer_engine"
        package, inner = types.ModuleType(name), types.ModuleType(f"{name}.pytorch")
        package.__dict__.update(__version__="0.0.0", __path__=[], pytorch=inner)
        inner.__dict__["ops"] = types.SimpleNamespace(Sequential=object)
        for module in (package, inner):
            module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
            sys.modules[module.__name__] = module
        try:
            import megatron.bridge
        finally:
            del sys.modules[package.__name__], sys.modules[inner.__name__]
        import megatron.bridge.peft.utils

        megatron.bridge.peft.utils.HAVE_TE = False


@contextmanager
def _quiet_logs() -> Iterator[None]:
    logging.getLogger("megatron").setLevel(logging.ERROR)
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def all_process_groups() -> list[Any]:
    """Every process group that Megatron-Core has made, which its `destroy_model_parallel` only forgets.

    None stands for torch's own group of all ranks.
    """
    from megatron.core import parallel_state

    return list(dict.fromkeys(parallel_state._global_process_group_list or ()))


def set_process_groups(provider: Any) -> None:
    """Give Megatron-Bridge's provider the process groups that run: it makes some of its own where it builds a model."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()


@contextmanager
def progress_hidden() -> Iterator[None]:
    """Keep Megatron-Bridge from drawing a progress bar, which it does on the standard output."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def load_weights(bridge: Any, source: Any, pieces: list[nn.Module]) -> None:
    """Have Megatron-Bridge take weights from memory, where its `load_hf_weights` takes them from a folder. Collective.

    Args:
        bridge: Bridge of the model.
        source: The weights, as the bridge looks them up.
        pieces: This rank's pieces of the model.
    """
    with progress_hidden():
        bridge._model_bridge.load_weights_hf_to_megatron(source, pieces)


def item_writer() -> types.ModuleType:
    """The module of Megatron-Core that writes a checkpoint's items by torch's private `_write_item`."""
    return import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")


@contextmanager
def reading_by(reader: Any) -> Iterator[None]:
    """Have Megatron-Core read a checkpoint folder by this reader; its own unpickles whatever it reads."""
    with ExitStack() as stack:
        for name in READERS:
            module = import_module(f"megatron.core.dist_checkpointing.{name}")
            stack.enter_context(replaced(module, "_get_filesystem_reader", lambda *_, **__: reader))
        yield


def adapter_as_one(name: str, part: Any) -> Any:
    """Have an adapter's matrix stored as one tensor.

    Megatron-Bridge stores those beside `linear_fc1` in halves, as if each held a gate and an up-projection, though each
    belongs to one of them: read by another number of tensor-parallel ranks, their rows would be in another order.
    `test_adapters_go_on_with_other_tensor_parallel_ranks` fails where that is not mended.

    Args:
        name: Name of the weight.
        part: Megatron's description of how the weight is stored.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
    from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint

    if not isinstance(part, ShardedTensorFactory) or ".adapter." not in name:
        return part
    half: Any = part.build()[0]
    layers = tuple((axis, half.global_offset[axis], half.global_shape[axis]) for axis in range(half.prepend_axis_num))
    return make_tp_sharded_tensor_for_checkpoint(
        part.data, part.key, replica_id=part.replica_id, prepend_offsets=layers
    )


def keep_buckets_apart(part: Any) -> None:
    """Have a distributed optimizer's tensors lie where its weights are looked for when a checkpoint is written.

    Megatron-Core joins the buckets of a buffer without the padding at their ends, but cuts weights out at places that
    count it. Where a bucket is padded, all weights after it would be saved shifted: those of a last stage with a tied
    embedding, which has a bucket of its own, or any after the first `ddp.bucket_size` of odd shapes.
    `test_a_run_on_stages_is_resumed_to_the_last_bit` fails where that is not mended.

    Args:
        part: One of Megatron's optimizers.
    """
    join = part.get_parameter_state_dp_zero

    def join_with_padding(**options: bool) -> Any:
        state = join(**options)
        for index, buffer in enumerate(part.buffers if state is not None else ()):
            for tensors in state[index].values():
                slots = {name: _with_padding(value, buffer) for name, value in tensors.items() if name in slot_names}
                tensors.update(slots)
        return state

    slot_names = ("param", *part.optimizer_state_keys)
    part.get_parameter_state_dp_zero = join_with_padding


def _with_padding(joined: Tensor, buffer: Any) -> Tensor:
    """A tensor of a whole buffer, from one of its buckets without what pads them."""
    padded, start = joined.new_zeros(buffer.numel), 0
    for bucket in buffer.buckets:
        size = bucket.numel_unpadded
        padded[bucket.offset : bucket.offset + size] = joined[start : start + size]
        start += size
    return padded


def load_optimizer_part(part: Any, state: dict[str, Any]) -> None:
    """Load the state of one optimizer, with a step for each weight where Adam is torch's.

    Megatron-Core hands all weights one tensor for it, in which torch's Adam counts, and looks for it among the
    checkpoint's tensors, where it is not.

    Args:
        part: One of Megatron's optimizers.
        state: State that a checkpoint holds for the optimizer.
    """
    tensors = state.pop("param_state", None)
    saved = state.get("optimizer", state)
    forget_rates(saved["param_groups"])
    found = {group["wd_mult"]: group for group in saved["param_groups"]}
    saved["param_groups"] = [  # in older checkpoints norms and biases have no group of their own
        found.get(own["wd_mult"], saved["param_groups"][0]) | {name: own[name] for name in ("wd_mult", "params")}
        for own in part.optimizer.state_dict()["param_groups"]
    ]
    part.load_state_dict(state)
    slots_of_all = [slots for slots in part.optimizer.state.values() if "step" in slots]
    steps = [slots.pop("step") for slots in slots_of_all]
    if tensors is not None:
        part.load_parameter_state_from_fully_reshardable(tensors)
    for slots, step in zip(slots_of_all, steps, strict=True):
        slots["step"] = step.clone() if isinstance(step, Tensor) else step


def leave_out_groups(state: dict[str, Any]) -> None:
    """Ask a checkpoint for tensors alone: lists of groups are joined with its own, which may be of another length.

    Args:
        state: State of one optimizer, of sharded tensors.
    """
    plain = state.get("optimizer", state)
    if isinstance(plain, dict):
        plain.pop("param_groups", None)


def forget_rates(groups: list[dict[str, Any]]) -> None:
    """Leave `RATES` out of what tells groups of parameters apart."""
    for group in groups:
        for name in RATES:
            group.pop(name, None)


def allocate_optimizer_state(part: Any) -> None:
    """Make Adam's state where no step has made it: a checkpoint is read into it, with a step that Megatron leaves out.

    Args:
        part: One of Megatron's optimizers.
    """
    if part.optimizer is None:
        return
    part.init_state_fn(part.optimizer, part.config)
    for slots in part.optimizer.state.values():
        slots.setdefault("step", torch.tensor(0.0))


def fuse_weight_gradients(chunk: nn.Module) -> None:
    """Have TransformerEngine's layers add weight gradients to Megatron's own buffers, within the matrix product.

    Megatron's switch for it, ``gradient_accumulation_fusion``, wants Apex for the layers that are not
    TransformerEngine's.

    Args:
        chunk: Piece of a model that is wrapped in Megatron's data parallelism, with gradients in float32.
    """
    layers: list[Any] = [module for module in chunk.modules() if hasattr(module, "fuse_wgrad_accumulation")]
    for layer in layers:
        layer.fuse_wgrad_accumulation = any(p.requires_grad for p in layer.parameters(recurse=False))
