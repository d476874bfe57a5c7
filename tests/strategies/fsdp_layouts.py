"""Ways in which `fsdp` can share work, each run on the scenarios that it could change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tests.strategies.conformance import Bench, Results, run_scenarios

EXACT = {"losses": 1e-4, "norms": 1e-3, "counts": 0.0, "weights": 1e-3}
PACKED = ("packed_within_a_budget", "sft_packed_within_a_budget", "lengths_of_any_kind")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One of them."""

    devices: int = 2
    """Processes."""

    options: dict[str, Any] = field(default_factory=dict)
    """Of the strategy."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Of the trainer."""

    scenarios: tuple[str, ...] = PACKED
    """What is run."""

    tolerances: dict[str, float] = field(default_factory=lambda: EXACT)
    """Relative, against one process that computes in float32."""


LAYOUTS = {
    "cpu_offload": Layout(options={"cpu_offload": True}, scenarios=("gae_with_own_critic",)),
    "sequence_parallel": Layout(
        options={"sequence_parallel_size": 2},
        scenarios=(*PACKED, "grpo_with_kl_and_entropy", "gae_with_shared_trunk", "lora"),
    ),
    "bf16_compute": Layout(
        settings={"precision": "bf16-mixed"},
        scenarios=("sft_packed_within_a_budget", "gradients_of_any_cut"),
        tolerances=EXACT | {"losses": 1e-2, "norms": 1e-2, "weights": 5e-2},  # bfloat16 has three decimal digits
    ),
    "replicated": Layout(devices=4, options={"replicate_size": 2}, scenarios=("sft_accumulated",)),
    "sequence_parallel_beside_data_parallel": Layout(
        devices=4, options={"sequence_parallel_size": 2}, scenarios=("packed_within_a_budget", "taught_beside_rewards")
    ),
    "replicated_sequence_parallel": Layout(
        devices=4,
        options={"replicate_size": 2, "sequence_parallel_size": 2, "reshard_after_forward": False},
        scenarios=("sft_packed_within_a_budget", "lengths_of_any_kind"),
    ),
}


def run_layouts(bench: Bench) -> Iterator[tuple[str, dict[str, Results]]]:
    """The results of each layout for this number of processes, by scenario."""
    for name, layout in LAYOUTS.items():
        if layout.devices == bench.devices:
            changed = replace(bench, options=layout.options, settings=layout.settings)
            yield name, dict(run_scenarios(changed, layout.scenarios))
