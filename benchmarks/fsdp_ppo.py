"""Speed of PPO's two kinds of passes with `fsdp`: the update (forward, backward, step) and log-probs alone.

On one to four GPUs, from the root of the repository::

    python benchmarks/fsdp_ppo.py --devices 1 --out results.json

A randomly initialised model, by default of Qwen3-0.6B's shape, scores made-up responses to prompts of 512 tokens:
float32 weights, bfloat16 compute. Lengths are uniform between an eighth and all of ``--length``, so that packing
matters. Model FLOPs are counted as in `fsdp_sft.py`, for each sequence by its own length; a pass without gradient
counts a third.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fsdp_sft import PEAK_FLOPS, SHAPES, chosen_strategy, quiet_trainer, random_batches, show, write_model
from lightning.pytorch import Callback, LightningModule, Trainer
from step_timer import now
from typing_extensions import override

from verl_lightning.algorithms.losses.ppo_clip import PPOClip
from verl_lightning.models.config import LoraConfig, ModelConfig, OptimConfig
from verl_lightning.models.pretrained import read_config
from verl_lightning.modules import SFTModule
from verl_lightning.modules.micro_batches import BatchSplitter
from verl_lightning.modules.objectives import Normalizer, PolicyObjective
from verl_lightning.modules.pass_size import planned_tokens
from verl_lightning.strategies import STRATEGIES
from verl_lightning.types import Experience


@dataclass(frozen=True, kw_only=True)
class Result:
    """One row of the table; tokens are real ones, of all devices together."""

    packing: str
    """The model's option."""

    size: str
    """Size of a pass, as asked for."""

    max_tokens: int | None
    """Most tokens of a pass; None where it has a number of rows."""

    checkpointing: bool
    """Whether all activations are recomputed in the update."""

    devices: int
    """Processes."""

    update_tokens_per_second: float
    """Forward, backward and step of one mini-batch."""

    log_prob_tokens_per_second: float
    """Scores without gradient."""

    ratio: float
    """Of the two; wanted at least 2.5."""

    update_mfu: float
    """A share of the devices' peak."""

    log_prob_mfu: float
    """Likewise."""

    peak_gib: float
    """Most memory that torch held on a device."""

    micro_batches: int
    """Of the mini-batch on one rank."""


class Passes(NamedTuple):
    """What was measured of passes of one size."""

    max_tokens: int | None
    """Most tokens; None where rows are counted."""

    count: int
    """Passes of the mini-batch on one rank."""

    seconds: dict[str, float]
    """Of the update and of log-probs."""

    peak_gib: float
    """Most memory that torch held on the device."""


def pass_size(size: str, module: SFTModule, longest: int) -> tuple[int | None, int | None]:
    """Rows and tokens of a pass, one of them None.

    Args:
        size: A number of tokens, ``8rows``, or ``auto``, which PPO would choose.
        module: In its run.
        longest: Tokens of the longest sequence.
    """
    if size.endswith("rows"):
        return int(size.removesuffix("rows")), None
    if size != "auto":
        return None, int(size)
    module.max_tokens = longest  # type: ignore[assignment]  # as a `PPOModule` has it
    return None, planned_tokens(module)  # type: ignore[arg-type]


