"""Folders that each strategy wrote, loaded by vLLM itself: the last column of ``docs/checkpoints.md``."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.callbacks.saved_runs import LORA, RANKS, save_run
from tests.rollout.vllm_parts import write_sharp_folder
from verl_lightning.models.build import build_scorer
from verl_lightning.models.config import ModelConfig
from verl_lightning.models.hf_folder import atomic_folder, write_model, write_value_head
from verl_lightning.models.weights import merged_weights, value_head_weights
from verl_lightning.rollout.vllm_launch import CPU_CACHE_BYTES, import_vllm

pytestmark = [pytest.mark.backend, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
QUESTIONS = ["sort 4231", "sort 1", "3 and 12"]
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_sharp_folder(tmp_path_factory.mktemp("sharp"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory, base, chat_file):
    """What each strategy saved, of both kinds."""
    return {
        (saver, kind): save_run(base, chat_file, tmp_path_factory.mktemp(f"{saver}-{kind}"), kind, saver)
        for saver in RANKS
        for kind in ("full", "lora")
    }


def start_vllm(folder, **options):
    """vLLM as a user starts it, with the folder's own tokenizer and weights."""
    memory = {"kv_cache_memory_bytes": CPU_CACHE_BYTES, "max_model_len": 64}
    return import_vllm().LLM(str(folder), dtype="float32", enforce_eager=True, **memory, **options)


def greedy_texts(llm, adapter=None):
    """Its most likely answers."""
    params = import_vllm().SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    outputs = llm.generate(QUESTIONS, params, use_tqdm=False, lora_request=adapter)
    return [output.outputs[0].text for output in outputs]


@torch.no_grad()
def expected_texts(model, folder):
    """Those of a transformers model."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = [tokenizer(question, return_tensors="pt") for question in QUESTIONS]
    options = {"do_sample": False, "max_new_tokens": MAX_TOKENS, "pad_token_id": tokenizer.pad_token_id}
    answers = [model.generate(**each, **options)[0, each["input_ids"].shape[1] :] for each in inputs]
    return tokenizer.batch_decode(answers, skip_special_tokens=True)


@pytest.fixture(scope="module")
def base_texts(base):
    return expected_texts(AutoModelForCausalLM.from_pretrained(base), base)


@pytest.mark.parametrize("saver", RANKS)
def test_vllm_loads_the_full_model(runs, saver, base_texts):
    folder = runs[saver, "full"].folder / "hf" / "last"
    llm = start_vllm(folder)

    texts = greedy_texts(llm)
    llm.llm_engine.engine_core.shutdown()

    assert texts == expected_texts(AutoModelForCausalLM.from_pretrained(folder), folder)
    assert texts != base_texts


def test_vllm_loads_a_policy_with_a_value_head(base, base_texts, tmp_path):
    """A critic on the actor's trunk is in a file of its own, which vLLM must not take for a part of the model."""
    scorer = build_scorer(ModelConfig(path=str(base)), "policy_and_value", trainable=True)
    with atomic_folder(tmp_path / "model") as folder:
        AutoTokenizer.from_pretrained(base).save_pretrained(folder)
        write_value_head(folder, value_head_weights(scorer.value_head))
        write_model(folder, scorer.backbone, merged_weights(scorer.backbone))

    llm = start_vllm(tmp_path / "model")
    texts = greedy_texts(llm)
    llm.llm_engine.engine_core.shutdown()

    assert texts == base_texts


def test_vllm_puts_each_adapter_on_the_base(runs, base, base_texts):
    from vllm.lora.request import LoRARequest

    llm = start_vllm(base, enable_lora=True, max_lora_rank=8)
    assert greedy_texts(llm) == base_texts
    assert LORA["lora"].rank <= 8
    for number, saver in enumerate(RANKS, start=1):
        run = runs[saver, "lora"].folder
        texts = greedy_texts(llm, LoRARequest(saver, number, str(run / "hf" / "last")))

        adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), run / "hf" / "last")
        merged = AutoModelForCausalLM.from_pretrained(run / "merged" / "last")
        assert texts == expected_texts(adapted, base) == expected_texts(merged, run / "merged" / "last")
        assert texts != base_texts
    llm.llm_engine.engine_core.shutdown()
