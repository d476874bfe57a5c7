"""What one strategy saved, loaded by others and by other libraries: the table of ``docs/checkpoints.md``.

vLLM's column is in ``tests/rollout/test_vllm_folders.py``.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from tests.callbacks.saved_runs import LORA, RANKS, logits_with, run_sft, save_run
from tests.processes import on_ranks
from tests.runs import make_chats, make_model_config, make_trainer
from tests.tiny import write_tiny_folder
from tests.tolerances import assert_near
from verl_lightning.modules import SFTModule
from verl_lightning.strategies import STRATEGIES

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:The dirpath has changed")]
TOKENS = torch.arange(12).view(2, 6)
LOADERS = [("auto", 1), ("ddp", 2), ("fsdp", 4)]


@pytest.fixture(scope="module", params=RANKS)
def saver(request):
    """Who saved."""
    return request.param


@pytest.fixture(scope="module")
def full(tmp_path_factory, tiny_folder, chat_file, saver):
    return save_run(tiny_folder, chat_file, tmp_path_factory.mktemp("full"), "full", saver)


@pytest.fixture(scope="module")
def lora(tmp_path_factory, tiny_folder, chat_file, saver):
    return save_run(tiny_folder, chat_file, tmp_path_factory.mktemp("lora"), "lora", saver)


@pytest.fixture(params=["full", "lora"])
def run(request, full, lora):
    """What was trained."""
    return {"full": full, "lora": lora}[request.param]


def base_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def logits_of(model):
    with torch.no_grad():
        return model.eval()(TOKENS).logits


@pytest.mark.parametrize("saver", ["auto", "fsdp"], indirect=True)
@pytest.mark.parametrize(("loader", "ranks"), LOADERS)
def test_another_strategy_resumes_the_trainers_checkpoint(run, tiny_folder, chat_file, tmp_path, loader, ranks):
    assert_resumes(run, tiny_folder, chat_file, tmp_path, loader, ranks)


@pytest.mark.parametrize("saver", ["ddp"], indirect=True)
def test_what_ranks_of_ddp_have_saved_is_a_file_of_one_process(run, tiny_folder, chat_file, tmp_path):
    """So all other strategies take it too."""
    assert_resumes(run, tiny_folder, chat_file, tmp_path, "auto", 1)


def assert_resumes(run, tiny_folder, chat_file, tmp_path, loader, ranks):
    """The rest of a run from its checkpoint ends with its weights."""
    checkpoint = str(run.folder / "step=3.ckpt")

    resumed = on_ranks(ranks, run_sft, tiny_folder, chat_file, tmp_path, run.kind, loader, ranks, checkpoint)[0]

    base = dict(base_of(tiny_folder).named_parameters())
    assert_near(resumed, run.weights)
    assert not torch.allclose(resumed["model.layers.0.mlp.up_proj.weight"], base["model.layers.0.mlp.up_proj.weight"])


@pytest.mark.parametrize("saver", ["fsdp"], indirect=True)
@pytest.mark.parametrize(("loader", "ranks"), LOADERS)
def test_another_strategy_starts_from_the_folder(run, tiny_folder, chat_file, tmp_path, loader, ranks):
    """Those of all savers are folders of Transformers, which loads the same weights from each; see below."""
    saved = str(run.folder / "hf" / "last")
    changes = {"path": saved} if run.kind == "full" else {"lora": dataclasses.replace(LORA["lora"], adapter_path=saved)}

    config = dataclasses.replace(make_model_config(tiny_folder), **changes)
    started = on_ranks(ranks, first_weights, config, chat_file, tmp_path, loader, ranks)[0]

    assert_close(started, run.weights, rtol=0, atol=0)


def first_weights(config, chats, folder, strategy, ranks):
    """The policy's weights before the first step."""
    options = {"strategy": STRATEGIES.get(strategy, lambda: strategy)(), "devices": ranks, "limit_val_batches": 1}
    trainer, module = make_trainer(folder, **options), SFTModule(config)
    trainer.validate(module, datamodule=make_chats(chats, chats), verbose=False)
    return {name: weight.clone() for name, weight in module.contract.named_weights(module.policy)}


def test_a_checkpoint_grows_with_the_adapters_alone(lora, saver, chat_file, tmp_path):
    """In float32, with AdamW's two moments: 12 bytes a trained parameter."""
    folder = write_tiny_folder(tmp_path / "wider", hidden_size=64)
    wider = save_run(folder, chat_file, tmp_path / "run", "lora", saver)

    adapters = [num_trained(run) for run in (lora, wider)]

    assert wider.checkpoint_bytes - lora.checkpoint_bytes == pytest.approx(12 * (adapters[1] - adapters[0]), rel=0.02)
    assert sum(w.numel() for w in wider.weights.values()) > 10 * adapters[1]


def num_trained(run):
    """Parameters of a run's adapter."""
    return sum(
        weight.numel() for weight in load_file(run.folder / "hf" / "last" / "adapter_model.safetensors").values()
    )


def test_transformers_loads_the_full_model(full, tiny_folder):
    loaded = logits_of(base_of(full.folder / "hf" / "last"))

    assert_close(loaded, logits_with(base_of(tiny_folder), full.weights, TOKENS), rtol=0, atol=0)


def test_peft_loads_the_adapter(lora, tiny_folder):
    loaded = PeftModel.from_pretrained(base_of(tiny_folder), lora.folder / "hf" / "last")

    expected = logits_with(base_of(tiny_folder), lora.weights, TOKENS)
    assert_near(logits_of(loaded), expected)
    assert not torch.allclose(expected, logits_of(base_of(tiny_folder)), atol=1e-3)


def test_transformers_loads_the_adapter_and_the_merged_model(lora, tiny_folder):
    expected = logits_with(base_of(tiny_folder), lora.weights, TOKENS)

    assert_near(logits_of(base_of(lora.folder / "hf" / "last")), expected)
    assert_close(logits_of(base_of(lora.folder / "merged" / "last")), expected, rtol=0, atol=0)
