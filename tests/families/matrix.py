"""Trains each family under each strategy and sends it to vLLM, and records what became of it for ``docs/models.md``.

    python -m tests.families.matrix auto | fsdp | megatron | megatron_tp2 | vllm [FAMILY ...]

`make families` runs all of them, each in the environment that has its packages. Not collected by pytest.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, seed_everything

from tests.families.catalog import FAMILIES, VARIANTS, write_named
from tests.families.family_parts import gap_of, transformers_log_probs
from tests.models.packed_models import make_batch
from tests.processes import on_ranks
from tests.rollout.asking import sample
from tests.rollout.vllm_parts import make_prompts as ask_prompts
from tests.rollout.vllm_parts import make_vllm_engine
from tests.runs import make_chats, make_ppo, make_prompts, make_rollout, make_sft, make_trainer
from tests.strategies.megatron.cpu import pretend_cuda
from tests.tiny import tiny_tokenizer, write_chat_file, write_prompt_file
from verl_lightning.callbacks import HFCheckpoint
from verl_lightning.faults import is_meant_for_user
from verl_lightning.models.build import build_scorer
from verl_lightning.models.config import ModelConfig
from verl_lightning.models.hf_folder import stored_weights
from verl_lightning.models.library_errors import LIBRARY_ERRORS
from verl_lightning.models.weights import merged_weights
from verl_lightning.rollout.base import SamplingConfig
from verl_lightning.strategies import STRATEGIES

RECORD = Path(__file__).parents[2] / "docs" / "models.json"
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "auto": ("auto", 1, {}),
    "fsdp": ("fsdp", 2, {}),
    "megatron": ("megatron", 1, {}),
    "megatron_tp2": ("megatron", 2, {"tensor_parallel_size": 2}),
}
"""Strategy, processes and options of each column but `vllm`."""

WORKS = "yes"


class Scores(Callback):
    """The policy's scores of a batch when training ends."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        (scores,) = pl_module.contract.forward(pl_module.policy, [batch := make_batch()])
        self.log_probs = scores.log_probs.where(batch.response_mask, 0.0)


def train(task: str, model: Path, folder: Path, layout: str) -> Path:
    """Two steps of a task; the exported folder, whose scores by transformers are those that the run ended with."""
    name, devices, options = LAYOUTS[layout]
    scores = Scores()
    rollout = [make_rollout()] if task == "grpo" else []
    strategy = STRATEGIES[name](**options) if name in STRATEGIES else name
    seed_everything(0, verbose=False)
    trainer = make_trainer(
        folder / task,
        *(*rollout, scores, HFCheckpoint(dirpath=str(folder / task / "hf"))),
        strategy=strategy,
        devices=devices,
        enable_checkpointing=True,
        max_steps=2,
    )
    module = make_sft(model) if task == "sft" else make_ppo(model)
    chats, prompts = folder.parent / "chats.jsonl", folder.parent / "prompts.jsonl"
    trainer.fit(module, datamodule=make_chats(chats) if task == "sft" else make_prompts(prompts))
    exported = folder / task / "hf" / "last"
    if trainer.is_global_zero:
        gap = gap_of(scores.log_probs, transformers_log_probs(exported, make_batch()))
        assert gap < 1e-5, f"{task} scores differ from transformers' by {gap:.1e}"
    return exported


def run_layout(families: list[str], folder: Path, layout: str) -> dict[str, str]:
    """What became of each family."""
    warnings.simplefilter("ignore")
    if layout.startswith("megatron"):
        pretend_cuda()
    return {family: tell(lambda family=family: both_tasks(folder / family, layout), folder) for family in families}


def both_tasks(model: Path, layout: str) -> str:
    """SFT, and GRPO from where it ends."""
    train(
        "grpo",
        train("sft", model, model.parent / f"{model.name}-{layout}", layout),
        model.parent / f"{model.name}-{layout}",
        layout,
    )
    return WORKS


def tell(work: Callable[[], str], folder: Path) -> str:
    """What work returned, or the sentence that it ended with; a fault says so."""
    try:
        return work()
    except (*LIBRARY_ERRORS, MisconfigurationException) as error:
        said = str(error).strip().splitlines()[0].replace(str(folder), "")
        return said if is_meant_for_user(error) else f"FAULT: {type(error).__name__}: {said}"
    except AssertionError as error:
        return f"FAULT: {error}"


def sync(model: Path) -> str:
    """Weights sent to vLLM, and its log-probs of its own responses beside transformers'."""
    backbone = build_scorer(ModelConfig(path=str(model)), "policy", trainable=False).backbone
    engine = make_vllm_engine(model)
    engine.start(torch.device("cpu"))
    try:
        engine.load_weights(stored_weights(backbone, merged_weights(backbone)), 1)
        rollout = sample(engine, ask_prompts(), SamplingConfig(max_new_tokens=12))
    finally:
        engine.stop()
    expected = transformers_log_probs(model, rollout)
    gap = float((rollout.rollout_log_probs - expected).abs().sum() / rollout.response_mask.sum())
    assert gap < 1e-4, f"vLLM and transformers differ by {gap:.2g} nats per token"
    return WORKS


def run_vllm(families: list[str], folder: Path) -> dict[str, str]:
    """What became of each family, recorded as it comes: an engine that crashes ends the process."""
    for family in families:
        record("vllm", {family: "FAULT: the process died"})
        record("vllm", {family: tell(lambda family=family: sync(folder / family), folder)})
    return {}


def record(column: str, results: dict[str, str]) -> None:
    """Write a column's results into the file that the page is made of."""
    table = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    table[column] = dict(sorted((table.get(column, {}) | results).items()))
    RECORD.write_text(json.dumps(dict(sorted(table.items())), indent=1) + "\n")


def main(column: str, families: list[str]) -> None:
    """Runs a column for some families, or all."""
    families = families or sorted(FAMILIES | VARIANTS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_chat_file(folder / "chats.jsonl")
        write_prompt_file(folder / "prompts.jsonl")
        for family in families:
            write_named(folder / family, family)
            tiny_tokenizer().save_pretrained(folder / family)
        if column == "vllm":
            run_vllm(families, folder)
        elif column == "auto":
            record(column, run_layout(families, folder, column))
        else:
            record(column, on_ranks(LAYOUTS[column][1], run_layout, families, folder, column)[0])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
    sys.stdout.flush()
    os._exit(0)  # engines leave threads behind
