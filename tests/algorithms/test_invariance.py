"""No loss depends on micro-batches, ranks, padding, the order of samples, or on what lies behind the mask."""

import math
import typing
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from verl_lightning.algorithms.losses.cispo import cispo_loss
from verl_lightning.algorithms.losses.clip_cov import clip_cov_loss
from verl_lightning.algorithms.losses.covariance import is_selected, select_at_random, select_top
from verl_lightning.algorithms.losses.dppo import dppo_loss, inside_binary_kl, inside_total_variation
from verl_lightning.algorithms.losses.dro import dro_loss
from verl_lightning.algorithms.losses.geo_mean import geo_mean_loss
from verl_lightning.algorithms.losses.gspo import gspo_loss
from verl_lightning.algorithms.losses.kl_cov import kl_cov_loss
from verl_lightning.algorithms.losses.ppo_clip import ppo_clip_loss
from verl_lightning.algorithms.losses.reinforce import reinforce_loss
from verl_lightning.algorithms.losses.sapo import sapo_loss
from verl_lightning.algorithms.losses.vespo import vespo_loss
from verl_lightning.functional import kl
from verl_lightning.functional.normalizer import Aggregation, token_weights
from verl_lightning.functional.value_loss import clipped_value_loss

BAND = {"clip_low": 0.2, "clip_high": 0.3}
REGION = {"bound_low": 0.1, "bound_high": 0.1}
SOFT = {"power_positive": 2.0, "decay_positive": 3.0, "power_negative": 3.0, "decay_negative": 2.0}


class Batch(typing.NamedTuple):
    log_probs: Tensor
    old: Tensor
    advantages: Tensor
    mask: Tensor
    ids: Tensor


def selecting(select, loss):
    """A covariance loss whose selection was made from the whole step."""

    def of_step(step: Batch):
        selection = select(step.old[step.mask], step.advantages[step.mask])

        def of_batch(batch: Batch) -> Tensor:
            chosen = is_selected(selection, batch.old, batch.advantages, batch.ids, batch.mask)
            return loss(*batch[:3], chosen, batch.mask)

        return of_batch

    return of_step


def plain(loss):
    return lambda _: lambda batch: loss(*batch[:4])


def inside(region):
    """Divergence PPO in a trust region."""
    return plain(lambda *args: dppo_loss(*args[:3], region(*args, **REGION), max_ratio=2.0))


LOSSES = {
    "ppo_clip": plain(partial(ppo_clip_loss, **BAND, dual_clip=1.5)),
    "gspo": plain(partial(gspo_loss, **BAND)),
    "geo_mean": plain(partial(geo_mean_loss, **BAND)),
    "sapo": plain(partial(sapo_loss, temperature_positive=1.0, temperature_negative=1.05)),
    "cispo": plain(partial(cispo_loss, **BAND)),
    "reinforce": lambda _: lambda batch: reinforce_loss(batch.log_probs, batch.advantages, batch.mask),
    "dro": plain(partial(dro_loss, beta=0.1)),
    "dppo_tv": inside(inside_total_variation),
    "dppo_kl": inside(inside_binary_kl),
    "vespo": plain(partial(vespo_loss, **SOFT)),
    "clip_cov": selecting(partial(select_at_random, low=0.0, high=5.0, fraction=0.2), partial(clip_cov_loss, **BAND)),
    "kl_cov": selecting(partial(select_top, fraction=0.2), partial(kl_cov_loss, coef=1.0)),
    "kl_in_loss": lambda _: lambda batch: kl.straight_through(kl.kl_k3)(batch.log_probs, batch.old, batch.mask),
    "value": plain(partial(clipped_value_loss, clip=0.2)),
}


def random_batch(seed: int) -> Batch:
    """Six ragged responses; one has nothing to train on, and some have holes."""
    generator = torch.Generator().manual_seed(seed)
    log_probs = -torch.rand(6, 5, generator=generator) * 2
    old = log_probs - torch.randn(6, 5, generator=generator) * 0.3
    advantages = torch.randn(6, 1, generator=generator).expand(6, 5)
    mask = torch.rand(6, 5, generator=generator) < 0.7
    mask[seed % 6] = False
    ids = torch.randint(0, 100, (6, 5), generator=generator)
    return Batch(log_probs, old, advantages, mask, ids)


