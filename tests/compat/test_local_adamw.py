"""AdamW over parts does what torch's does over distributed tensors."""

from __future__ import annotations

from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing import assert_close

from tests.processes import on_ranks
from verl_lightning.compat.torch import LocalAdamW, set_gradient_scale


def stepped(optimizer_class):
    """Weights and state after three steps, of which the second is scaled and the third skipped, and what steps saw."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    weights = [nn.Parameter(distribute_tensor(torch.randn(size, 4), mesh, [Shard(0)])) for size in (6, 5, 1)]
    optimizer, seen = optimizer_class(weights, lr=0.1, fused=True), []
    fused_step = torch._fused_adamw_

    def watch(parameters, *args, **options):
        seen.append({type(parameter) for parameter in parameters})
        fused_step(parameters, *args, **options)

    with patch.object(torch, "_fused_adamw_", watch):
        for step in range(3):
            for weight in weights:
                weight.grad = distribute_tensor(torch.randn(weight.shape), mesh, [Shard(0)])
            set_gradient_scale(optimizer, factor=torch.tensor(0.5), skips=torch.tensor(step == 2))
            optimizer.step()
    state = [value for weight in weights for value in optimizer.state[weight].values()]
    return [*weights, *state], seen


def compare():
    """On each rank."""
    dist.init_process_group("gloo")
    (ours, seen), (theirs, _) = stepped(LocalAdamW), stepped(torch.optim.AdamW)
    assert [type(value) for value in ours] == [type(value) for value in theirs]
    whole = [[v.full_tensor() if isinstance(v, DTensor) else v for v in values] for values in (ours, theirs)]
    assert_close(*whole, rtol=0, atol=0)
    return seen


def test_a_step_sees_parts_alone():
    """Fails if torch moves the private name: then it sees distributed tensors. A rank without a row has a part too."""
    assert on_ranks(2, compare) == [[{torch.Tensor}] * 3] * 2
