"""Megatron's optimizer as a torch optimizer, with clipping and skipping decided before the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from verl_lightning.compat import megatron as compat
from verl_lightning.models.config import OptimConfig
from verl_lightning.strategies.weight_decay import decay_of_spared, norms_and_biases

if TYPE_CHECKING:
    from megatron.core.optimizer import ChainedOptimizer


class MegatronOptimizer(torch.optim.Optimizer):
    """Optimizer that Lightning and learning-rate schedules see; Megatron's is underneath and shares its groups.

    Args:
        inner: Megatron's optimizer.
        chunks: The wrapped pieces of the model, which hold the gradients.
    """

    def __init__(self, inner: ChainedOptimizer, chunks: list[nn.Module]) -> None:
        self.inner = inner
        self.chunks = chunks
        self._skips = False
        parameters = [p for chunk in chunks for p in chunk.parameters() if p.requires_grad]
        super().__init__(parameters or [torch.zeros(())], {"lr": 0.0})
        self.param_groups = inner.param_groups

    def prepare(self, max_norm: float, scale: float) -> Tensor:
        """Scale and clip the gradients, or have the next step skipped if one is not finite or all are 0. Collective.

        Args:
            max_norm: Largest global norm after scaling; 0 does not clip.
            scale: Factor on the gradients.

        Returns:
            The norm after scaling and before clipping, over all ranks.
        """
        self.inner.prepare_grads()
        device = torch.device(torch.cuda.current_device())
        norm = torch.as_tensor(self.inner.get_grad_norm(), dtype=torch.float32, device=device).squeeze() * scale
        self._skips = not 0 < float(norm) < math.inf
        factor = scale * min(1.0, max_norm / (float(norm) + 1e-6)) if max_norm else scale
        if factor != 1.0 and not self._skips:
            for parameter in self.inner.get_parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        return norm

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        result = None if closure is None else closure()  # Lightning's hooks run in it, and call `prepare`
        if not self._skips:
            self.inner.step_with_ready_grads()
        self._skips = False
        return result

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        # Both: the plain optimizer leaves `grad` aliased to the buffer, and the next backward would add to it twice.
        self.inner.zero_grad(set_to_none)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()  # type: ignore[operator]

    def allocate_state(self) -> None:
        """Make Adam's state where no step has made it, so that a checkpoint can be read into it."""
        for part in self.inner.chained_optimizers:
            compat.allocate_optimizer_state(part)

    def describe(self) -> dict[str, Any]:
        """AdamW's settings under torch's names, and the number of its steps, for checkpoints that others read."""
        group = self.inner.param_groups[0]
        names = ("lr", "initial_lr", "betas", "eps", "weight_decay")
        slots = [s for part in self.inner.chained_optimizers if part.optimizer for s in part.optimizer.state.values()]
        step = next((slot["step"] for slot in slots if "step" in slot), group.get("step", 0))
        return {name: group[name] for name in names if name in group} | {"step": float(step)}

    def states_of(self, state: Any) -> list[Any]:
        """Return the states of the optimizers of which `inner` is made, of one state of it."""
        count = len(self.inner.chained_optimizers)
        return [state] if count == 1 else [state[index] for index in range(count)]

    def load(self, state: Any) -> None:
        """Take a state that a checkpoint held for `inner`. Collective.

        Raises:
            ValueError: If its tensors do not lie where the weights say, or other ranks shared experts.
        """
        parts, states = self.inner.chained_optimizers, self.states_of(state)
        # Experts have an optimizer of their own where they are spread, so that settings lie under other numbers.
        if any("param_state" in own and "optimizer" not in own for own in states):
            raise ValueError(
                "`ckpt_path` was written with experts spread in another way than here: AdamW's state of all weights in"
                f" {'one part' if len(parts) > 1 else 'several parts'} is not that in {len(parts)}. Go on with its"
                " `megatron.expert_parallel_size` and `tensor_parallel_size`, or make a folder of its weights with"
                " `verl-export` and start from that by `path`."
            )
        pairs = [(part, own) for part, own in zip(parts, states, strict=True) if part.optimizer is not None]
        fits = torch.tensor(int(all(_has_order_of(*pair) for pair in pairs)), device=torch.cuda.current_device())
        dist.all_reduce(fits, dist.ReduceOp.MIN)
        if not fits:
            raise ValueError(
                "AdamW's own weights in `ckpt_path` are not those of the model beside them: Megatron has written them"
                " in an order of its own. Make a folder of the model's weights with `verl-export`, and start from that"
                " by `path`."
            )
        for part, own in pairs:
            compat.load_optimizer_part(part, own)
        self.param_groups[:] = self.inner.param_groups


def _has_order_of(part: Any, state: Mapping[str, Any]) -> bool:
    """Tell whether the optimizer's copy of the weights in a checkpoint equals the weights that were loaded before."""
    weights = [weight for buffer in part.buffers for weight in buffer.param_index_map] if "param_state" in state else []
    own = [state["param_state"][index]["param"] for index in range(len(weights))]
    return all(torch.equal(copy.to(weight), weight) for copy, weight in zip(own, weights, strict=True))


def make_megatron_optimizer(
    chunks: list[nn.Module], config: OptimConfig, *, use_distributed_optimizer: bool, is_bf16: bool
) -> MegatronOptimizer:
    """AdamW over the trainable weights of a model, by the groups of every strategy. Collective.

    Args:
        chunks: The model's pieces, wrapped in Megatron's DDP.
        config: Options of the user.
        use_distributed_optimizer: Whether ranks share the optimizer's state, as in the pieces' own config.
        is_bf16: Keep the optimizer's weights in float32 beside bfloat16 ones.
    """
    from megatron.core.optimizer import OptimizerConfig, ParamKey, get_megatron_optimizer
    from megatron.core.optimizer.optimizer_config import ParamPredicate

    ddp_config: Any = chunks[0].ddp_config
    assert ddp_config.use_distributed_optimizer == use_distributed_optimizer
    settings = OptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.lr * config.min_lr_ratio,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=config.eps,
        weight_decay=config.weight_decay,
        clip_grad=0.0,  # `MegatronOptimizer.prepare` clips
        bf16=is_bf16,
        params_dtype=torch.bfloat16 if is_bf16 else torch.float32,
        use_distributed_optimizer=use_distributed_optimizer,
        overlap_param_gather=ddp_config.overlap_param_gather,
    )
    spared = {id(parameter) for chunk in chunks for parameter in norms_and_biases(chunk)}
    key = ParamKey(predicate=ParamPredicate(name="norms and biases", fn=lambda parameter: id(parameter) in spared))
    inner = get_megatron_optimizer(settings, chunks, config_overrides={key: {"wd_mult": 0.0}})
    for group in inner.param_groups:  # Megatron's own scheduler, which is not used, multiplies by `wd_mult`
        group["weight_decay"] = config.weight_decay if group["wd_mult"] else decay_of_spared(config)
    compat.forget_rates(inner.param_groups)
    for part in inner.chained_optimizers if use_distributed_optimizer else ():
        compat.keep_buckets_apart(part)
    return MegatronOptimizer(inner, chunks)
