"""Megatron on GPUs: each layout against one process under `auto`, and its speed beside `fsdp`'s in the same run.

On 1, 2 or 4 GPUs, from the root of the repository::

    python benchmarks/megatron_check.py --devices 2 --out results.json

A check trains a small random Qwen3 (or a mixture of experts) on fixed chats of unequal lengths for five steps, in
bfloat16 and float32, and compares losses and gradient norms with those of one process; the weights after training are
compared too. Speed is measured as `fsdp_sft.py` does. Each layout runs in processes of its own; one that fails is
reported, and the others go on.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from fsdp_sft import PEAK_FLOPS, StepTimer, quiet_trainer, random_batches, show, write_model
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig
from typing_extensions import override

from verl_lightning.models.config import ModelConfig, OptimConfig
from verl_lightning.models.scorer import build_skeleton
from verl_lightning.modules import SFTModule
from verl_lightning.strategies import STRATEGIES
from verl_lightning.types import TokenBatch

TOLERANCES = {"bf16-mixed": {"loss": 1e-3, "norm": 1e-2}, "32-true": {"loss": 1e-4, "norm": 1e-3}}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
LOCAL = {"transformer": {"use_transformer_engine": False}}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one": {}, "one, local layers": LOCAL},
    2: {
        "DP2": {},
        "DP2, plain optimizer": {"use_distributed_optimizer": False},
        "DP2, overlap": {"ddp": OVERLAP},
        "TP2": {"tensor_parallel_size": 2},
        "TP2, sequence parallel": {"tensor_parallel_size": 2, "sequence_parallel": True},
        "PP2": {"pipeline_parallel_size": 2},
        "PP2, virtual 2": {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2},
        "CP2": {"context_parallel_size": 2},
        "EP2": {"expert_parallel_size": 2},
    },
    4: {
        "TP2 x DP2": {"tensor_parallel_size": 2},
        "TP2 x PP2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        "TP2 x CP2": {"tensor_parallel_size": 2, "context_parallel_size": 2, "sequence_parallel": True},
        "CP2 x DP2": {"context_parallel_size": 2},
        "PP2 x DP2, recompute": {"pipeline_parallel_size": 2, "transformer": {"recompute": "full"}},
    },
}
SPEED: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp": ("fsdp", {"compile": True, "reshard_after_forward": False}),
    "megatron": ("megatron", {"ddp": OVERLAP}),
    "megatron, TP2": ("megatron", {"tensor_parallel_size": 2, "sequence_parallel": True, "ddp": OVERLAP}),
    "megatron, PP2": ("megatron", {"pipeline_parallel_size": 2, "micro_batch_size": 1}),
}
STEPS = 5


class FixedChats(LightningDataModule):
    """Eight sequences of unequal lengths a step, shared among data-parallel ranks by position."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(5, vocab_size, (STEPS, 8, 192), generator=generator)
        self.lengths = torch.randint(40, 193, (STEPS, 8), generator=generator)

    @override
    def train_dataloader(self) -> DataLoader[TokenBatch]:
        assert self.trainer is not None
        contract = self.trainer.lightning_module.contract  # type: ignore[union-attr, operator]
        ranks, rank = contract.data_parallel_size, contract.data_parallel_rank
        rows = [self._batch(step, slice(rank, None, ranks)) for step in range(STEPS)]
        return DataLoader(rows, batch_size=None)  # type: ignore[arg-type]

    def _batch(self, step: int, rows: slice) -> TokenBatch:
        ids, lengths = self.ids[step, rows], self.lengths[step, rows]
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        return TokenBatch(input_ids=torch.where(mask, ids, 0), attention_mask=mask, response_mask=mask[:, 1:])


