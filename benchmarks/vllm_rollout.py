"""GRPO steps with vLLM on the training GPU: where the time goes, and how fast the engine is beside bare vLLM.

    python benchmarks/vllm_rollout.py --out results.json          # one H100: 64 prompts x 8 samples, 200 + 512 tokens
    python benchmarks/vllm_rollout.py --tiny --accelerator cpu    # every line of it, with a small model
    python benchmarks/vllm_rollout.py --shape 7b --sync-only --precision bf16-true    # no training, for lack of memory
    python benchmarks/vllm_rollout.py --devices 2 --tensor-parallel-size 2            # one engine on two cards
    python benchmarks/vllm_rollout.py --beside-gpus 1 --transfer nccl --sync-only     # an engine on a card of its own
    python benchmarks/vllm_rollout.py --trl gpu_trl_bench.py                          # TRL's trainer first, then ours

The model has random weights in the shape of Qwen2-0.5B (or of a 7B with ``--shape 7b``) and a tokenizer made here,
unless ``--model`` and ``--prompt-file`` name a trained one and its prompts; nothing is downloaded. Sizes are those of
`gpu_trl_bench.py`, which measures TRL's GRPOTrainer: compare on one card.

* ``step``: median seconds of an iteration inside `Trainer.fit`, and of its phases (``timing_s/*``);
* ``engine``: response tokens per second of our engine's `generate`, and of vLLM's own `LLM.generate` with the same
  prompts, with and without a seed for each response;
* ``sync``: seconds to bring all weights into the engine, to wake it and to put it to sleep;
* ``trl``: TRL's seconds for a step, in a process of its own on the same card, and how much sooner ours is done.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import string
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2Tokenizer
from typing_extensions import override

from verl_lightning.algorithms.advantages.grpo import GRPO
from verl_lightning.algorithms.corrections.truncated_importance_sampling import TruncatedImportanceSampling
from verl_lightning.callbacks import VLLMRollout
from verl_lightning.callbacks.placement import Beside
from verl_lightning.data import PromptDataModule
from verl_lightning.models.config import ModelConfig, OptimConfig
from verl_lightning.modules import PPOModule
from verl_lightning.modules.ppo_config import UpdateConfig
from verl_lightning.rewards.pool import RewardConfig
from verl_lightning.rollout.base import Request, SamplingConfig
from verl_lightning.rollout.completions import answer, make_requests, wait_for
from verl_lightning.rollout.vllm_config import SpeculationConfig
from verl_lightning.strategies import STRATEGIES
from verl_lightning.types import PromptBatch

SHAPES = {
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
           "initializer_range": 0.01},  # at twice the width, logits as far apart as those of the smaller one
    "small": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": True},
    "tiny": {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": True},
}  # fmt: skip
SPECIAL = ["<pad>", "<bos>", "<eos>"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def even_length(sample: Any, seconds: float = 0.0) -> float:
    """A reward that varies: whether the response has an even number of characters.

    Args:
        sample: The response.
        seconds: Of waiting, as for a program that is run.
    """
    time.sleep(seconds)
    return float(len(sample.response) % 2 == 0)


def ragged_length(seed: int, mean: float) -> int:
    """Tokens of a response: exponentially distributed, whose coefficient of variation is 1, from 1 on."""
    return 1 + int(random.Random(seed).expovariate(1 / mean))


class RaggedRollout(VLLMRollout):
    """Has each training response end at a length of its own."""

    mean_length = 0.0
    """Mean of the lengths, in tokens; 0 leaves all at the longest."""

    @override
    def requests_of(
        self, module: Any, batch: PromptBatch, sampling: SamplingConfig, purpose: str, turn: int
    ) -> Sequence[Request]:
        requests = super().requests_of(module, batch, sampling, purpose, turn)
        if not self.mean_length or purpose != "train":
            return requests
        lengths = [min(sampling.max_new_tokens, ragged_length(each.seed, self.mean_length)) for each in requests]
        return [
            replace(each, sampling=replace(each.sampling, max_new_tokens=length))
            for each, length in zip(requests, lengths, strict=True)
        ]


def write_model(folder: Path, shape: str) -> None:
    """A random model and a tokenizer of bytes, unless they are there."""
    if (folder / "config.json").exists():
        return
    torch.manual_seed(0)
    config = Qwen2Config(**SHAPES[shape], max_position_embeddings=32768, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *characters])}
    tokenizer = Qwen2Tokenizer(
        vocabulary, [], pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token=None, padding_side="left"
    )
    tokenizer.chat_template = TEMPLATE
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # seven billion random numbers take a while
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_prompts(file: Path, count: int, length: int) -> None:
    """Prompts of random letters, a token each, in verl's schema."""
    letters = random.Random(0)
    with file.open("w") as lines:
        for _ in range(count):
            text = "".join(letters.choices(string.ascii_letters, k=length))
            row = {"data_source": "bench", "prompt": [{"role": "user", "content": text}]}
            lines.write(json.dumps(row | {"reward_model": {"ground_truth": ""}}) + "\n")


