"""The memory plan counts what autograd keeps, what a strategy shards, and tells what to change."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from rich.console import Console
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from tests.runs import make_chats, make_model_config, make_ppo, make_prompts, make_rollout, make_sft, make_trainer
from verl_lightning.algorithms.advantages.gae import GAE
from verl_lightning.models.build import build_scorer
from verl_lightning.models.config import LoraConfig
from verl_lightning.models.scorer import TokenScorer
from verl_lightning.models.size import Compute, ModelSize, model_size
from verl_lightning.modules.ppo_config import CriticConfig, KLConfig
from verl_lightning.strategies.megatron.config import DataParallelConfig, ParallelSizes, TransformerOptions
from verl_lightning.strategies.megatron.memory import megatron_memory
from verl_lightning.strategies.memory import ModelMemory, sharded_memory, whole_memory
from verl_lightning.telemetry.memory_plan import GIB, EngineMemory, MemoryPlan, amount, memory_plan

FLOAT32 = Compute(width=4, stream_width=4)
SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}


def kept_bytes(model: nn.Module, tokens: int) -> int:
    """What autograd saves of a trunk's forward pass beside its weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage  # held, so that its place is not used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.base_model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen3Config])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_keeps_what_autograd_saves(config_class: Any, dtype: torch.dtype) -> None:
    """Three blocks less one: what lies outside of blocks falls out."""
    few, many = (
        AutoModelForCausalLM.from_config(config_class(num_hidden_layers=count, head_dim=16, vocab_size=32, **SIZES))
        for count in (1, 3)
    )
    measured = (kept_bytes(many.to(dtype), 256) - kept_bytes(few.to(dtype), 256)) / 2
    compute = Compute(width=dtype.itemsize, stream_width=dtype.itemsize)
    assert 256 * model_size(TokenScorer(many, None, "policy")).block_bytes(compute) == pytest.approx(measured, rel=0.01)


SIZE = ModelSize(
    weights=1000,
    trainable=1000,
    weight_width=4,
    num_blocks=4,
    recomputed_blocks=0,
    largest_block=200,
    outside=200,
    hidden=8,
    queries=8,
    keys=8,
    heads=2,
    feed_forward=16,
    normalizes_heads=False,
    vocabulary=100,
    chunks_logits=True,
)
BLOCK = 8 * 16 + 4 * (32 + 64 + 16) + 16
"""Of `SIZE` in float32: two norms of 8 values, 4 + 4 bytes each; 4 * (8 + 8) and 4 * 16 values, two inputs; sums."""


@pytest.mark.parametrize(("recomputed", "expected"), [(0, 4 * BLOCK), (4, 4 * 32 + BLOCK), (2, 2 * 32 + 3 * BLOCK)])
def test_recomputed_blocks_keep_their_input_and_one_at_work(recomputed: int, expected: int) -> None:
    size = dataclasses.replace(SIZE, recomputed_blocks=recomputed)
    assert size.activation_bytes(10, FLOAT32) == 10 * expected


def test_a_whole_model_takes_sixteen_bytes_a_weight() -> None:
    memory = whole_memory(SIZE, FLOAT32, 10, keeps_gradients=False)
    assert (memory.weights, memory.gradients, memory.optimizer, memory.gathered) == (4000, 4000, 8000, 0)
    assert (memory.resting, memory.working) == (12000, 4000 + 40 * BLOCK + memory.head)


def test_shards_gather_two_blocks_and_what_lies_outside() -> None:
    """In bfloat16: 2 bytes of 200 + 400 gathered weights, 4 of a block's gradients, 2 of those outside."""
    options = {"shards": 4, "keeps_gathered": False, "accumulates_whole": False, "on_host": False}
    compute = Compute(width=2, stream_width=2)
    memory = sharded_memory(SIZE, compute, None, **options)
    assert (memory.weights, memory.gradients, memory.optimizer) == (1000, 1000, 2000)
    assert memory.gathered == 2 * 600 + 4 * 200 + 2 * 200
    assert memory.activations is None
    assert sharded_memory(SIZE, compute, None, **options | {"accumulates_whole": True}).gathered == 1200 + 4000
    assert sharded_memory(SIZE, compute, None, **options | {"on_host": True}).resting == 0


def test_megatron_shares_layers_and_the_optimizer() -> None:
    """250 weights on each rank: 2 bytes, 4 of gradients, and 12 of the optimizer's on two ranks; half of the tokens."""
    memory = megatron_memory(
        SIZE,
        20,
        sizes=ParallelSizes(tensor=2, pipeline=2),
        transformer=TransformerOptions(),
        ddp=DataParallelConfig(),
        optimizer_shards=2,
        is_bf16=True,
    )
    assert (memory.weights, memory.gradients, memory.optimizer) == (500, 1000, 1500)
    assert memory.resting == 3000
    assert memory.activations == SIZE.activation_bytes(10, Compute(width=2, stream_width=2, is_fused=True))


