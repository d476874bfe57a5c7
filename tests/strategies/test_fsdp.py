"""What is particular to `fsdp`: its options change speed and memory only, weights stay tied, mistakes are told."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.processes import on_ranks
from tests.runs import Recorder, make_chats, make_model_config, make_sft, make_trainer
from tests.tolerances import assert_near
from verl_lightning.metrics import Metric
from verl_lightning.models.config import ModelConfig
from verl_lightning.strategies import FSDPStrategy
from verl_lightning.telemetry.memory_plan import memory_plan
from verl_lightning.types import TokenBatch

Trained = tuple[list[float], dict[str, Tensor]]


class Inspector(Callback):
    """Looks at the model where it is trained."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        backbone = pl_module.actor.backbone
        self.seen["are_tied"] = backbone.lm_head.weight is backbone.model.embed_tokens.weight
        self.seen["sharded"] = {type(parameter) is DTensor for parameter in map(data_of, pl_module.parameters())}
        self.seen["dtypes"] = {parameter.dtype for parameter in pl_module.parameters()}
        parts = [
            part.to_local() if isinstance(part, DTensor) else part for part in map(data_of, pl_module.parameters())
        ]
        held = sum(part.nbytes for part in parts)
        self.seen["planned"] = memory_plan(pl_module).models["actor"].weights / held
        self.seen["recomputed"] = [layer.gradient_checkpointing for layer in backbone.model.layers]
        backbone.model.layers[1].register_forward_hook(partial(self._look, "block"))
        backbone.model.layers[1].mlp.up_proj.register_forward_hook(partial(self._look, "linear"))

    def _look(self, name: str, module: Any, inputs: Any, output: Tensor) -> None:
        self.seen[name] = output.dtype


def data_of(parameter: Tensor) -> Tensor:
    """A parameter without its wrapper."""
    return parameter.data


def train(
    folder: Path, chats: Path, path: Path, ranks: int, options: dict[str, Any] | None, **changes: Any
) -> tuple[Trained, dict[str, Any]]:
    """Three steps of four chats in two batches each: losses, weights and what was seen."""
    recorder, inspector = Recorder(), Inspector()
    precision, config = changes.pop("precision", "32-true"), make_model_config(folder, **changes)
    trainer = make_trainer(
        path,
        recorder,
        inspector,
        devices=ranks,
        strategy="auto" if options is None else FSDPStrategy(**options),
        accumulate_grad_batches=2,
        precision=precision,
    )
    module = make_sft(folder, actor=config)
    trainer.fit(module, make_chats(chats, batch_size=4 // ranks))
    weights = {name: weight.clone() for name, weight in module.contract.named_weights(module.policy)}
    rounded = dict(module.contract.named_weights(module.policy, torch.bfloat16))
    inspector.seen["are_rounded"] = all(rounded[name].equal(weight.bfloat16()) for name, weight in weights.items())
    return (recorder.column("train/loss"), weights), inspector.seen


@pytest.fixture(scope="module")
def expected(tiny_folder: Path, chat_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """What one process without sharding learns."""
    return on_ranks(1, train, tiny_folder, chat_file, tmp_path_factory.mktemp("auto"), 1, None)[0][0]


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {}),
        (2, {"reshard_after_forward": False}),
        (2, {"accumulate_whole": False}),
        (2, {"cpu_offload": True}),
    ],
)
def test_options_change_no_number(ranks, options, expected, tiny_folder, chat_file, tmp_path):
    for (losses, weights), seen in on_ranks(ranks, train, tiny_folder, chat_file, tmp_path, ranks, options):
        assert_near((losses, weights), expected)
        assert seen["are_tied"]
        assert seen["are_rounded"]
        assert seen["sharded"] == {True}
        assert seen["planned"] == pytest.approx(1.0, rel=0.01)  # some weights don't divide by the ranks


def recompute_every_second(folder: Path, chats: Path, path: Path) -> Any:
    """Two of the four combinations of model and strategy."""
    return train(folder, chats, path, 2, {}, activation_checkpointing=2)


def test_every_second_block_is_recomputed(expected, tiny_folder, chat_file, tmp_path):
    (losses, _), seen = on_ranks(2, recompute_every_second, tiny_folder, chat_file, tmp_path)[0]

    assert seen["recomputed"] == [True, False]
    assert_near(losses, expected[0])


def train_mixed(folder: Path, chats: Path, path: Path, ranks: int, options: dict[str, Any] | None) -> Any:
    """In bfloat16 over float32 weights."""
    return train(folder, chats, path, ranks, options, precision="bf16-mixed")