def with_gap(batch: Batch, place: int, width: int) -> Batch:
    """Inserts masked columns of nan, and fills all that was masked with nan."""

    def insert(x: Tensor, fill: float) -> Tensor:
        gap = torch.full((len(x), width), fill, dtype=x.dtype)
        return torch.cat([x[:, :place], gap, x[:, place:]], dim=1)

    floats = [insert(torch.where(batch.mask, x, math.nan), math.nan) for x in batch[:3]]
    return Batch(*floats, insert(batch.mask, False), insert(batch.ids, 7))


def total_loss(batches: list[Batch], step: Batch, name: str, aggregation: Aggregation) -> Tensor:
    """The sum over micro-batches and ranks, with the totals of the whole step."""
    loss_of, total = LOSSES[name](step), torch.tensor(0.0)
    for batch in batches:
        weights = token_weights(
            batch.mask,
            aggregation,
            num_tokens=step.mask.sum(),
            num_sequences=step.mask.any(-1).sum(),
            max_response_length=5,
        )
        total = total + (loss_of(batch) * weights).sum()
    return total


@pytest.mark.parametrize("aggregation", typing.get_args(Aggregation))
@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1000),
    owner=st.lists(st.integers(0, 3), min_size=6, max_size=6),
    order=st.permutations(range(6)),
    gaps=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), min_size=4, max_size=4),
)
def test_any_partition_gives_the_same_loss_and_gradient(name, aggregation, seed, owner, order, gaps):
    step = random_batch(seed)
    whole = step._replace(log_probs=step.log_probs.clone().requires_grad_())
    split = step._replace(log_probs=step.log_probs.clone().requires_grad_())
    rows = [torch.tensor([row for row in order if owner[row] == part], dtype=torch.long) for part in range(4)]
    parts = [with_gap(Batch(*(x[row] for x in split)), *gap) for row, gap in zip(rows, gaps, strict=True)]

    expected = total_loss([whole], step, name, aggregation)
    actual = total_loss(parts, step, name, aggregation)
    expected.backward()
    actual.backward()

    assert_close(actual, expected)
    assert_close(split.log_probs.grad, whole.log_probs.grad)
    assert whole.log_probs.grad[~step.mask].eq(0).all()


@pytest.mark.parametrize("aggregation", typing.get_args(Aggregation))
@pytest.mark.parametrize("name", LOSSES)
def test_nothing_to_train_on_gives_loss_zero_and_zero_gradients(name, aggregation):
    step = random_batch(0)
    empty = with_gap(step._replace(mask=torch.zeros_like(step.mask)), 0, 0)
    log_probs = empty.log_probs.clone().requires_grad_()

    loss = total_loss([empty._replace(log_probs=log_probs)], empty, name, aggregation)
    loss.backward()

    assert loss.item() == 0
    assert torch.equal(log_probs.grad, torch.zeros_like(log_probs))


def test_differs_from_verl_in_the_loss_of_geo_mean():
    """verl averages sequence losses inside each micro-batch, so that one of 1 and one of 5 responses weigh alike."""
    step = random_batch(3)
    parts = [Batch(*(x[rows] for x in step)) for rows in (slice(0, 1), slice(1, 6))]

    ours = total_loss(parts, step, "geo_mean", "seq-mean-token-mean")

    per_response = torch.stack(
        [total_loss([Batch(*(x[i : i + 1] for x in step))], step, "geo_mean", "seq-mean-token-mean") for i in range(6)]
    )
    verl = 5 * (per_response[0] + per_response[1:].sum() / 4) / 2  # the fourth response has nothing to train on
    assert_close(ours, per_response.sum())
    assert not torch.isclose(ours, verl)


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_not_zero(name):
    """The tests above would hold for a loss that does nothing."""
    step = random_batch(1)
    log_probs = step.log_probs.clone().requires_grad_()

    total_loss([step._replace(log_probs=log_probs)], step, name, "token-mean").backward()

    assert log_probs.grad.abs().max() > 1e-3
