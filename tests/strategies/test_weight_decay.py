"""AdamW spares norms and biases as transformers' trainer does, and takes states in which they were in no group of
their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers.trainer_pt_utils import get_parameter_names

from tests.families.catalog import FAMILIES, make_model
from tests.processes import on_ranks
from tests.runs import make_chats, make_model_config, make_sft, make_trainer
from tests.tolerances import assert_near
from verl_lightning.models.config import OptimConfig
from verl_lightning.strategies import DDPStrategy, FSDPStrategy, base
from verl_lightning.strategies.weight_decay import make_groups

THEIRS = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
"""Names of what `Trainer.get_decay_parameter_names` of transformers 5.19 spares beside `nn.LayerNorm`."""

STRATEGIES = {"auto": lambda: "auto", "ddp": DDPStrategy, "fsdp": FSDPStrategy}


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"mamba"}))
def test_what_decays_is_what_trl_decays(family):
    model = make_model(family)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, *spared = make_groups(model, OptimConfig(weight_decay=0.1))

    assert {names[id(parameter)] for parameter in decayed["params"]} == set(
        get_parameter_names(model, [torch.nn.LayerNorm], THEIRS)
    ) & set(names.values())
    assert [group["weight_decay"] for group in (decayed, *spared)] == [0.1, *[0.0] * len(spared)]


def one_group(model, config):
    """All weights in one group, as versions before this had it."""
    return [{"params": [p for p in model.parameters() if p.requires_grad], "weight_decay": config.weight_decay}]


def weights_of(folder, data, *, steps, strategy, saves_to=None, ckpt_path=None):
    """The weights after SFT whose norms decay so fast that it shows."""
    optim = OptimConfig(lr=1e-2, weight_decay=1.0, decay_norms_and_biases=True)
    trainer = make_trainer(data.parent, strategy=STRATEGIES[strategy](), max_steps=steps)
    module = make_sft(folder, actor=make_model_config(folder, optim=optim))
    with pytest.MonkeyPatch.context() as patch:
        if saves_to is not None:
            patch.setattr(base, "make_groups", one_group)
        trainer.fit(module, datamodule=make_chats(data, shuffle=False), ckpt_path=ckpt_path)
        if saves_to is not None:
            trainer.save_checkpoint(saves_to)
    return torch.cat([weight.flatten() for _, weight in module.contract.named_weights(module.policy)])


def resumed_and_whole(folder, data, strategy, others):
    """Weights of a run of three steps, and of runs that go on with older checkpoints, by who wrote these."""
    older = {strategy: data.parent / f"{strategy}.ckpt"}
    whole = weights_of(folder, data, steps=3, strategy=strategy)
    weights_of(folder, data, steps=2, strategy=strategy, saves_to=older[strategy])
    rest = {
        name: weights_of(folder, data, steps=3, strategy=strategy, ckpt_path=path)
        for name, path in {**older, **others}.items()
    }
    return whole, rest


def test_older_checkpoints_of_one_group_are_resumed(tmp_path, tiny_folder, chat_file):
    """By each strategy, and those of `auto` by `fsdp` and the other way."""
    data = Path(tmp_path / "chats.jsonl")
    data.write_text(chat_file.read_text())
    auto, sharded = tmp_path / "auto.ckpt", tmp_path / "fsdp.ckpt"

    results = {"ddp": on_ranks(1, resumed_and_whole, tiny_folder, data, "ddp", {})[0]}
    weights_of(tiny_folder, data, steps=2, strategy="auto", saves_to=auto)
    results["fsdp"] = on_ranks(1, resumed_and_whole, tiny_folder, data, "fsdp", {"auto": auto})[0]
    results["auto"] = resumed_and_whole(tiny_folder, data, "auto", {"fsdp": sharded})

    for whole, rest in results.values():
        for weights in rest.values():  # norms of gradients are added up in another order than in one group
            assert_near(weights, whole, rel=1e-6)


def test_the_option_decays_norms():
    model = make_model("qwen2")
    groups = make_groups(model, OptimConfig(weight_decay=0.1, decay_norms_and_biases=True))
    assert [(len(group["params"]) > 0, group["weight_decay"]) for group in groups] == [(True, 0.1)] * 2
