"""The embedded engine: what it samples, with which probability, and that only the seed decides."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, Lfm2Config

from tests.rollout.asking import Prompts, sample
from tests.tiny import tiny_model
from tests.tolerances import assert_near
from verl_lightning.models.config import ModelConfig
from verl_lightning.rollout.base import SamplingConfig
from verl_lightning.rollout.completions import pad_left
from verl_lightning.rollout.hf import HFEngine
from verl_lightning.rollout.token_sampling import sample_tokens

LENGTHS = (3, 9, 5, 12, 7)
PAD = 0


def make_engine(folder, **options):
    engine = HFEngine(ModelConfig(path=str(folder)), **{"eos_token_ids": [1], "pad_token_id": PAD} | options)
    engine.start(torch.device("cpu"))
    return engine


def make_prompts(*, num_samples=3, rows=range(5)):
    """Random prompts of unequal lengths; a row has the same tokens and seeds in any batch."""
    ids = torch.randint(6, 100, (len(LENGTHS), 14), generator=torch.Generator().manual_seed(0))
    rows = list(rows)
    seeds = [[1000 * row + sample for sample in range(num_samples)] for row in rows]
    return Prompts([ids[row, 14 - LENGTHS[row] :].tolist() for row in rows], seeds)


def responses(rollout):
    return [tokens[mask].tolist() for tokens, mask in zip(rollout.response_ids, rollout.response_mask, strict=True)]


def full_log_probs(model, rollout):
    """Of the response tokens, from one forward pass without a cache; 0 where masked."""
    positions = (rollout.attention_mask.long().cumsum(-1) - 1).clamp(min=0)
    logits = model(rollout.input_ids, attention_mask=rollout.attention_mask, position_ids=positions).logits
    log_probs = (logits / rollout.temperature).log_softmax(-1)[:, :-1].gather(-1, rollout.input_ids[:, 1:, None])
    return log_probs.squeeze(-1)[:, -rollout.response_mask.shape[1] :].where(rollout.response_mask, 0.0)


def end_soon(engine, *, bias):
    """Gives the end token a chance in the tiny model, whose output is nearly uniform, without touching its weights."""
    engine._running.lm_head.register_forward_hook(lambda module, inputs, logits: logits + bias)
    return engine


def end_bias(strength=3.0, token=1):
    bias = torch.zeros(102)
    bias[token] = strength
    return bias


def test_greedy_is_what_transformers_generates(tiny_folder):
    prompts = make_prompts(num_samples=1)
    rollout = sample(make_engine(tiny_folder), prompts, SamplingConfig(max_new_tokens=10, temperature=0.0))

    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    mask = pad_left([[1] * len(tokens) for tokens in prompts.tokens], 0)
    inputs = {"input_ids": pad_left(prompts.tokens, PAD), "attention_mask": mask}
    expected = model.generate(**inputs, max_new_tokens=10, do_sample=False, eos_token_id=1, pad_token_id=PAD)
    assert_close(rollout.input_ids, expected)


def test_samples_do_not_depend_on_the_batch(tiny_folder):
    engine = end_soon(make_engine(tiny_folder), bias=end_bias())
    sampling = SamplingConfig(num_samples=3, max_new_tokens=8)
    whole = responses(sample(engine, make_prompts(), sampling))

    for row in range(len(LENGTHS)):
        alone = sample(engine, make_prompts(rows=[row]), sampling)
        assert responses(alone) == whole[3 * row : 3 * row + 3]
    turned = responses(sample(engine, make_prompts(rows=reversed(range(len(LENGTHS)))), sampling))
    assert turned == [whole[3 * row + sample] for row in reversed(range(len(LENGTHS))) for sample in range(3)]


@pytest.mark.parametrize("batch_size", [1, 4, 6, 7])
def test_sequences_that_take_free_places_are_sampled_alike(tiny_folder, batch_size):
    sampling = SamplingConfig(num_samples=3, max_new_tokens=8)
    whole = sample(end_soon(make_engine(tiny_folder), bias=end_bias()), make_prompts(), sampling)
    engine = end_soon(make_engine(tiny_folder, batch_size=batch_size), bias=end_bias())
    refilled = sample(engine, make_prompts(), sampling)

    assert_close(refilled.response_ids, whole.response_ids)
    assert_near(refilled.rollout_log_probs, whole.rollout_log_probs)
    assert_close(refilled.prompt_index, whole.prompt_index)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
def test_log_probs_are_those_of_one_full_forward_pass(tiny_folder, temperature):
    """At the temperature, over the whole vocabulary, even where truncation chose the tokens."""
    sampling = SamplingConfig(num_samples=3, max_new_tokens=8, temperature=temperature, top_k=20, top_p=0.9)
    rollout = sample(make_engine(tiny_folder), make_prompts(), sampling)

    expected = full_log_probs(AutoModelForCausalLM.from_pretrained(tiny_folder), rollout)
    assert rollout.temperature == temperature
    assert_near(rollout.rollout_log_probs, expected)


def test_responses_end_with_their_end_token(tiny_folder):
    engine = end_soon(make_engine(tiny_folder, eos_token_ids=[1, 50]), bias=end_bias() + end_bias(token=50))
    rollout = sample(engine, make_prompts(), SamplingConfig(num_samples=3, max_new_tokens=6))

    ended = [row for row, cut in zip(responses(rollout), rollout.is_truncated.tolist(), strict=True) if not cut]
    cut = [row for row, cut in zip(responses(rollout), rollout.is_truncated.tolist(), strict=True) if cut]
    assert {row[-1] for row in ended} == {1, 50}
    assert cut
    assert all(len(row) == 6 and not {1, 50} & set(row) for row in cut)
    assert all(not {1, 50} & set(row[:-1]) for row in ended)
    assert (rollout.response_ids[~rollout.response_mask] == PAD).all()
    assert_close(rollout.attention_mask[:, -6:], rollout.response_mask)


def test_an_end_token_that_is_also_the_pad_token_is_trained_on(tiny_folder):
    """Masks come from positions: the sampled end counts, the padding after it does not."""
    engine = end_soon(make_engine(tiny_folder, pad_token_id=1), bias=end_bias())
    rollout = sample(engine, make_prompts(), SamplingConfig(num_samples=3, max_new_tokens=6))
    usual = end_soon(make_engine(tiny_folder), bias=end_bias())

    assert responses(rollout) == responses(
        sample(usual, make_prompts(), SamplingConfig(num_samples=3, max_new_tokens=6))
    )
    assert any(row[-1] == 1 for row in responses(rollout))
    assert (rollout.response_mask.sum(-1) == torch.tensor([len(row) for row in responses(rollout)])).all()


def test_columns_end_with_the_longest_response(tiny_folder):
    engine = end_soon(make_engine(tiny_folder), bias=end_bias(30.0))  # ends at once
    rollout = sample(engine, make_prompts(), SamplingConfig(num_samples=3, max_new_tokens=6))
    assert responses(rollout) == [[1]] * 15
    assert rollout.response_mask.shape == (15, 1)
    assert not rollout.is_truncated.any()


def chi_square(tokens, probs):
    """Of counts against what the distribution expects."""
    counts = torch.bincount(tokens, minlength=len(probs)).double()
    expected = probs * len(tokens)
    return float(((counts - expected).square() / expected.clamp(min=1e-9))[expected > 0].sum())


def uniform_noise(num_rows):
    return torch.rand(num_rows, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_tokens_have_their_probabilities(temperature):
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5])
    tokens, log_probs = sample_tokens(
        logits.expand(20_000, -1), uniform_noise(20_000), SamplingConfig(temperature=temperature)
    )
    probs = (logits.double() / temperature).softmax(-1)
    assert chi_square(tokens, probs) < 18.5  # the 99.9th percentile at four degrees of freedom
    assert_close(log_probs, probs.log()[tokens].float())


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 1}, [3]),
        ({"top_p": 0.6}, [1, 3]),  # probabilities .08 .23 .03 .61 .05: the first stays below .6, the second is needed
        ({"top_p": 0.5}, [3]),
        ({"top_p": 0.9}, [0, 1, 3]),
        ({"top_p": 0.9, "top_k": 2}, [1, 3]),
    ],
)
def test_truncation_keeps_the_most_probable_tokens(options, kept):
    logits = torch.tensor([0.08, 0.23, 0.03, 0.58, 0.08]).log()
    logits[4] = torch.tensor(0.05).log()  # .97 in all: .0825 .2371 .0309 .5979 .0515
    tokens, _ = sample_tokens(logits.expand(20_000, -1), uniform_noise(20_000), SamplingConfig(**options))

    probs = torch.zeros(5, dtype=torch.float64)
    probs[kept] = logits.double().exp()[kept]
    assert sorted(set(tokens.tolist())) == kept
    assert chi_square(tokens, probs / probs.sum()) < 18.5


def test_noise_at_its_bounds_gives_tokens_that_can_be_sampled():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(2, -1)
    noise = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert sample_tokens(logits, noise, SamplingConfig())[0].tolist() == [1, 3]


def test_new_weights_are_sampled_from(tiny_folder):
    engine, other = make_engine(tiny_folder), tiny_model(seed=7)
    sampling = SamplingConfig(num_samples=3, max_new_tokens=8)
    before = sample(engine, make_prompts(), sampling)

    engine.load_weights(((name, weight.detach()) for name, weight in other.named_parameters()), 1)

    after = sample(engine, make_prompts(), sampling)
    assert responses(after) != responses(before)
    assert_near(after.rollout_log_probs, full_log_probs(other, after))


def test_weights_by_other_names_are_errors(tiny_folder):
    engine, weights = make_engine(tiny_folder), dict(tiny_model().named_parameters())
    with pytest.raises(ValueError, match=r"sent the weight `lm_head\.weight`, which the rollout model does not have"):
        engine.load_weights({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}.items(), 1)
    del weights["model.norm.weight"]
    with pytest.raises(ValueError, match=r"did not send 1 weights, such as `model\.norm\.weight`"):
        engine.load_weights(weights.items(), 1)


def test_an_engine_that_was_not_started_says_so(tiny_folder):
    engine = make_engine(tiny_folder)
    engine.stop()
    with pytest.raises(RuntimeError, match=r"`start` the engine"):
        sample(engine, make_prompts(), SamplingConfig())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_samples": 0}, r"`num_samples` must be at least 1, got 0"),
        ({"max_new_tokens": 0}, r"`max_new_tokens` must be at least 1"),
        ({"temperature": -0.1}, r"`temperature` must not be negative"),
        ({"top_p": 0.0}, r"`top_p` must lie in \(0, 1\]"),
        ({"top_k": -1}, r"`top_k` must not be negative"),
    ],
)
def test_sampling_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        SamplingConfig(**options)


def test_sequences_have_their_probabilities(tiny_folder):
    """First tokens as the model says, second tokens independent of the first tokens' noise."""
    engine = make_engine(tiny_folder, eos_token_ids=[], batch_size=5000)
    prompts = make_prompts(rows=[1])._replace(seeds=[list(range(5000))])
    tokens = sample(engine, prompts, SamplingConfig(num_samples=5000, max_new_tokens=2)).response_ids

    logits = AutoModelForCausalLM.from_pretrained(tiny_folder)(torch.tensor(prompts.tokens)).logits[0, -1]
    assert chi_square(tokens[:, 0], logits.detach().double().softmax(-1)) < 149.4  # 99.9th percentile at 101 degrees
    # Probabilities are nearly equal here, so the token's number shows the noise that drew it.
    assert abs(float(torch.corrcoef(tokens.T.double())[0, 1])) < 0.06  # four standard errors


def test_models_whose_layers_keep_states_are_sampled(tmp_path):
    """Their caches can be neither repeated for samples nor padded for others: each prompt is read by itself."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    layers = ["conv", "full_attention", "conv"]
    config = Lfm2Config(
        vocab_size=102, num_hidden_layers=3, layer_types=layers, block_auto_adjust_ff_dim=False, **sizes
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    prompts = make_prompts(num_samples=2, rows=[0, 1])
    greedy = SamplingConfig(num_samples=2, max_new_tokens=6, temperature=0.0)

    rollout = sample(make_engine(tmp_path, batch_size=3), prompts, greedy)

    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": 1, "pad_token_id": PAD}
    expected = [model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in prompts.tokens]
    assert responses(rollout) == [tokens for tokens in expected for _ in range(2)]
