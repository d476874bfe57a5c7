"""Speculative decoding: what vLLM is told, what it answers, and what is refused on CPUs."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from tests.rollout.asking import sample
from tests.rollout.vllm_parts import make_hf_engine, make_prompts, make_vllm_config, weights_of, write_sharp_folder
from verl_lightning.rollout.base import Guide, SamplingConfig
from verl_lightning.rollout.vllm import VLLMEngine
from verl_lightning.rollout.vllm_config import SpeculationConfig, SpeculationMethod, VLLMConfig
from verl_lightning.rollout.vllm_sampling import check_speculation
from verl_lightning.rollout.worker import decode


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_tokens": 0}, "`speculation.num_tokens` must be at least 1, got 0"),
        ({"min_match": 5}, "`speculation.min_match` must lie between 1 and `max_match`, got 5 and 4"),
        ({"method": "mtp", "max_match": 3}, "`min_match` are for `ngram`, got `method: mtp`"),
        ({"method": "eagle3"}, "`speculation.method: eagle3` needs a `path`, got ''"),
        ({"path": "/draft"}, "`speculation.method: ngram` takes no `path`, got '/draft'"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SpeculationConfig(**options)


def test_an_engine_in_another_process_gets_the_same_options(tmp_path):
    guides = {"rollout.sampling.guide": Guide(regex="[0-9]+")}
    config = make_vllm_config(
        tmp_path, guides=guides, speculation=SpeculationConfig(method="draft_model", path="/draft")
    )

    assert decode(VLLMConfig, dataclasses.asdict(config)) == config


def test_sampling_with_speculation_is_refused_on_cpus():
    with pytest.raises(ValueError, match=r"on a CPU can decode greedily alone.*Got `temperature: 0.7`"):
        check_speculation(torch.device("cpu"), SamplingConfig(temperature=0.7))
    check_speculation(torch.device("cpu"), SamplingConfig(temperature=0.0))
    check_speculation(torch.device("cuda"), SamplingConfig(temperature=0.7))


@pytest.mark.backend
@pytest.mark.filterwarnings("ignore")
def test_vllm_knows_every_method_and_key():
    from vllm.config import speculative

    known = get_args(speculative.SpeculativeMethod)
    names = {each for name in known for each in ([name] if isinstance(name, str) else get_args(name))}
    names |= {each for name in known if not isinstance(name, str) for part in get_args(name) for each in get_args(part)}
    assert set(get_args(SpeculationMethod)) <= names
    for method in get_args(SpeculationMethod):
        path = "/draft" if method in ("draft_model", "eagle", "eagle3") else ""
        options = SpeculationConfig(method=method, path=path).vllm_options()
        assert options.keys() <= {field.name for field in dataclasses.fields(speculative.SpeculativeConfig)}


@pytest.mark.backend
@pytest.mark.filterwarnings("ignore")
def test_cpus_still_lose_the_temperatures_of_guessed_tokens():
    """Once this fails, vLLM's CPU build samples rightly: `check_speculation` can go."""
    from vllm.platforms import current_platform
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl

    current_platform.import_kernels()
    expanded = torch.full((3,), -1.0)

    _expand_kernel_impl(expanded, torch.tensor([0.7]), torch.tensor([3]), 0, 0)

    assert expanded.tolist() == [-1.0] * 3


@pytest.mark.backend
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_guessed_responses_are_those_of_the_policy(tmp_path):
    """The draft is an older policy, whose guesses are right at times."""
    draft = write_sharp_folder(tmp_path / "draft")
    model = AutoModelForCausalLM.from_pretrained(draft)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    speculation = SpeculationConfig(method="draft_model", path=str(draft), num_tokens=3)
    engine, expected = VLLMEngine(make_vllm_config(draft, speculation=speculation)), make_hf_engine(draft)
    engine.start(torch.device("cpu"))
    for each in (engine, expected):
        each.load_weights(weights_of(model), 1)

    greedy = SamplingConfig(max_new_tokens=24, temperature=0.0)
    ours, theirs = sample(engine, make_prompts(), greedy), sample(expected, make_prompts(), greedy)
    used = engine._running.llm_engine.vllm_config.speculative_config
    engine.stop()

    assert used.num_speculative_tokens == 3
    assert_close(ours.input_ids, theirs.input_ids)
    assert_close(ours.rollout_log_probs, theirs.rollout_log_probs, atol=1e-4, rtol=0)
