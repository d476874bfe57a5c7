"""What needs text: stop strings, and guided decoding."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.rollout.asking import sample
from tests.rollout.vllm_parts import make_prompts, make_vllm_engine, weights_of, write_sharp_folder
from verl_lightning.rollout.base import Guide, SamplingConfig

pytestmark = [pytest.mark.backend, pytest.mark.filterwarnings("ignore")]  # vLLM warns of many things


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_sharp_folder(tmp_path_factory.mktemp("sharp"))


@pytest.fixture(scope="module")
def engine(folder):
    engine = make_vllm_engine(folder, makes_text=True)
    engine.start(torch.device("cpu"))
    engine.load_weights(weights_of(AutoModelForCausalLM.from_pretrained(folder)), 1)
    yield engine
    engine.stop()


def texts_of(rollout, folder):
    """Each response in words."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = zip(rollout.response_ids, rollout.response_mask, strict=True)
    return [tokenizer.decode(ids[mask], skip_special_tokens=True) for ids, mask in rows]


def test_a_response_ends_with_the_token_that_completes_a_stop_text(engine, folder):
    greedy = SamplingConfig(max_new_tokens=12, temperature=0.0)
    free = sample(engine, make_prompts(), greedy)
    stop = texts_of(free, folder)[1][2:4]

    stopped = sample(engine, make_prompts(), SamplingConfig(max_new_tokens=12, temperature=0.0, stop=[stop]))

    text, length = texts_of(stopped, folder)[1], int(stopped.response_mask[1].sum())
    assert stop in text
    assert length < 12
    assert not stopped.is_truncated[1]
    assert stopped.response_ids[1, :length].tolist() == free.response_ids[1, :length].tolist()


@pytest.mark.parametrize(
    "guide",
    [Guide(regex="[0-9"), Guide(regex="(?<=a)b"), Guide(json='{"type": "nothing"}'), Guide(grammar="root ::= missing")],
)
def test_a_guide_that_vllm_does_not_understand_is_refused(folder, guide):
    engine = make_vllm_engine(folder, makes_text=True, guides={"rollout.sampling.guide": guide})

    with pytest.raises(ValueError, match=r"`rollout.sampling.guide.\w+` is nothing that vLLM can guide by, got"):
        engine.start(torch.device("cpu"))
    assert engine._llm is None


@pytest.mark.parametrize(
    ("guide", "form"), [(Guide(regex="[0-9]{3}"), "[0-9]{3}"), (Guide(choice=["12", "345"]), "12|345")]
)
def test_guided_responses_have_the_form_asked_for(engine, folder, guide, form):
    sampling = SamplingConfig(num_samples=4, max_new_tokens=12, guide=guide)

    texts = texts_of(sample(engine, make_prompts(num_samples=4), sampling), folder)

    assert all(re.fullmatch(form, text) for text in texts)
    assert len(texts) == 12