class Meter(Callback):
    """Keeps the metrics of each step, then measures the engine alone.

    Args:
        rollout: Whose engine.
        repeats: Measurements of each kind; the median counts.
        engine_length: Tokens of each response where the engine is measured.
        measures_bare: Whether vLLM by itself is measured too.
    """

    def __init__(self, rollout: VLLMRollout, repeats: int, engine_length: int, *, measures_bare: bool) -> None:
        self.rollout = rollout
        self.repeats = repeats
        self.engine_length = engine_length
        self.measures_bare = measures_bare
        self.steps: list[dict[str, float]] = []
        self.ends: list[float] = []
        self.engine: dict[str, float] = {}
        self.sync: dict[str, float] = {}

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        synchronize()
        self.ends.append(time.perf_counter())
        self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        phases = {
            n.removeprefix("timing_s/"): round(v, 3) for n, v in self.steps[-1].items() if n.startswith("timing_")
        }
        print(f"step {len(self.steps)}: {phases}", flush=True)  # noqa: T201
        self.batch = batch

    @override
    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._measure_sync(pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with self.rollout.alone(pl_module):
            self._measure_sync(pl_module)
        if self.rollout.placement is None:
            self._measure_engine(self.batch)

    def _measure_sync(self, module: Any) -> None:
        """Weights into an engine that sleeps, with and without waking it; then back to sleep."""
        engine = self.rollout._vllm

        def load() -> None:
            self.rollout.sync_weights(module)

        wake_and_load, plain, sleep = [], [], []
        for _ in range(self.repeats):
            engine.sleep()
            wake_and_load.append(seconds(load))
            plain.append(seconds(load))
            sleep.append(seconds(engine.sleep))
            load()
        self.sync = {
            "wake_and_load_s": statistics.median(wake_and_load),
            "load_s": statistics.median(plain),
            "sleep_s": statistics.median(sleep),
        }

    def _measure_engine(self, batch: PromptBatch) -> None:
        """Our `generate` and vLLM's own on the same prompts, in turns; of all ranks that share an engine together."""
        from vllm import SamplingParams

        engine, sampling = self.rollout._vllm, replace(self.rollout.sampling, max_new_tokens=self.engine_length)
        prompts, sharing = batch.prompts(), self.rollout.tensor_parallel_size
        seeds = [[1000 * row + sample for sample in range(sampling.num_samples)] for row in range(len(prompts))]
        tokens = [{"prompt_token_ids": row} for row in prompts]
        # Ranks that share an engine ask it for as much: for the timing, this rank's prompts stand for all of them.
        requests = [request for request in tokens for _ in range(sampling.num_samples)] * sharing
        options = {"max_tokens": sampling.max_new_tokens, "temperature": 1.0, "logprobs": 0, "detokenize": False,
                   "ignore_eos": True, "stop_token_ids": engine.config.eos_token_ids}  # fmt: skip

        def ours() -> int:
            asked = make_requests(prompts, seeds, sampling) * sharing
            return sum(len(completion.token_ids) for completion in wait_for(answer(engine.generate, asked)))

        def bare(seeded: bool) -> int:
            flat = [seed for row in seeds for seed in row] * sharing
            params = [SamplingParams(seed=seed if seeded else None, **options) for seed in flat]
            outputs = engine._llm.generate(requests, params, use_tqdm=False)
            return sum(len(output.outputs[0].token_ids) for output in outputs)

        runs: dict[str, Callable[[], int]] = {"ours": ours}
        if self.measures_bare:
            runs |= {"bare_seeded": lambda: bare(True), "bare": lambda: bare(False)}
        speeds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(self.repeats):
            for name, run in runs.items():
                engine.drop_caches()
                speeds[name].append(rate(run))
        self.engine = {f"{name}_tokens_per_s": round(statistics.median(values), 1) for name, values in speeds.items()}


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(work: Callable[[], Any]) -> float:
    """How long some work takes, the device's part included."""
    synchronize()
    start = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - start


def rate(work: Callable[[], int]) -> float:
    """What some work yields per second."""
    start = time.perf_counter()
    count = work()
    return count / (time.perf_counter() - start)


def run_trl(script: Path, folder: Path, *, response_length: int, micro_batch_size: int) -> float:
    """Seconds of TRL's median step.

    Args:
        script: `gpu_trl_bench.py`, of 64 prompts with 8 samples and 200 tokens each.
        folder: For its model.
        response_length: Tokens.
        micro_batch_size: Sequences.
    """
    (folder / "work").mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(script.resolve()), str(response_length), str(micro_batch_size)]
    output = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True).stdout
    found = re.search(r"TRL median step ([\d.]+)", output)
    if found is None:
        raise RuntimeError(f"`{script}` did not print `TRL median step`, but: {output[-500:]}")
    return float(found[1])