class PassTimer(Callback):
    """Once `fit` has made everything, times passes over one mini-batch.

    Args:
        arguments: Of the command line.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.passes: dict[str, Passes] = {}  # by their size, as asked for
        self.lengths: list[int] = []  # of this rank's sequences

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, SFTModule)
        batch = make_experience(self.arguments, pl_module, pl_module.contract.data_parallel_rank)
        self.lengths = batch.attention_mask.sum(-1).tolist()
        for size in self.arguments.sizes:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            self.passes[size] = self.measure(trainer, pl_module, batch, size)
            show(f"{size}: {self.passes[size]}")

    def measure(self, trainer: Trainer, module: SFTModule, batch: Experience, size: str) -> Passes:
        """Times both kinds of passes of one size."""
        contract, model = module.contract, module.policy
        rows, max_tokens = pass_size(size, module, self.arguments.length)
        splitter = BatchSplitter(contract=contract, micro_batch_size=rows, max_tokens=max_tokens)
        (split,) = splitter.split(model, [batch])
        tokens = contract.sum_over_data_parallel(batch.response_mask.sum())
        normalizer = Normalizer(
            aggregation="token-mean", num_tokens=tokens, num_sequences=tokens, max_response_length=self.arguments.length
        )
        objective = PolicyObjective(
            policy_loss=PPOClip(), normalizer=normalizer, kl=None, kl_coef=0.0, entropy_coef=0.0, is_on_policy=False
        )

        def update() -> None:
            contract.forward_backward(model, split.parts, objective)
            contract.prepare_step(trainer.optimizers[0], 1.0)
            trainer.optimizers[0].step()
            trainer.optimizers[0].zero_grad()

        seconds = {
            "update": self.time(update),
            "log_prob": self.time(partial(contract.forward, model, split.parts)),
        }
        return Passes(max_tokens, len(split.parts), seconds, module.clock.peak_memory() / 2**30)

    def time(self, run: Any) -> float:
        """Seconds of one run, warm."""
        for _ in range(2):
            run()
        start = now()
        for _ in range(self.arguments.steps):
            run()
        return (now() - start) / self.arguments.steps


def make_experience(arguments: argparse.Namespace, module: SFTModule, rank: int) -> Experience:
    """Made-up responses of many lengths."""
    generator = torch.Generator().manual_seed(rank)
    count, prompt, response = arguments.sequences, arguments.prompt, arguments.length - arguments.prompt
    lengths = torch.randint(response // 8, response + 1, (count,), generator=generator)
    mask = torch.arange(response) < lengths[:, None]
    vocab = module.policy.backbone.config.vocab_size
    ids = torch.randint(0, vocab, (count, prompt + response), generator=generator)
    numbers = torch.randn(count, response, generator=generator)
    return Experience(
        input_ids=ids,
        attention_mask=torch.cat([torch.ones(count, prompt, dtype=torch.bool), mask], dim=1),
        response_mask=mask,
        rollout_log_probs=numbers - 12,
        old_log_probs=numbers - 12,
        advantages=numbers,
    ).to(module.device)


def measure(arguments: argparse.Namespace, *, packing: Any, checkpointing: bool) -> list[Result]:
    """Both passes of one setting, in each size."""
    timer = PassTimer(arguments)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    trainer = quiet_trainer(
        arguments,
        chosen_strategy(arguments),
        timer,
        devices=arguments.devices,
        precision=arguments.precision,
        max_steps=1,
    )
    config = ModelConfig(
        path=str(arguments.model),
        optim=OptimConfig(lr=1e-6),
        dtype="bfloat16" if arguments.precision == "bf16-true" else "float32",
        lora=LoraConfig(rank=arguments.lora_rank) if arguments.lora_rank else None,
        activation_checkpointing="full" if checkpointing else "none",
        packing=packing,
    )
    module = SFTModule(config)
    shape = read_config(arguments.model)
    trainer.fit(module, random_batches(shape.vocab_size, 64, 1, sharing=arguments.sequence_parallel))
    parameters = sum(parameter.numel() for parameter in module.parameters())
    pairs = 12 * shape.num_hidden_layers * shape.hidden_size
    flops = sum(length * (6 * parameters + pairs * length) for length in timer.lengths) / arguments.sequence_parallel
    tokens = sum(timer.lengths) * trainer.world_size // arguments.sequence_parallel
    common = {"packing": packing, "checkpointing": checkpointing, "devices": trainer.world_size}
    return [summarize(passes, tokens=tokens, flops=flops, size=size, **common) for size, passes in timer.passes.items()]


def summarize(passes: Passes, *, tokens: int, flops: float, **settings: Any) -> Result:
    """Speeds and shares of the peak; ranks are taken to have as many tokens as rank 0.

    Args:
        passes: What was measured.
        tokens: Of all devices.
        flops: Of an update of one device.
        settings: What was asked for.
    """
    update, log_prob = passes.seconds["update"], passes.seconds["log_prob"]
    return Result(
        **settings,
        max_tokens=passes.max_tokens,
        update_tokens_per_second=round(tokens / update, 1),
        log_prob_tokens_per_second=round(tokens / log_prob, 1),
        ratio=round(update / log_prob, 2),
        update_mfu=round(flops / update / PEAK_FLOPS, 4),
        log_prob_mfu=round(flops / 3 / log_prob / PEAK_FLOPS, 4),
        peak_gib=round(passes.peak_gib, 2),
        micro_batches=passes.count,
    )


def main() -> None:
    """Measure with and without packing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="for the model")
    parser.add_argument("--shape", choices=list(SHAPES), default="0.6b")
    parser.add_argument("--lora-rank", type=int, default=0, help="0 trains all weights")
    parser.add_argument("--strategy", choices=["auto", *STRATEGIES], default="fsdp")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--sequence-parallel", type=int, default=1, help="ranks that share each sequence, under `fsdp`")
    parser.add_argument("--sequences", type=int, default=16, help="of the mini-batch on one rank")
    parser.add_argument("--length", type=int, default=8192, help="longest prompt and response, in tokens")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--sizes", nargs="+", default=["auto"], help="of a pass: tokens, `8rows`, or what PPO chooses")
    parser.add_argument("--packing", choices=["always", "never"], nargs="+", default=["always"])
    parser.add_argument("--checkpointing", choices=["full", "none"], nargs="+", default=["none"])
    parser.add_argument("--steps", type=int, default=3, help="counted runs of each pass")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="blocks, under `fsdp`")
    parser.add_argument("--reshard", action=argparse.BooleanOptionalAction, default=False, help="after forward")
    parser.add_argument("--accelerator", default="gpu")
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    arguments.model = arguments.folder / f"qwen3-{arguments.shape}-random"
    write_model(arguments.model, arguments.shape)
    results = []
    for packing in arguments.packing:
        for checkpointing in arguments.checkpointing:
            measured = measure(arguments, packing=packing, checkpointing=checkpointing == "full")
            results += [asdict(result) for result in measured]
            for result in results[-len(measured) :]:
                show(json.dumps(result))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    report = json.dumps({"device": device, "torch": torch.__version__, "results": results})
    if arguments.out is not None and os.environ.get("LOCAL_RANK", "0") == "0":
        arguments.out.write_text(report)


if __name__ == "__main__":
    main()