class Record(Callback):
    """Losses, norms and, at the end, all weights and one batch's scores."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.weights: dict[str, Tensor] = {}
        self.scores: dict[str, Tensor] = {}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, SFTModule)
        batch = trainer.datamodule._batch(0, slice(0, 4)).to(pl_module.device)  # type: ignore[attr-defined]
        (scores,) = pl_module.contract.forward(pl_module.policy, [batch], with_entropy=True)
        assert scores.log_probs is not None
        assert scores.entropy is not None
        mask = batch.response_mask
        self.scores = {"log_probs": scores.log_probs[mask].cpu(), "entropy": scores.entropy[mask].cpu()}

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train/loss"]))
        self.norms.append(float(trainer.callback_metrics["train/grad_norm"]))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, SFTModule)
        weights = pl_module.contract.named_weights(pl_module.policy)
        self.weights = {name: weight.float().cpu() for name, weight in weights}


def write_small_model(folder: Path, *, experts: bool) -> None:
    """Four layers, random; unless it is there."""
    if folder.exists():
        return
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": 4000,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 2048,
    }
    if experts:
        shape |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
    config = Qwen3MoeConfig(**shape) if experts else Qwen3Config(**shape)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def make_strategy(name: str, options: dict[str, Any]) -> Any:
    """A strategy from plain options, as the command line would make it."""
    if name == "auto":
        return "auto"
    if name == "megatron":
        from verl_lightning.strategies.megatron.config import DataParallelConfig, TransformerOptions

        options = {**options, "timeout": 120.0}
        options["ddp"] = DataParallelConfig(**options.get("ddp", {}))
        options["transformer"] = TransformerOptions(**options.get("transformer", {}))
    return STRATEGIES[name](**options)


def check(arguments: argparse.Namespace, strategy: str, options: dict[str, Any], devices: int) -> dict[str, Any]:
    """Five steps of SFT."""
    seed_everything(0, verbose=False)
    record = Record()
    trainer = quiet_trainer(
        arguments,
        make_strategy(strategy, options),
        record,
        devices=devices,
        precision=arguments.precision,
        max_steps=STEPS,
    )
    config = ModelConfig(path=str(arguments.model), optim=OptimConfig(lr=1e-4, eps=1e-5), packing=arguments.packing)
    module = SFTModule(config)
    trainer.fit(module, datamodule=FixedChats(4000))
    return {
        "losses": record.losses,
        "norms": record.norms,
        "weights": record.weights,
        "scores": record.scores,
        "packs": module.policy.packs,
    }


def speed(arguments: argparse.Namespace, strategy: str, options: dict[str, Any], devices: int) -> dict[str, Any]:
    """Tokens a second inside `fit`; two sequences a step and data-parallel rank."""
    torch.set_float32_matmul_precision("high")
    timer = StepTimer(warmup=4, steps=8, profiles=False)
    length = arguments.length
    trainer = quiet_trainer(
        arguments,
        make_strategy(strategy, options),
        timer,
        devices=devices,
        precision="bf16-mixed",
        max_steps=timer.num_fit_steps,
    )
    config = ModelConfig(path=str(arguments.model), optim=OptimConfig(lr=1e-5))
    shape = AutoConfig.from_pretrained(arguments.model)
    module = SFTModule(config)
    trainer.fit(module, random_batches(shape.vocab_size, length, timer.num_fit_steps))
    sizes = (options.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline", "context"))
    tokens = 2 * length * devices // math.prod(sizes)
    parameters = sum(p.numel() for p in build_skeleton(config, "policy", trainable=True).parameters())
    per_token = 6 * parameters + 12 * shape.num_hidden_layers * shape.hidden_size * length
    rate = tokens / timer.fit_seconds
    return {
        "tokens_per_second": round(rate, 1),
        "bare_tokens_per_second": round(tokens / timer.bare_seconds, 1),
        "mfu": round(rate * per_token / devices / PEAK_FLOPS, 4),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if torch.cuda.is_available() else 0.0,
        "loss": round(timer.loss, 4),
    }


def run_one(arguments: argparse.Namespace) -> None:
    """What a child process does: one layout."""
    if arguments.accelerator == "cpu":
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from tests.strategies.megatron.cpu import pretend_cuda

        pretend_cuda()
    work = speed if arguments.job == "speed" else check
    result = work(arguments, arguments.strategy, json.loads(arguments.options), arguments.devices)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        torch.save(result, arguments.out)


def child(arguments: argparse.Namespace, job: str, strategy: str, options: dict[str, Any], **flags: Any) -> Any:
    """One layout in processes of its own: its result, or the end of what it said."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.pt"
        words = {"job": job, "strategy": strategy, "options": json.dumps(options), "out": out} | flags
        words |= {"accelerator": arguments.accelerator, "length": arguments.length}
        command = [sys.executable, __file__, *[str(w) for k, v in words.items() for w in (f"--{k}", v)]]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=arguments.timeout, check=False)
        except subprocess.TimeoutExpired:
            return f"took more than {arguments.timeout} s"
        return torch.load(out, weights_only=True) if out.exists() else run.stderr[-1500:]


