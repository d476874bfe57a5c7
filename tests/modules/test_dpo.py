"""DPO and its family: the reference, what changes no gradient, what is refused, and that it learns."""

from __future__ import annotations

import json
import random
import sys

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from tests.processes import on_ranks
from tests.runs import Recorder, make_chats, make_dpo, make_model_config, make_pairs, make_sft, make_trainer
from tests.tiny import quickstart, write_tiny_folder
from tests.tolerances import assert_near
from verl_lightning.algorithms.preferences.dpo import DPO
from verl_lightning.algorithms.preferences.kto import KTO
from verl_lightning.algorithms.preferences.simpo import SimPO
from verl_lightning.models.config import LoraConfig, OptimConfig
from verl_lightning.modules import RewardModule


@pytest.fixture(autouse=True)
def _seed():
    seed_everything(0, verbose=False)


def fit(tmp_path, folder, pairs, *callbacks, batch_size=4, actor=None, ckpt_path=None, module=None, **options):
    """Metrics of the steps, and the final weights."""
    recorder = Recorder()
    actor = make_model_config(folder, **{"optim": OptimConfig(lr=1e-3, eps=1e-5, max_grad_norm=0.0)} | (actor or {}))
    module = make_dpo(folder, **{"actor": actor} | (module or {}))
    trainer = make_trainer(tmp_path, recorder, *callbacks, **options)
    trainer.fit(module, datamodule=make_pairs(pairs, pairs, batch_size=batch_size), ckpt_path=ckpt_path)
    return recorder, module.state_dict()


def log_probs_of(model, batch):
    """Of each response, by a model of transformers'."""
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"].long()).logits[:, :-1]
    tokens = logits.log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)
    return torch.where(batch["response_mask"], tokens, 0.0).sum(-1)


def batches_of(tmp_path, folder, pairs, module, **options):
    """The batches that a run gets."""
    data = make_pairs(pairs, **options)
    trainer = make_trainer(tmp_path)
    trainer.strategy.connect(module)
    data.trainer = trainer
    data.setup("fit")
    return list(data.train_dataloader())


def test_the_first_loss_is_log_2_and_metrics_are_those_of_trl(tmp_path, tiny_folder, pair_file):
    recorder, _ = fit(tmp_path, tiny_folder, pair_file)
    first, last = recorder.steps[0], recorder.steps[-1]
    assert first["train/loss"] == pytest.approx(0.693147, abs=1e-6)
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-6)
    assert last["train/loss"] < 0.69
    assert last["rewards/margins"] == pytest.approx(last["rewards/chosen"] - last["rewards/rejected"], abs=1e-6)
    batch = batches_of(tmp_path, tiny_folder, pair_file, make_dpo(tiny_folder))[0]
    expected = log_probs_of(AutoModelForCausalLM.from_pretrained(tiny_folder), batch)
    assert [first["logps/chosen"], first["logps/rejected"]] == pytest.approx(
        [expected[0::2].mean().item(), expected[1::2].mean().item()], rel=1e-5
    )


def test_neither_packing_nor_a_budget_nor_accumulation_changes_a_gradient(tmp_path, tiny_folder, pair_file):
    """A budget of 64 tokens makes two or three micro-batches of four pairs, and parts none."""
    expected, weights = fit(tmp_path, tiny_folder, pair_file)
    for packing in ("never", "always"):
        options = {"actor": {"packing": packing}, "module": {"max_tokens_per_micro_batch": 130}}
        actual, other = fit(tmp_path, tiny_folder, pair_file, **options)
        assert_near((actual.column("train/grad_norm"), other), (expected.column("train/grad_norm"), weights))
    actual, other = fit(tmp_path, tiny_folder, pair_file, batch_size=2, accumulate_grad_batches=2)
    norms = [step["train/grad_norm"] for step in actual.steps[1::2]]
    assert_near((norms, other), (expected.column("train/grad_norm"), weights))