def test_mixed_precision_computes_in_bfloat16_on_float32_weights(expected, tiny_folder, chat_file, tmp_path):
    (losses, weights), seen = on_ranks(2, train_mixed, tiny_folder, chat_file, tmp_path, 2, {})[0]

    assert seen["dtypes"] == {torch.float32}
    assert (seen["linear"], seen["block"]) == (torch.bfloat16, torch.float32)
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert losses != expected[0]
    assert_near(losses, expected[0], rel=1e-2)  # three decimal digits of bfloat16
    (autocast, _), _ = on_ranks(1, train_mixed, tiny_folder, chat_file, tmp_path / "auto", 1, None)[0]
    assert_near(losses, autocast, rel=3e-3)


def uneven(folder: Path, path: Path) -> tuple[list[int], float]:
    """Scores and gradient norm of seven rows: rank 0 has one micro-batch, rank 1 has three."""
    strategy = FSDPStrategy()
    module = make_sft(folder)
    module.trainer = make_trainer(path, devices=2, strategy=strategy)
    strategy.connect(module)
    strategy.setup_environment()
    model = strategy.make_model(make_model_config(folder), "policy", trainable=True)
    rows = seven_rows()
    parts = (
        [rows.select(slice(0, 1))]
        if strategy.data_parallel_rank == 0
        else [rows.select(slice(i, i + 2)) for i in (1, 3, 5)]
    )
    scores = strategy.forward(model, parts)
    strategy.model = model
    metrics = strategy.forward_backward(model, parts, sum_of_log_probs)
    norm = strategy.gradient_norm(list(model.parameters()))
    assert len(metrics) == len(parts)
    return [len(score.log_probs) for score in scores], float(norm)


def seven_rows() -> TokenBatch:
    """Short sequences of small ids."""
    ids = torch.arange(42).view(7, 6) % 17
    mask = torch.ones(7, 6, dtype=torch.bool)
    return TokenBatch(input_ids=ids, attention_mask=mask, response_mask=mask[:, 1:])


def sum_of_log_probs(scores: Any, batch: TokenBatch) -> tuple[Tensor, dict[str, Metric]]:
    """A loss that depends on no count."""
    return -(scores.log_probs * batch.response_mask).sum(), {}


def test_ranks_with_unequal_micro_batches_wait_for_one_another(tiny_folder, tmp_path):
    from verl_lightning.models.build import build_scorer

    (first, norm), (second, other_norm) = on_ranks(2, uneven, tiny_folder, tmp_path)

    model = build_scorer(make_model_config(tiny_folder), "policy", trainable=True)
    sum_of_log_probs(model(seven_rows()), seven_rows())[0].backward()
    whole = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    assert (first, second) == ([1], [2, 2, 2])
    assert_near((norm, other_norm), (float(whole), float(whole)))


def fail_to_fit(folder: Path, chats: Path, path: Path, changes: dict[str, Any], config: ModelConfig) -> str:
    """The message with which a run is refused."""
    options = {"devices": 2} | changes
    trainer = make_trainer(path, **options)
    with pytest.raises(Exception) as caught:  # noqa: PT011  the caller compares the message
        trainer.fit(make_sft(folder, actor=config), make_chats(chats))
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": 1}, "2 processes were launched, but `trainer.devices` (1)"),
        ({"strategy": FSDPStrategy(replicate_size=3)}, "`fsdp.replicate_size` (3) must divide"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, message, tiny_folder, chat_file, tmp_path):
    settings = {"strategy": FSDPStrategy()} | changes
    arguments = (tiny_folder, chat_file, tmp_path, settings, make_model_config(tiny_folder))
    assert all(said.startswith(message) for said in on_ranks(2, fail_to_fit, *arguments))


def test_every_rank_hears_that_rank_0_cannot_load(tiny_folder, chat_file, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(tiny_folder, broken)
    (broken / "model.safetensors").unlink()
    arguments = (broken, chat_file, tmp_path, {"strategy": FSDPStrategy()}, make_model_config(broken))
    first, second = on_ranks(2, fail_to_fit, *arguments)

    assert "no model could be loaded" in first
    assert "rank 0 could not load" in second


@pytest.mark.parametrize("name", ["replicate_size", "sequence_parallel_size"])
def test_sizes_below_one_are_refused(name):
    with pytest.raises(ValueError, match=f"`fsdp.{name}` must be at least 1, got 0"):
        FSDPStrategy(**{name: 0})


def test_other_precisions_are_refused(tmp_path):
    with pytest.raises(Exception, match="`fsdp` knows `trainer.precision` 32-true and bf16-mixed"):
        make_trainer(tmp_path, devices=1, strategy=FSDPStrategy(), precision="bf16-true")
