"""The layouts of two processes in which Megatron is compared with one, what runs in each, and the models for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.callbacks import ModelCheckpoint

from tests.callbacks.test_profiler import train
from tests.strategies.conformance import Bench, expert_model, write_inputs
from tests.strategies.megatron.training_checks import fit_sft
from tests.tiny import tiny_model
from verl_lightning.callbacks import ProfilerCallback
from verl_lightning.strategies import MegatronStrategy

Kind = Literal["dense", "deep", "experts"]
SCENARIOS = [
    "grpo_with_kl_and_entropy",
    "gae_with_own_critic",
    "gae_with_shared_trunk",
    "sft",
    "sft_accumulated",
    "dpo_accumulated",
    "one_rank_without_rewards",
    "nothing_to_train_on",
    "infinite_gradient",
    "gradients_of_any_cut",
]
SHARED = [name for name in SCENARIOS if name not in ("sft", "one_rank_without_rewards", "nothing_to_train_on")]
"""What ranks with the same data could do otherwise: whose rows have rewards is nothing to them."""

FEWER = ["grpo_with_kl_and_entropy", "gae_with_own_critic", "sft_accumulated", "gradients_of_any_cut"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How two processes share the work."""

    options: dict[str, Any] = field(default_factory=dict)
    """Of the strategy."""

    kind: Kind = "dense"
    """Which model."""

    scenarios: list[str] = field(default_factory=lambda: SCENARIOS)
    """Of `conformance`."""


STAGES = {"pipeline_parallel_size": 2, "process_group_backend": "cpu:gloo"}
"""A world that is not gloo by name has groups of hosts of its own, as over NCCL."""

LAYOUTS: dict[str, Layout] = {
    "data parallel, distributed optimizer": Layout(),
    "data parallel, plain optimizer": Layout(
        options={"use_distributed_optimizer": False}, scenarios=[*FEWER, "infinite_gradient"]
    ),
    "tensor parallel": Layout(options={"tensor_parallel_size": 2}, scenarios=SHARED),
    "sequence parallel": Layout(options={"tensor_parallel_size": 2, "sequence_parallel": True}, scenarios=FEWER),
    "pipeline parallel": Layout(options=STAGES, scenarios=SHARED),
    "virtual pipeline": Layout(
        options={"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2}, kind="deep", scenarios=FEWER
    ),
    "expert parallel": Layout(
        options={"expert_parallel_size": 2}, kind="experts", scenarios=[*FEWER, "grpo_with_router_replay"]
    ),
}


def profiles(bench: Bench) -> str:
    """Where traces of the second step of PPO and of SFT on the second rank are, in folders of their names."""
    data = {"ppo": bench.folder / "prompts.jsonl", "sft": bench.folder / "chats.jsonl"}
    for task, file in data.items():
        folder = bench.folder / "profiles" / task
        profiler = ProfilerCallback(steps=[2], ranks=[1], folder=str(folder))
        strategy = MegatronStrategy(**bench.options)
        train(task, folder, bench.folder / "model", file, profiler, strategy=strategy, devices=bench.devices)
    return str(bench.folder / "profiles")


def resume(bench: Bench) -> dict[str, Any]:
    """A training of four steps, and one that goes on from what it saved after two."""
    folder = bench.folder / "resumed"
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    whole = fit_sft(bench, saver, enable_checkpointing=True)
    return {"whole": whole, "rest": fit_sft(bench, ckpt_path=folder / "step=2.ckpt")}


def gather_experts(bench: Bench) -> str:
    """Why a run whose ranks hold all experts can't go on from one that had spread them."""
    whole = replace(bench, options=bench.options | {"expert_parallel_size": 1})
    try:
        fit_sft(whole, ckpt_path=bench.folder / "resumed" / "step=2.ckpt")
    except ValueError as error:
        return str(error)
    return ""


MORE: dict[str, tuple[Layout, Callable[[Bench], Any]]] = {
    "profiles": (Layout(options=STAGES), profiles),
    "resume, virtual pipeline": (LAYOUTS["virtual pipeline"], resume),
    "resume, expert parallel": (LAYOUTS["expert parallel"], resume),
    "gather experts": (LAYOUTS["expert parallel"], gather_experts),
}
"""What else runs in a layout; the last goes on from what the one before it saved."""


def write_kinds(folder: Path) -> None:
    """The model and the data of each kind, in a folder of its name."""
    for kind in ("dense", "deep", "experts"):
        write_inputs(folder / kind)
    tiny_model(num_layers=4).save_pretrained(folder / "deep" / "model")
    expert_model().save_pretrained(folder / "experts" / "model")