def compare_with_trl(arguments: argparse.Namespace) -> dict[str, Any]:
    """TRL's step, then ours, of the same sizes."""
    if arguments.prompts * arguments.samples != 512 and not arguments.tiny:
        raise ValueError("`--trl` measures 64 prompts with 8 samples each; leave `--prompts` and `--samples` alone.")
    sizes = {"response_length": arguments.response_length, "micro_batch_size": arguments.micro_batch_size}
    seconds_of_trl = run_trl(arguments.trl, arguments.folder, **sizes)
    ours = measure(arguments)
    return ours | {"trl": {"step_s": round(seconds_of_trl, 3), "speedup": round(seconds_of_trl / ours["step_s"], 2)}}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """One fit."""
    folder, prompts = given_or_made(arguments)
    sampling = SamplingConfig(num_samples=arguments.samples, max_new_tokens=arguments.response_length)
    beside = arguments.beside_gpus
    rollout = RaggedRollout(
        sampling=sampling,
        val_sampling=SamplingConfig(max_new_tokens=16) if arguments.sync_only else sampling,
        gpu_memory_utilization=arguments.gpu_memory_utilization or None,
        enforce_eager=arguments.tiny or arguments.sync_only,
        tensor_parallel_size=arguments.tensor_parallel_size,
        speculation=None if arguments.speculate is None else SpeculationConfig(method=arguments.speculate),
        placement=None if beside is None else Beside(gpus=beside, transfer=arguments.transfer),
        max_staleness=arguments.max_staleness,
        in_flight=arguments.in_flight if arguments.max_staleness else "finish",
    )
    rollout.mean_length = arguments.mean_length
    length = arguments.engine_length or arguments.response_length
    meter = Meter(rollout, arguments.repeats, length, measures_bare=arguments.bare)
    own = STRATEGIES.get(arguments.strategy)
    options = {"compile": arguments.compile, "reshard_after_forward": False} if arguments.strategy == "fsdp" else {}
    trainer = Trainer(
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        strategy="auto" if own is None else own(**options),
        precision=arguments.precision,
        max_steps=arguments.steps,
        limit_val_batches=1 if arguments.sync_only else 0,
        callbacks=[rollout, meter],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    module = PPOModule(
        ModelConfig(
            path=str(folder),
            dtype="bfloat16" if arguments.precision == "bf16-true" else "float32",
            optim=OptimConfig(lr=1e-6),
            activation_checkpointing="full" if arguments.gradient_checkpointing else "none",
        ),
        RewardConfig(
            function=f"{Path(__file__).resolve()}:even_length",
            arguments={"seconds": arguments.reward_seconds},
            num_workers=arguments.reward_workers,
        ),
        GRPO(),
        corrections=[TruncatedImportanceSampling()] if arguments.max_staleness else None,
        update=UpdateConfig(mini_batch_size=arguments.prompts, micro_batch_size=arguments.micro_batch_size),
    )
    data = PromptDataModule(
        str(prompts),
        str(prompts),
        prompts_per_step=arguments.prompts,
        val_batch_size=arguments.prompts,
        max_prompt_length=arguments.prompt_length,
    )
    if arguments.sync_only:
        trainer.validate(module, datamodule=data, verbose=False)
        return about(meter, module, arguments)
    trainer.fit(module, datamodule=data)
    return about(meter, module, arguments) | report(meter, arguments)


def given_or_made(arguments: argparse.Namespace) -> tuple[Path, Path]:
    """The folder of the model and the file of the prompts.

    Raises:
        SystemExit: If one is given without the other: made prompts are of bytes, which a real tokenizer joins.
    """
    if (arguments.model is None) != (arguments.prompt_file is None):
        raise SystemExit("`--model` and `--prompt-file` need each other.")
    if arguments.model is not None:
        return arguments.model, arguments.prompt_file
    shape = "tiny" if arguments.tiny else arguments.shape
    folder, prompts = arguments.folder / shape, arguments.folder / f"prompts-{shape}.jsonl"
    write_model(folder, shape)
    write_prompts(prompts, arguments.prompts * (arguments.steps + 1), arguments.prompt_length)
    return folder, prompts


def about(meter: Meter, module: PPOModule, arguments: argparse.Namespace) -> dict[str, Any]:
    """Where this was measured, and what is measured without training."""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "command": " ".join(sys.argv),
        "model": str(arguments.model or ("tiny" if arguments.tiny else arguments.shape)),
        "sync": {name: round(value, 4) for name, value in meter.sync.items()},
        "peak_gib": round(module.clock.peak_memory() / 2**30, 1),
    }