def compare(expected: dict[str, Any], actual: Any, precision: str) -> dict[str, Any]:
    """Largest relative differences, and whether they are small enough."""
    if isinstance(actual, str):
        return {"passes": False, "error": actual}
    tolerance = TOLERANCES[precision]
    loss = max(abs(a - b) / abs(b) for a, b in zip(actual["losses"], expected["losses"], strict=True))
    norm = max(abs(a - b) / abs(b) for a, b in zip(actual["norms"], expected["norms"], strict=True))
    names_agree = actual["weights"].keys() == expected["weights"].keys()
    return {
        "passes": loss <= tolerance["loss"] and norm <= tolerance["norm"] and names_agree,
        "loss": float(f"{loss:.2e}"),
        "norm": float(f"{norm:.2e}"),
        "log_probs": float(f"{difference(actual['scores'], expected['scores'], 'log_probs'):.2e}"),
        "entropy": float(f"{difference(actual['scores'], expected['scores'], 'entropy'):.2e}"),
        "names_agree": names_agree,
        "packs": actual["packs"],
        "losses": [round(value, 5) for value in actual["losses"]],
    }


def difference(actual: dict[str, Tensor], expected: dict[str, Tensor], name: str) -> float:
    """Mean absolute one."""
    return float((actual[name] - expected[name]).abs().mean())


def check_layouts(arguments: argparse.Namespace) -> dict[str, Any]:
    """Each layout against `auto`, in each precision."""
    results: dict[str, Any] = {}
    folder = Path(tempfile.gettempdir())
    for experts in (False, True):
        model = folder / ("megatron-check-moe" if experts else "megatron-check-dense")
        write_small_model(model, experts=experts)
        for precision, packing in (("bf16-mixed", "auto"), ("bf16-mixed", "never"), ("32-true", "never")):
            flags = {"model": model, "precision": precision, "packing": packing}
            chosen = {
                name: options
                for name, options in LAYOUTS[arguments.devices].items()
                if arguments.only in name and ("EP" in name) == experts and (packing == "auto" or "CP" not in name)
            }
            if not chosen:
                continue
            reference = {**flags, "packing": "never"}
            expected = child(arguments, "check", "auto", {}, **reference, devices=1)
            if isinstance(expected, str):
                raise RuntimeError(f"the reference failed: {expected}")
            for name, options in chosen.items():
                actual = child(arguments, "check", "megatron", options, **flags, devices=arguments.devices)
                key = f"{name} | {precision} | packing {packing}"
                results[key] = compare(expected, actual, precision)
                show(f"{key}: {json.dumps(results[key])}")
    return results


def measure_speed(arguments: argparse.Namespace) -> dict[str, Any]:
    """Of each strategy that fits the devices."""
    model = Path(tempfile.gettempdir()) / "qwen3-0.6b-random"
    write_model(model)
    results: dict[str, Any] = {}
    for name, (strategy, options) in SPEED.items():
        if arguments.devices > 1 or "2" not in name:
            results[name] = child(arguments, "speed", strategy, options, model=model, devices=arguments.devices)
            show(f"{name}: {json.dumps(results[name])}")
    return results


def main() -> None:
    """Check, measure, and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1, help="1, 2 or 4")
    parser.add_argument("--only", default="", help="layouts with this in their names")
    parser.add_argument("--skip", choices=["check", "speed"], nargs="*", default=[])
    parser.add_argument("--length", type=int, default=8192, help="tokens of a sequence, for speed")
    parser.add_argument("--accelerator", default="gpu")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one layout")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    for internal in ("job", "strategy", "options", "precision", "packing"):
        parser.add_argument(f"--{internal}", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job is not None:
        run_one(arguments)
        return
    packages = ("torch", "megatron-core", "megatron-bridge", "transformers", "lightning")
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "devices": arguments.devices,
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }
    for name, work in {"check": check_layouts, "speed": measure_speed}.items():
        if name not in arguments.skip:
            report[name] = work(arguments)
            if arguments.out is not None:
                arguments.out.write_text(json.dumps(report, indent=1))
    show(json.dumps(report))


if __name__ == "__main__":
    main()
