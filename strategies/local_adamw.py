"""AdamW for weights of which each rank holds a part."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override


class LocalAdamW(torch.optim.AdamW):
    """AdamW that steps over this rank's parts, with distributed tensors as its parameters and state.

    Each element is stepped by itself, so no other rank is needed; torch would find that out anew for each parameter
    and step, which keeps the host busy for longer than the step takes.
    """

    @override
    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        """Hand the parts to the step: what torch 2.11 to 2.13 collects for it in lists.

        `test_a_step_sees_parts_alone` watches the name.
        """
        has_complex = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for tensors in lists:
            tensors[:] = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
        return bool(has_complex)
