"""Megatron on GPUs: each layout against one process under `auto`, and its speed beside `fsdp`'s in the same run.

On 1, 2 or 4 GPUs, from the root of the repository::

    python benchmarks/megatron_check.py --devices 2 --out results.json

A check trains a small random Qwen3 (or a mixture of experts) on fixed chats of unequal lengths for five steps, in
bfloat16 and float32, and compares losses, gradient norms and scores with those of one process. Speed is measured as
`fsdp_sft.py` does, of Qwen3-0.6B's shape. All checks share one launch, since a start is dear; a case that fails or
takes longer than `--timeout` is told of with the place where each rank was, and a new launch goes on with the others.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from fsdp_sft import PEAK_FLOPS, quiet_trainer, show, write_model
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from step_timer import StepTimer
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig
from typing_extensions import override
from watched import Case, Diary, run_cases

from verl_lightning.models.build import build_skeleton
from verl_lightning.models.config import ModelConfig, OptimConfig
from verl_lightning.models.pretrained import read_config
from verl_lightning.modules import SFTModule
from verl_lightning.strategies import STRATEGIES
from verl_lightning.types import RowLength, TokenBatch

TOLERANCES = {"bf16-mixed": {"loss": 1e-3, "norm": 1e-2}, "32-true": {"loss": 1e-4, "norm": 1e-3}}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
LOCAL = {"transformer": {"use_transformer_engine": False}}
PLAIN_ROPE = {"transformer": {"overrides": {"apply_rope_fusion": False}}}
"""Megatron's own rotary embedding, which waits for the device twice a layer of a packed row."""

LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one": {}, "one, plain rotary": PLAIN_ROPE, "one, local layers": LOCAL},
    2: {
        "DP2": {},
        "DP2, plain optimizer": {"use_distributed_optimizer": False},
        "DP2, overlap": {"ddp": OVERLAP},
        "DP2, plain rotary": PLAIN_ROPE,
        "TP2": {"tensor_parallel_size": 2},
        "TP2, sequence parallel": {"tensor_parallel_size": 2, "sequence_parallel": True},
        "TP2, sequence parallel, local layers": {"tensor_parallel_size": 2, "sequence_parallel": True} | LOCAL,
        "PP2": {"pipeline_parallel_size": 2},
        "PP2, virtual 2": {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2},
        "CP2": {"context_parallel_size": 2},
        "CP2, plain rotary": {"context_parallel_size": 2} | PLAIN_ROPE,
        "EP2": {"expert_parallel_size": 2},
    },
    4: {
        "TP2 x DP2": {"tensor_parallel_size": 2},
        "TP2 x PP2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        "TP2 x CP2": {"tensor_parallel_size": 2, "context_parallel_size": 2, "sequence_parallel": True},
        "CP2 x DP2": {"context_parallel_size": 2},
        "PP2 x DP2, recompute": {"pipeline_parallel_size": 2, "transformer": {"recompute": "full"}},
        "EP2 x TP2": {"expert_parallel_size": 2, "tensor_parallel_size": 2, "sequence_parallel": True},
    },
}
SPEED: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp": ("fsdp", {"compile": True, "reshard_after_forward": False}),
    "megatron": ("megatron", {}),
    "megatron, overlap": ("megatron", {"ddp": OVERLAP}),
    "megatron, plain rotary": ("megatron", PLAIN_ROPE),
    "megatron, TP2": ("megatron", {"tensor_parallel_size": 2, "sequence_parallel": True, "ddp": OVERLAP}),
    "megatron, PP2": ("megatron", {"pipeline_parallel_size": 2, "micro_batch_size": 1}),
}
KINDS = ("dense", "experts")
RUNS = (("bf16-mixed", "auto"), ("bf16-mixed", "never"), ("32-true", "never"))
"""Precision and packing of checks."""

STEPS = 5