def test_the_reference_is_scored_once_and_kept(tmp_path, tiny_folder, pair_file, caplog):
    """Training and validation rows are the same here, so one file serves both, and other runs."""
    fit(tmp_path, tiny_folder, pair_file, max_steps=1)
    (file,) = (tmp_path / "reference_log_probs").iterdir()
    assert caplog.text.count("The reference scores 64 examples, once") == 1
    kept = load_file(file)["ref_log_probs"]
    save_file({"ref_log_probs": kept + torch.tensor([1.0, 0.0])}, file)

    recorder, _ = fit(tmp_path, tiny_folder, pair_file, max_steps=1)
    assert recorder.column("rewards/chosen") == pytest.approx([-0.1], abs=1e-6)  # a nat less than it was

    file.write_bytes(file.read_bytes()[:-9])
    recorder, _ = fit(tmp_path, tiny_folder, pair_file, max_steps=1)
    assert recorder.column("train/loss") == pytest.approx([0.693147], abs=1e-6)
    assert "is damaged" in caplog.text
    assert_close(load_file(file)["ref_log_probs"], kept, rtol=0, atol=0)


def test_another_model_or_other_tokens_are_scored_anew(tmp_path, tiny_folder, pair_file):
    fit(tmp_path, tiny_folder, pair_file, max_steps=1)
    fit(tmp_path, write_tiny_folder(tmp_path / "other", seed=1), pair_file, max_steps=1)
    rows = pair_file.read_text().splitlines()
    (tmp_path / "fewer.jsonl").write_text("\n".join(rows[:8]))
    fit(tmp_path, tiny_folder, tmp_path / "fewer.jsonl", max_steps=1)
    assert len(list((tmp_path / "reference_log_probs").iterdir())) == 3


def test_adapters_are_off_in_the_reference(tmp_path, tiny_folder, pair_file):
    """New ones change nothing, so the base's file of a run without adapters serves, and the loss starts at log 2."""
    fit(tmp_path, tiny_folder, pair_file, max_steps=1)
    lora = {"lora": LoraConfig(rank=4), "optim": OptimConfig(lr=1e-2)}
    recorder, _ = fit(tmp_path, tiny_folder, pair_file, actor=lora)
    assert recorder.steps[0]["train/loss"] == pytest.approx(0.693147, abs=1e-6)
    assert recorder.steps[-1]["train/loss"] < 0.69
    assert len(list((tmp_path / "reference_log_probs").iterdir())) == 1


def test_ktos_kl_is_that_of_prompts_with_other_responses(tmp_path, tiny_folder, pair_file):
    """Between a policy that has learnt and its reference, over each of two batches."""
    module = make_dpo(tiny_folder, loss=KTO(), actor=make_model_config(tiny_folder, lr=1e-2))
    trainer, data = (
        make_trainer(tmp_path, max_epochs=1, limit_train_batches=1),
        make_pairs(pair_file, pair_file, batch_size=64),
    )
    trainer.fit(module, datamodule=data)
    learnt = AutoModelForCausalLM.from_pretrained(tiny_folder)
    weights = {name.removeprefix("actor.backbone."): weight for name, weight in module.state_dict().items()}
    learnt.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    gaps = []
    for fields in batches_of(tmp_path, tiny_folder, pair_file, module, batch_size=64):
        reference = log_probs_of(AutoModelForCausalLM.from_pretrained(tiny_folder), fields)
        gaps.append((log_probs_of(learnt, fields) - reference)[1::2].mean().clamp(min=0).item())

    assert float(trainer.callback_metrics["val/kl"]) == pytest.approx(sum(gaps) / 2, rel=1e-4)
    assert min(gaps) > 0


@pytest.mark.filterwarnings("ignore:The dirpath has changed")  # each run here has a folder of its own
def test_a_resumed_run_is_the_same_to_the_last_bit(tmp_path, tiny_folder, pair_file):
    """Also where the reference's file is gone: the first weights are the reference, not the checkpoint's."""
    saver = ModelCheckpoint(tmp_path / "saved", filename="{step}", every_n_train_steps=1, save_top_k=-1)
    options = {"max_steps": 4, "enable_checkpointing": True}
    whole, weights = fit(tmp_path, tiny_folder, pair_file, saver, **options)
    saver = ModelCheckpoint(tmp_path / "rest", filename="{step}", every_n_train_steps=1, save_top_k=-1)
    saved = tmp_path / "saved/step=2.ckpt"
    rest, same = fit(tmp_path / "rest", tiny_folder, pair_file, saver, ckpt_path=saved, **options)
    assert rest.column("train/loss")[-1] == whole.column("train/loss")[-1]
    assert_close(same, weights, rtol=0, atol=0)


