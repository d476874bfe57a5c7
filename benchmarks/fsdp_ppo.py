"""Speed of PPO's two kinds of passes with `fsdp`: the update (forward, backward, step) and log-probs alone.

On one to four GPUs, from the root of the repository::

    python benchmarks/fsdp_ppo.py --devices 1 --out results.json

A randomly initialised model of Qwen3-0.6B's shape scores made-up responses to prompts of 512 tokens: float32 weights,
bfloat16 compute. Lengths are uniform between an eighth and all of ``--length``, so that packing matters. Model FLOPs
are counted as in `fsdp_sft.py`, for each sequence by its own length; a pass without gradient counts a third.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fsdp_sft import PEAK_FLOPS, chosen_strategy, quiet_trainer, random_batches, show, write_model
from lightning.pytorch import Callback, LightningModule, Trainer
from step_timer import now
from typing_extensions import override

from verl_lightning.algorithms.losses.ppo_clip import PPOClip
from verl_lightning.models.config import ModelConfig, OptimConfig
from verl_lightning.models.pretrained import read_config
from verl_lightning.modules import SFTModule
from verl_lightning.modules.micro_batches import BatchSplitter
from verl_lightning.modules.objectives import Normalizer, PolicyObjective
from verl_lightning.strategies import STRATEGIES
from verl_lightning.types import Experience


@dataclass(frozen=True, kw_only=True)
class Result:
    """One row of the table; tokens are real ones, of all devices together."""

    packing: str
    """The model's option."""

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


class PassTimer(Callback):
    """Once `fit` has made everything, times passes over one mini-batch.

    Args:
        arguments: Of the command line.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.seconds: dict[str, float] = {}
        self.lengths: list[int] = []  # of this rank's sequences
        self.num_micro_batches = 0

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, SFTModule)
        contract, model = pl_module.contract, pl_module.policy
        batch = make_experience(self.arguments, pl_module, contract.data_parallel_rank)
        self.lengths = batch.attention_mask.sum(-1).tolist()
        splitter = BatchSplitter(contract=contract, micro_batch_size=8, max_tokens=self.arguments.max_tokens)
        (split,) = splitter.split(model, [batch])
        self.num_micro_batches = len(split.parts)
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

        self.seconds["update"] = self.time(update)
        self.seconds["log_prob"] = self.time(partial(contract.forward, model, split.parts))

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


def measure(arguments: argparse.Namespace, *, packing: Any, checkpointing: bool) -> Result:
    """Both passes of one setting."""
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
        activation_checkpointing="full" if checkpointing else "none",
        packing=packing,
    )
    module = SFTModule(config)
    shape = read_config(arguments.model)
    trainer.fit(module, random_batches(shape.vocab_size, 64, 1, sharing=arguments.sequence_parallel))
    return summarize(
        timer,
        module,
        shape,
        packing=packing,
        checkpointing=checkpointing,
        devices=trainer.world_size,
        sharing=arguments.sequence_parallel,
    )


def summarize(
    timer: PassTimer,
    module: SFTModule,
    shape: Any,
    *,
    packing: str,
    checkpointing: bool,
    devices: int,
    sharing: int,
) -> Result:
    """Speeds and shares of the peak; ranks are taken to have as many tokens as rank 0, which ``sharing`` share."""
    parameters = sum(parameter.numel() for parameter in module.parameters())
    pairs = 12 * shape.num_hidden_layers * shape.hidden_size
    flops = sum(length * (6 * parameters + pairs * length) for length in timer.lengths)
    flops /= sharing
    tokens = sum(timer.lengths) * devices // sharing
    update, log_prob = timer.seconds["update"], timer.seconds["log_prob"]
    return Result(
        packing=packing,
        checkpointing=checkpointing,
        devices=devices,
        update_tokens_per_second=round(tokens / update, 1),
        log_prob_tokens_per_second=round(tokens / log_prob, 1),
        ratio=round(update / log_prob, 2),
        update_mfu=round(flops / update / PEAK_FLOPS, 4),
        log_prob_mfu=round(flops / 3 / log_prob / PEAK_FLOPS, 4),
        peak_gib=round(module.clock.peak_memory() / 2**30, 2),
        micro_batches=timer.num_micro_batches,
    )


def main() -> None:
    """Measure with and without packing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("/tmp/qwen3-0.6b-random"), help="folder; made if absent")
    parser.add_argument("--strategy", choices=["auto", *STRATEGIES], default="fsdp")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--sequence-parallel", type=int, default=1, help="ranks that share each sequence, under `fsdp`")
    parser.add_argument("--sequences", type=int, default=16, help="of the mini-batch on one rank")
    parser.add_argument("--length", type=int, default=8192, help="longest prompt and response, in tokens")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--max-tokens", type=int, default=16384, help="budget of a micro-batch")
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
    write_model(arguments.model)
    results = []
    for packing in arguments.packing:
        for checkpointing in arguments.checkpointing:
            results.append(asdict(measure(arguments, packing=packing, checkpointing=checkpointing == "full")))
            show(json.dumps(results[-1]))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    report = json.dumps({"device": device, "torch": torch.__version__, "results": results})
    if arguments.out is not None and os.environ.get("LOCAL_RANK", "0") == "0":
        arguments.out.write_text(report)


if __name__ == "__main__":
    main()