class Chats(LightningDataModule):
    """Token batches shared among data-parallel ranks by position.

    Args:
        steps: Batches.
        rows: Sequences of a batch, of all ranks.
        length: Tokens of the longest.
        vocab_size: Token ids are below it.
        shortest: Tokens of the shortest.
    """

    def __init__(self, *, steps: int, rows: int, length: int, vocab_size: int, shortest: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(5, vocab_size, (steps, rows, length), generator=generator)
        self.lengths = torch.randint(shortest, length + 1, (steps, rows), generator=generator)

    @override
    def train_dataloader(self) -> DataLoader[TokenBatch]:
        assert self.trainer is not None
        contract = self.trainer.lightning_module.contract  # type: ignore[union-attr, operator]
        own = slice(contract.data_parallel_rank, None, contract.data_parallel_size)
        return DataLoader([self.batch(step, own) for step in range(len(self.ids))], batch_size=None)  # type: ignore[arg-type]

    def batch(self, step: int, rows: slice) -> TokenBatch:
        """Some rows of a step."""
        ids, lengths = self.ids[step, rows], self.lengths[step, rows]
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        return TokenBatch(
            input_ids=torch.where(mask, ids, 0),
            attention_mask=mask,
            response_mask=mask[:, 1:],
            row_lengths=tuple(RowLength(n, n - 1, 1, n - 1) for n in lengths.tolist()),
        )


class Record(Callback):
    """Losses, norms, names of all weights and one batch's scores; says in the diary how far the run has come."""

    def __init__(self, diary: Diary) -> None:
        self.diary = diary
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.names: list[str] = []
        self.scores: dict[str, list[float]] = {}

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.diary.say("process groups; model next")

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.diary.say("model built; optimizer next")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, SFTModule)
        self.diary.say("optimizer; first scores next")
        batch = trainer.datamodule.batch(0, slice(0, 4)).to(pl_module.device)  # type: ignore[attr-defined]
        (scores,) = pl_module.contract.forward(pl_module.policy, [batch], with_entropy=True)
        mask = batch.response_mask
        for name in ("log_probs", "entropy"):
            self.scores[name] = getattr(scores, name)[mask].tolist()
        self.diary.say("first scores; steps next")

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train/loss"]))
        self.norms.append(float(trainer.callback_metrics["train/grad_norm"]))
        self.diary.say(f"step {len(self.losses)}")

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, SFTModule)
        weights = pl_module.contract.named_weights(pl_module.policy)
        self.names = sorted(name for name, _ in weights)
        self.diary.say("weights exported; teardown next")


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
    AutoModelForCausalLM.from_config(config, trust_remote_code=False, dtype=torch.float32).save_pretrained(folder)


def make_strategy(case: Case, timeout: float) -> Any:
    """A strategy from plain options, as the command line would make it."""
    name, options = case["strategy"], dict(case["options"])
    if name == "auto":
        return "auto"
    if name == "megatron":
        from verl_lightning.strategies.megatron.config import DataParallelConfig, TransformerOptions

        options["ddp"] = DataParallelConfig(**options.get("ddp", {}))
        options["transformer"] = TransformerOptions(**options.get("transformer", {}))
    return STRATEGIES[name](**options, timeout=2 * timeout)  # a hang is to be seen from outside, where it is


def check(arguments: argparse.Namespace, diary: Diary, case: Case) -> dict[str, Any]:
    """Five steps of SFT."""
    seed_everything(0, verbose=False)
    record = Record(diary)
    trainer = quiet_trainer(
        arguments,
        make_strategy(case, arguments.timeout),
        record,
        devices=case["devices"],
        precision=case["precision"],
        max_steps=STEPS,
    )
    config = ModelConfig(path=case["model"], optim=OptimConfig(lr=1e-4, eps=1e-5), packing=case["packing"])
    module = SFTModule(config)
    trainer.fit(module, datamodule=Chats(steps=STEPS, rows=8, length=192, vocab_size=4000, shortest=40))
    names = ("losses", "norms", "names", "scores")
    return {name: getattr(record, name) for name in names} | {"packs": module.policy.packs}


def speed(arguments: argparse.Namespace, diary: Diary, case: Case) -> dict[str, Any]:
    """Tokens a second inside `fit`; two sequences a step and data-parallel rank."""
    torch.set_float32_matmul_precision("high")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    timer, length, devices = StepTimer(warmup=4, steps=8), arguments.length, case["devices"]
    trainer = quiet_trainer(
        arguments,
        make_strategy(case, arguments.timeout),
        timer,
        devices=devices,
        precision="bf16-mixed",
        max_steps=timer.num_fit_steps,
    )
    config, shape = (
        ModelConfig(path=case["model"], optim=OptimConfig(lr=1e-5)),
        read_config(case["model"]),
    )
    rows = (
        2
        * devices
        // math.prod(case["options"].get(f"{k}_parallel_size", 1) for k in ("tensor", "pipeline", "context"))
    )
    chats = Chats(steps=timer.num_fit_steps, rows=rows, length=length, vocab_size=shape.vocab_size, shortest=length)
    diary.say("made; fit next")
    module = SFTModule(config)
    trainer.fit(module, datamodule=chats)
    parameters = sum(p.numel() for p in build_skeleton(config, "policy", trainable=True).parameters())
    per_token = 6 * parameters + 12 * shape.num_hidden_layers * shape.hidden_size * length
    rate = rows * length / timer.fit_seconds
    return {
        "tokens_per_second": round(rate, 1),
        "bare_tokens_per_second": round(rows * length / timer.bare_seconds, 1),
        "mfu": round(rate * per_token / devices / PEAK_FLOPS, 4),
        "peak_gib": round(module.clock.peak_memory() / 2**30, 2),
        "loss": round(timer.loss, 4),
    }


def run_child(arguments: argparse.Namespace) -> None:
    """What a child does on each of its ranks: the cases of its folder."""
    diary = Diary(arguments.folder)
    if arguments.accelerator == "cpu":
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from tests.strategies.megatron.cpu import pretend_cuda

        pretend_cuda()
    works = {"check": check, "speed": speed}
    cases = json.loads((arguments.folder / "cases.json").read_text())
    diary.work(cases, lambda case: works[case["job"]](arguments, diary, case), timeout=arguments.timeout)