def halves(tmp_path, folder, pairs):
    """Losses and weights of a sharded run, and of one that goes on from its middle."""
    ended = []
    for name, saved in {"whole": None, "rest": tmp_path / "whole/saved/step=2.ckpt"}.items():
        saver = ModelCheckpoint(tmp_path / name / "saved", filename="{step}", every_n_train_steps=2, save_top_k=-1)
        sharded = {"strategy": "fsdp", "devices": 2, "max_steps": 4, "enable_checkpointing": True}
        recorder, weights = fit(tmp_path / name, folder, pairs, saver, ckpt_path=saved, **sharded)
        whole = {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in weights.items()}
        ended.append((recorder.column("train/loss")[-2:], whole))
    return ended


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_resumed_sharded_run_is_the_same_to_the_last_bit(tmp_path, tiny_folder, pair_file):
    (whole, rest), _ = on_ranks(2, halves, tmp_path, tiny_folder, pair_file)
    assert rest[0] == whole[0]
    assert_close(rest[1], whole[1], rtol=0, atol=0)


def test_another_reference_or_task_is_not_gone_on_with(tmp_path, tiny_folder, pair_file, chat_file):
    saver = ModelCheckpoint(tmp_path / "saved", filename="{step}", every_n_train_steps=1)
    fit(tmp_path, tiny_folder, pair_file, saver, max_steps=1, enable_checkpointing=True)
    saved = tmp_path / "saved/step=1.ckpt"
    with pytest.raises(ValueError, match="`model.actor.path`: the reference .* is not that of"):
        fit(tmp_path, write_tiny_folder(tmp_path / "other", seed=1), pair_file, ckpt_path=saved)
    with pytest.raises(ValueError, match="`ckpt_path` is of DPO, with whose steps.* a `SFTModule` can't go on"):
        make_trainer(tmp_path).fit(make_sft(tiny_folder), datamodule=make_chats(chat_file), ckpt_path=saved)


def test_options_that_do_nothing_are_refused(tiny_folder):
    with pytest.raises(ValueError, match="`model.reference_cache` has no effect: `SimPO` compares with no reference"):
        make_dpo(tiny_folder, loss=SimPO(), reference_cache="a")


def test_a_budget_must_hold_a_pair(tmp_path, tiny_folder, pair_file):
    with pytest.raises(ValueError, match=r"\(100\) is less than the 2 sequences of one example may have .*, 64 each"):
        fit(tmp_path, tiny_folder, pair_file, module={"max_tokens_per_micro_batch": 100})


def accuracy(tmp_path, module, name, seed):
    """Of a module on held-out pairs that differ in the order of their digits alone."""
    rows = [quickstart.prompt_row(q, split="train", index=i) for i, q in enumerate(quickstart.sort_questions()[:560])]
    pairs = [row for row in map(quickstart.pair_row, rows) if row["chosen"] != row["rejected"]]
    random.Random(seed).shuffle(pairs)
    for part, rows in {"train": pairs[128:], "val": pairs[:128]}.items():
        (tmp_path / f"{part}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    seed_everything(seed, verbose=False)
    data = make_pairs(tmp_path / "train.jsonl", tmp_path / "val.jsonl", batch_size=32, shuffle=True)
    trainer = make_trainer(tmp_path, max_steps=40, val_check_interval=40, check_val_every_n_epoch=None)
    trainer.fit(module, datamodule=data)
    return trainer.callback_metrics[name].item()


@pytest.mark.parametrize("seed", range(3))
def test_dpo_learns_which_of_two_answers_is_sorted(tmp_path, tiny_folder, seed):
    module = make_dpo(tiny_folder, actor=make_model_config(tiny_folder, lr=3e-3), loss=DPO(beta=0.1))
    assert accuracy(tmp_path, module, "val/rewards/accuracies", seed) > 0.9


@pytest.mark.seeds
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["IPO", "HingeDPO", "RobustDPO", "SimPO", "ORPO", "RewardModule"])
def test_all_of_the_family_learn_it(tmp_path, tiny_folder, kind, seed):
    actor = make_model_config(tiny_folder, lr=3e-3)
    module = RewardModule(actor) if kind == "RewardModule" else make_dpo(tiny_folder, actor=actor, loss=kind)
    name = "val/accuracy" if kind == "RewardModule" else "val/rewards/accuracies"
    found = accuracy(tmp_path, module, name, seed)
    sys.stdout.write(f"{kind}, seed {seed}: {found:.3f}\n")
    assert found > 0.9
