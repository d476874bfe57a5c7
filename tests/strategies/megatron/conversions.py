"""Takes tiny models from Hugging Face to Megatron and back in one process, and saves what became of them."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from tests.families.catalog import write_folder
from tests.strategies.megatron.cpu import pretend_cuda
from verl_lightning.models.build import build_scorer
from verl_lightning.models.config import ModelConfig
from verl_lightning.models.hf_folder import stored_weights
from verl_lightning.models.scorer import Head
from verl_lightning.strategies import MegatronStrategy
from verl_lightning.strategies.megatron.checkpoint import save_folder
from verl_lightning.strategies.megatron.config import ParallelSizes
from verl_lightning.strategies.megatron.optimizer import MegatronOptimizer
from verl_lightning.strategies.megatron.portable import read_portable
from verl_lightning.strategies.megatron.runtime import start_model_parallel
from verl_lightning.strategies.megatron.scorer import MegatronScorer
from verl_lightning.types import TokenBatch

SHAPE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
REFUSED = (("qwen2", "megatron_bridge"), ("qwen3_moe", "megatron_bridge"), ("glm4_moe", "megatron_bridge"))
REFUSED += (("seed_oss", "megatron_bridge"), ("nemotron", "megatron_bridge"), ("qwen2", "mbridge"))
BRIDGES: tuple[Literal["megatron_bridge", "mbridge"], ...] = ("megatron_bridge", "mbridge")
KINDS: dict[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
}


def write_model(folder: Path, kind: str, *, tied: bool) -> Path:
    """A random model in float32."""
    torch.manual_seed(0)
    extra = EXPERTS if kind == "qwen3_moe" else {}
    config = KINDS[kind](**SHAPE, **extra, tie_word_embeddings=tied)
    path = folder / f"{kind}-{'tied' if tied else 'untied'}"
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


def uneven_batch() -> TokenBatch:
    """Prompts with padding before them, responses with padding after them."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 101, (3, 12), generator=generator)
    first, last = torch.tensor([0, 2, 4]), torch.tensor([12, 9, 11])
    columns = torch.arange(12)
    mask = (columns >= first[:, None]) & (columns < last[:, None])
    return TokenBatch(input_ids=ids, attention_mask=mask, response_mask=mask[:, 6:], temperature=0.7)


def convert(path: Path, strategy: MegatronStrategy) -> dict[str, Any]:
    """Exported weights beside the folder's, and scores beside those of transformers."""
    config = ModelConfig(path=str(path))
    model = strategy.make_model(config, "policy", trainable=False)
    batch = uneven_batch()
    (scores,) = strategy.forward(model, [batch], with_entropy=True)
    with torch.no_grad():
        expected = build_scorer(config, "policy", trainable=False)(batch, with_entropy=True)
    mask = batch.response_mask
    named = dict(strategy.named_weights(model))
    return {
        "exported": dict(stored_weights(model.backbone, named.items())),
        "stored": load_file(path / "model.safetensors"),
        "names": set(named),
        "parameters": {name for name, _ in model.backbone.named_parameters()},
        "log_probs": (scores.log_probs[mask], expected.log_probs[mask]),  # type: ignore[index]
        "entropy": (scores.entropy[mask], expected.entropy[mask]),  # type: ignore[index]
    }


def refusals(folder: Path, strategies: dict[str, MegatronStrategy]) -> dict[str, str]:
    """What is said of models that Megatron, or a bridge, would make another of, or can't make."""
    said = {}
    for family, bridge in REFUSED:
        path = write_folder(folder / family, family)
        try:
            strategies[bridge].make_model(ModelConfig(path=str(path)), "policy", trainable=False)
        except ValueError as error:
            said[f"{family} by {bridge}"] = str(error)
    return said


def take_apart(path: Path, strategy: MegatronStrategy, head: Head, folder: Path) -> dict[str, Any]:
    """The state in a checkpoint of a model, read without Megatron, beside that of transformers' model."""
    config = ModelConfig(path=str(path))
    model = cast(MegatronScorer, strategy.make_model(config, head, trainable=True))
    optimizer = cast(MegatronOptimizer, strategy.make_optimizer(model, config.optim))
    optimizer.allocate_state()
    for index, slots in enumerate(optimizer.inner.chained_optimizers[0].optimizer.state.values()):
        slots["exp_avg"].fill_(index)  # to be told apart
    save_folder({}, folder, roles={"actor": model}, optimizers=[optimizer], is_writer=True)
    checkpoint = read_portable(folder, weights_only=True)
    expected = build_scorer(config, head, trainable=True)
    return {
        "state": checkpoint["state_dict"],
        "expected": {f"actor.{name}": weight for name, weight in expected.state_dict().items()},
        "moments": checkpoint["optimizer_states"][0]["state"],
        "names": [name for name, _ in expected.named_parameters()],
    }


class Kill:
    """Ends this process when it is written to a file."""

    def __reduce__(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def convert_all(folder: Path) -> None:
    """Converts each kind, tied and untied, by each bridge; takes checkpoints apart; dies while it replaces one."""
    pretend_cuda()
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    start_model_parallel(ParallelSizes(), seed=0, timeout=timedelta(seconds=100))
    strategies: dict[str, MegatronStrategy] = {name: MegatronStrategy(bridge=name) for name in BRIDGES}
    for strategy in strategies.values():
        strategy.parallel_devices = [torch.device("cpu")]
    results: dict[str, Any] = {}
    for kind in KINDS:
        for tied in (True, False):
            path = write_model(folder, kind, tied=tied)
            for name, strategy in strategies.items():
                results[f"{path.name} by {name}"] = convert(path, strategy)
        head: Head = "value" if kind == "qwen2" else "policy"
        results[f"{kind} apart"] = take_apart(path, strategies["megatron_bridge"], head, folder / kind)
    results["refused"] = refusals(folder, strategies)
    results["killed"] = str(folder / "llama")
    torch.save(results, folder / "results.pt")
    model = cast(MegatronScorer, strategy.make_model(ModelConfig(path=str(path)), "policy", trainable=True))
    save_folder({"kill": Kill()}, folder / "llama", roles={"actor": model}, optimizers=[], is_writer=True)