def launch(arguments: argparse.Namespace, cases: dict[str, Case], place: str) -> dict[str, dict[str, Any]]:
    """Results of cases in processes of their own."""
    flags = {"accelerator": arguments.accelerator, "length": arguments.length, "timeout": arguments.timeout}
    command = [sys.executable, __file__, *[str(w) for k, v in flags.items() for w in (f"--{k}", v)]]
    return run_cases(command, cases, arguments.work / place, timeout=arguments.timeout)


def compare(expected: dict[str, Any], actual: dict[str, Any], precision: str) -> dict[str, Any]:
    """Largest relative differences, and whether they are small enough."""
    if "error" in actual:
        return {"passes": False, **actual}
    result, reference, tolerance = actual["result"], expected["result"], TOLERANCES[precision]
    worst = {
        kind: max(abs(a - b) / abs(b) for a, b in zip(result[kind], reference[kind], strict=True))
        for kind in ("losses", "norms")
    }
    apart = {name: difference(result["scores"][name], reference["scores"][name]) for name in ("log_probs", "entropy")}
    names_agree = result["names"] == reference["names"]
    return {
        "passes": worst["losses"] <= tolerance["loss"] and worst["norms"] <= tolerance["norm"] and names_agree,
        **{name: float(f"{value:.2e}") for name, value in (worst | apart).items()},
        "names_agree": names_agree,
        "packs": result["packs"],
        "seconds": actual["seconds"],
    }


def difference(actual: list[float], expected: list[float]) -> float:
    """Mean absolute one."""
    return float((torch.tensor(actual) - torch.tensor(expected)).abs().mean())


def check_layouts(arguments: argparse.Namespace) -> dict[str, Any]:
    """Each layout against `auto`, in each precision, packed and not."""
    references: dict[str, Case] = {}
    cases: dict[str, Case] = {}
    for kind in KINDS:
        model = arguments.work / kind
        for precision, packing in RUNS:
            base = {"job": "check", "model": str(model), "precision": precision}
            for name, options in LAYOUTS[arguments.devices].items():
                fits = ("EP" in name) == (kind == "experts") and (packing == "auto" or "CP" not in name)
                if fits and arguments.only in name:
                    write_small_model(model, experts=kind == "experts")
                    plain = {"strategy": "auto", "options": {}, "devices": 1, "packing": "never"}
                    references[f"{kind} | {precision}"] = base | plain
                    ours = {"strategy": "megatron", "options": options, "devices": arguments.devices}
                    cases[f"{name} | {precision} | packing {packing}"] = base | ours | {"packing": packing}
    expected = launch(arguments, references, "references")
    actual = launch(arguments, cases, "layouts")
    results = {}
    for name, case in cases.items():
        reference = expected[f"{Path(case['model']).name} | {case['precision']}"]
        if "error" in reference:
            raise RuntimeError(f"the reference failed: {reference['error']}")
        results[name] = compare(reference, actual[name], case["precision"])
        show(f"{name}: {json.dumps(results[name])}")
    return results


def measure_speed(arguments: argparse.Namespace) -> dict[str, Any]:
    """Of each strategy that fits the devices."""
    model = Path(tempfile.gettempdir()) / ("qwen3-tiny-random" if arguments.tiny else "qwen3-0.6b-random")
    write_model(model, "tiny" if arguments.tiny else "0.6b")
    results: dict[str, Any] = {}
    for index, (name, (strategy, options)) in enumerate(SPEED.items()):
        if name in arguments.speeds and (arguments.devices > 1 or "2" not in name):
            case = {"job": "speed", "strategy": strategy, "options": options, "model": str(model)}
            told = launch(arguments, {name: case | {"devices": arguments.devices}}, f"speed{index}")[name]
            results[name] = told.get("result", told)
            show(f"{name}: {json.dumps(results[name])}")
    return results


def main() -> None:
    """Check, measure, and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1, choices=list(LAYOUTS))
    parser.add_argument("--only", default="", help="layouts with this in their names")
    parser.add_argument("--speeds", nargs="+", choices=list(SPEED), default=list(SPEED), help="what to time")
    parser.add_argument("--skip", choices=["check", "speed"], nargs="*", default=[])
    parser.add_argument("--length", type=int, default=8192, help="tokens of a sequence, for speed")
    parser.add_argument("--tiny", action="store_true", help="measure a tiny model's speed, to see that all of it runs")
    parser.add_argument("--accelerator", default="gpu")
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds for one case, its start left out")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument(
        "--work", type=Path, help="keeps models, diaries, stacks and output; a temporary folder if absent"
    )
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder is not None:
        run_child(arguments)
        return
    arguments.work = Path(tempfile.mkdtemp(prefix="megatron-check-", dir=arguments.work))
    packages = ["torch", "megatron-core", "megatron-bridge", "transformers", "lightning"]
    packages += ["transformer-engine"] if importlib.util.find_spec("transformer_engine") else []
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "devices": arguments.devices,
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "work": str(arguments.work),
    }
    for name, work in {"check": check_layouts, "speed": measure_speed}.items():
        if name not in arguments.skip:
            report[name] = work(arguments)
            if arguments.out is not None:
                arguments.out.write_text(json.dumps(report, indent=1))
    show(json.dumps(report))


if __name__ == "__main__":
    main()