def test_a_frozen_model_holds_its_weights_alone() -> None:
    memory = whole_memory(dataclasses.replace(SIZE, trainable=0), FLOAT32, 10, keeps_gradients=False)
    assert (memory.resting, memory.working) == (4000, 0)


def make_plan(**changes: Any) -> MemoryPlan:
    """Two models in training, which learn one after another, on a device of 40 GiB."""
    actor = ModelMemory(weights=2 * GIB, gradients=2 * GIB, optimizer=4 * GIB, gathered=GIB, activations=10 * GIB)
    critic = dataclasses.replace(actor, activations=20 * GIB)
    options = {"models": {"actor": actor, "critic": critic}, "tokens": 8192, "device": "H100", "device_bytes": 40 * GIB}
    return MemoryPlan(**options | changes)


def test_models_learn_one_after_another() -> None:
    plan = make_plan()
    assert (plan.resting / GIB, plan.learning / GIB, plan.fits) == (12, 12 + 2 + 1 + 20, True)
    assert plan.engine_share(sleeps=True) == pytest.approx(1 - (12 + 1) / 40 - 0.07)
    assert plan.engine_share(sleeps=False) == pytest.approx(1 - 35 / 40 - 0.07)


def test_what_does_not_fit_names_the_keys() -> None:
    plan = make_plan(engine=EngineMemory(sampling=32 * GIB), keys=("`data.batch_size`",))
    warning = "while sampling, about 45.00 GiB of the 40.00 GiB of H100 are needed. Change, the cheapest first: `data"
    assert warning in str(plan.warning())
    assert make_plan().warning() is None


def test_the_table_shows_each_model_and_the_peak() -> None:
    console = Console(width=100, record=True)
    console.print(make_plan(tokens=None).table())
    text = console.export_text()
    assert "critic" in text
    assert "35.00" in text
    assert "tokens of a pass are not known" in text


def test_sft_plans_for_its_longest_batch(tiny_folder: Path, chat_file: Path, tmp_path: Path) -> None:
    """4 chats of 64 tokens; 16 bytes for each weight of the model that is built afterwards."""
    trainer, module, data = make_trainer(tmp_path, max_steps=1), make_sft(tiny_folder), make_chats(chat_file)
    trainer.fit(module, data)
    plan = memory_plan(module)
    weights = sum(weight.numel() for weight in module.parameters())
    assert plan.tokens == 4 * 64
    actor = plan.models["actor"]
    assert (actor.weights, actor.gradients, actor.optimizer) == (4 * weights, 4 * weights, 8 * weights)


def test_ppo_plans_for_each_role(tiny_folder: Path, prompt_file: Path, tmp_path: Path, capsys: Any) -> None:
    critic = CriticConfig(model=make_model_config(tiny_folder))
    module = make_ppo(tiny_folder, critic=critic, advantage=GAE(), kl=KLConfig())
    make_trainer(tmp_path, make_rollout(), max_steps=1).fit(module, make_prompts(prompt_file))
    plan = memory_plan(module)
    assert list(plan.models) == ["actor", "critic", "reference"]
    assert plan.models["reference"].resting == plan.models["actor"].weights
    assert plan.tokens == module.update.micro_batch_size * module.max_tokens
    assert capsys.readouterr().out.count("Memory plan") == 1


def test_adapters_need_little_beside_the_weights(tiny_folder: Path) -> None:
    config = make_model_config(tiny_folder, lora=LoraConfig(rank=2))
    size = model_size(build_scorer(config, "policy", trainable=True))
    trained = sum(p.numel() for p in build_scorer(config, "policy", trainable=True).parameters() if p.requires_grad)
    assert size.trainable == trained < size.weights / 10


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (None, "?"),
        (0, "0"),
        (3 * 2**18, "0.75 MiB"),
        (102 * 2**20, "102.00 MiB"),
        (GIB // 8, "0.12 GiB"),
        (GIB, "1.00 GiB"),
    ],
)
def test_amounts_are_told_in_a_unit_that_shows_them(number: int | None, words: str) -> None:
    assert amount(number) == words


class Plans(Callback):
    """Asks for the plan as training begins."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.plan = memory_plan(pl_module)


def test_the_embedded_engine_holds_a_copy_of_the_policy(tmp_path: Path, tiny_folder: Path, prompt_file: Path) -> None:
    """Beside its cache: 4 prompts x 4 responses of 32 + 6 tokens, 32 keys and values of 4 bytes in two layers."""
    plans, rollout = Plans(), make_rollout(batch_size=1000)
    trainer = make_trainer(tmp_path, rollout, plans, max_steps=1)
    trainer.fit(make_ppo(tiny_folder), datamodule=make_prompts(prompt_file))
    weights = sum(p.nbytes for p in AutoModelForCausalLM.from_pretrained(tiny_folder).parameters())
    cache = 16 * 38 * 2 * 2 * 32 * 4
    assert plans.plan.engine == EngineMemory(sampling=weights + cache, learning=weights)
    assert plans.plan.keys[0] == "`rollout.batch_size`"
