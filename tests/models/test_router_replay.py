"""A mixture's routers choose again what they chose before, by scores of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import seed_everything

from tests.families.catalog import FAMILIES, write_folder
from tests.models.packed_models import make_batch
from tests.runs import Recorder, make_model_config, make_ppo, make_prompts, make_rollout, make_trainer
from tests.tiny import tiny_tokenizer
from verl_lightning.compat.transformers import top_k_routers
from verl_lightning.models.build import build_scorer
from verl_lightning.models.config import ModelConfig
from verl_lightning.models.router_replay import RouterReplay
from verl_lightning.modules.micro_batches import split_micro_batches
from verl_lightning.modules.ppo_config import UpdateConfig
from verl_lightning.strategies import FSDPStrategy

MIXTURES = sorted(name for name, config in FAMILIES.items() if "num_experts_per_tok" in config and name != "granitemoe")
"""Families with experts; granitemoe's routers have no class of the usual name."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("mixture") / "qwen3_moe", "qwen3_moe", num_experts_per_tok=1)


def make_scorer(folder, **options):
    scorer = build_scorer(ModelConfig(path=str(folder), **options), "policy", trainable=True)
    scorer.router_replay = RouterReplay(scorer.backbone, scorer.backbone.config.model_type)
    return scorer


def masked(scorer, batch):
    return scorer(batch).log_probs.where(batch.response_mask, 0.0)


def make_twins(scorer, sign):
    """Gives experts 0 and 1 the same router weights but for a hundred-millionth, whose sign says which of them wins."""
    with torch.no_grad():
        for router in top_k_routers(scorer.backbone):
            router.weight[1] = router.weight[0] * (1 + sign * 1e-6)


@pytest.mark.parametrize("packing", ["never", "always"])
def test_replayed_log_probs_stay_where_a_nudge_flips_the_routes(folder, packing):
    scorer, batch = make_scorer(folder, packing=packing, dtype="float32"), make_batch()
    make_twins(scorer, 1)
    with torch.no_grad():
        before = scorer(batch)
        make_twins(scorer, -1)
        moved = masked(scorer, batch)
    replayed = masked(scorer, replace(batch, experts=before.experts))

    metrics = scorer.router_replay.metrics(before.experts)
    assert metrics["actor/router_replay/changed_routes"].value > 0.05
    expected = before.log_probs.where(batch.response_mask, 0.0)
    assert (replayed - expected).abs().max() < 1e-6 * expected.abs().max()
    assert (moved - expected).abs().max() > 1e-2
    replayed.sum().backward()
    assert all(router.weight.grad.abs().max() > 0 for router in top_k_routers(scorer.backbone))


@pytest.mark.parametrize("family", MIXTURES)
def test_each_family_follows_what_is_replayed(tmp_path, family):
    scorer, batch = make_scorer(write_folder(tmp_path / family, family)), make_batch()
    with torch.no_grad():
        own = scorer(batch)
        real = batch.attention_mask
        experts = torch.where(own.experts >= 0, (own.experts + 1) % 4, own.experts)  # others, but as many
        same, other = (masked(scorer, replace(batch, experts=which)) for which in (own.experts, experts))

    assert own.experts.shape == (*batch.input_ids.shape, len(top_k_routers(scorer.backbone)), 2)
    assert (own.experts[real] >= 0).all()
    assert (own.experts[~real] == -1).all()
    expected = own.log_probs.where(batch.response_mask, 0.0)
    assert torch.equal(same, expected)
    assert (other - expected).abs().max() > 1e-3


def test_activations_that_are_made_again_take_the_same_routes(folder):
    batch, gradients = make_batch(), []
    for checkpointing in ("none", "full"):
        scorer = make_scorer(folder, activation_checkpointing=checkpointing)
        with torch.no_grad():
            experts = 3 - scorer(batch).experts
        experts = experts.where(batch.attention_mask[..., None, None], -1).to(torch.int16)
        masked(scorer, replace(batch, experts=experts)).sum().backward()
        gradients.append([router.weight.grad for router in top_k_routers(scorer.backbone)])

    torch.testing.assert_close(*gradients)


def test_micro_batches_take_their_columns_along(folder):
    scorer, batch = make_scorer(folder), make_batch()
    with torch.no_grad():
        batch = replace(batch, experts=scorer(batch).experts)

    parts = split_micro_batches(batch, 1)

    for row, part in enumerate(parts):
        assert torch.equal(part.experts[part.attention_mask], batch.experts[row][batch.attention_mask[row]])


@pytest.mark.parametrize("update", [{"micro_batch_size": 4}, {"max_tokens_per_micro_batch": 64}])
def test_ppo_replays_its_own_pass_in_all_updates(tmp_path, folder, prompt_file, update):
    seed_everything(0, verbose=False)
    tiny_tokenizer().save_pretrained(folder)
    options = UpdateConfig(mini_batch_size=2, epochs=2, router_replay="R2", **update)
    module = make_ppo(folder, actor=make_model_config(folder, lr=0.01), update=options)
    recorder = Recorder()

    make_trainer(tmp_path, make_rollout(), recorder, max_steps=2).fit(module, datamodule=make_prompts(prompt_file))

    assert all(0 < share < 1 for share in recorder.column("actor/router_replay/changed_routes"))
    assert all(1 <= load <= 4 for load in recorder.column("actor/experts/max_load"))


def test_what_can_not_be_replayed_is_refused(tiny_folder):
    with pytest.raises(ValueError, match=r"`model.update.router_replay: R2` .* `model.update.old_log_probs: engine`"):
        UpdateConfig(router_replay="R2", old_log_probs="engine")
    with pytest.raises(ValueError, match=r"`llama` has no routers .* take `model.update.router_replay` out"):
        make_scorer(tiny_folder)


@pytest.mark.parametrize("options", [{"compile": True}, {"sequence_parallel_size": 2}])
def test_fsdp_says_what_does_not_go_with_it(options):
    with pytest.raises(MisconfigurationException, match=rf"Take `fsdp.{next(iter(options))}` or .* out"):
        FSDPStrategy(**options).make_router_replay(None)