def report(meter: Meter, arguments: argparse.Namespace) -> dict[str, Any]:
    """What was measured, in seconds and tokens per second; the first steps, which compile, do not count."""
    counted = meter.steps[arguments.warmup :]
    ends = meter.ends[arguments.warmup - 1 :]
    step = statistics.median(after - before for before, after in zip(ends, ends[1:], strict=False))
    names = sorted(name for name in counted[-1] if name.startswith("timing_s/"))
    phases = {name.removeprefix("timing_s/"): statistics.median(row[name] for row in counted) for name in names}
    tokens = sum(row["response_length/mean"] for row in counted) * arguments.prompts * arguments.samples
    return {
        "step_s": round(step, 3),
        "response_tokens_per_s": round(tokens / (ends[-1] - ends[0]), 1),
        "phases_s": {name: round(value, 3) for name, value in phases.items()},
        "log_prob_gap": counted[-1]["rollout_corr/abs_log_prob_gap"],
        "canary_gap": counted[-1]["rollout/canary_gap"],
        "engine": meter.engine,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/vllm-bench"), help="for the model and the prompts")
    parser.add_argument("--shape", choices=["0.5b", "7b"], default="0.5b")
    parser.add_argument("--tiny", action="store_true", help="a small model, eager")
    parser.add_argument("--model", type=Path, help="folder of a trained one, to sample as real runs do")
    parser.add_argument("--prompt-file", type=Path, help="JSON lines in verl's schema, for `--model`")
    parser.add_argument("--strategy", choices=["auto", *STRATEGIES], default="fsdp")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="devices that share an engine")
    parser.add_argument("--beside-gpus", type=int, nargs="*", help="of engines beside the trainer; none: on the CPU")
    parser.add_argument("--transfer", choices=["auto", "host", "nccl", "ipc"], default="auto", help="of weights there")
    parser.add_argument("--max-staleness", type=int, default=0, help="sample so many steps ahead; needs engines beside")
    parser.add_argument("--in-flight", choices=["finish", "continue", "abort"], default="continue", help="when it does")
    parser.add_argument("--trl", type=Path, help="`gpu_trl_bench.py`, to run before")
    parser.add_argument("--sync-only", action="store_true", help="no training: how long weights take")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--accelerator", default="gpu")
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="blocks, under `fsdp`")
    parser.add_argument("--gradient-checkpointing", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--prompts", type=int, default=64, help="of a step")
    parser.add_argument("--samples", type=int, default=8, help="for each prompt")
    parser.add_argument("--prompt-length", type=int, default=200, help="tokens")
    parser.add_argument("--response-length", type=int, default=512, help="tokens")
    parser.add_argument("--mean-length", type=float, default=0.0, help="of responses of uneven lengths; 0: all even")
    parser.add_argument("--engine-length", type=int, default=0, help="of responses where the engine is measured alone")
    parser.add_argument("--bare", action=argparse.BooleanOptionalAction, default=True, help="measure vLLM itself too")
    parser.add_argument("--reward-seconds", type=float, default=0.0, help="of each reward")
    parser.add_argument("--reward-workers", type=int, default=2)
    parser.add_argument("--micro-batch-size", type=int, default=16, help="sequences")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.35, help="0: by the memory plan")
    parser.add_argument("--speculate", choices=["ngram"], help="guess tokens ahead")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2, help="steps that do not count; at least 1")
    parser.add_argument("--repeats", type=int, default=3, help="of each measurement of the engine")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(measure(arguments) if arguments.trl is None else compare_with_trl(arguments), indent=1)
    print(text)  # noqa: T201
    if arguments.out is not None:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
