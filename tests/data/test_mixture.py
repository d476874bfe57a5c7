"""Each step has its share of each kind of rows, in an order that follows from seed and epoch alone."""

from __future__ import annotations

from collections import Counter

import pytest

from verl_lightning.data.loader import TrainLoader
from verl_lightning.data.mixture import Mixture, MixtureConfig

KINDS = ["a"] * 40 + ["b"] * 10 + ["c"] * 6


class Rows:
    """Batches of bare row numbers."""

    fingerprint = "rows"

    def __len__(self):
        return len(KINDS)

    def batch(self, indices, is_duplicate):
        return indices


def make_loader(rank=0, world_size=1, seed=5, batch_size=8, **shares):
    mixture = Mixture(MixtureConfig(**(shares or {"quotas": {"a": 5, "b": 2, "c": 1}})), KINDS)
    return TrainLoader(
        Rows(), batch_size=batch_size, rank=rank, world_size=world_size, shuffle=True, seed=seed, mixture=mixture
    )


def epochs(loader, count):
    return [batch for _ in range(count) for batch in loader]


def test_quotas_are_exact_in_each_step():
    counts = [Counter(KINDS[row] for row in batch) for batch in epochs(make_loader(), 3)]

    assert counts == [{"a": 5, "b": 2, "c": 1}] * 21


def test_weights_are_exact_in_the_run_and_off_by_less_than_one_in_any_beginning_of_it():
    weights = {"a": 0.61, "b": 0.29, "c": 0.1}
    total = Counter()
    for number, batch in enumerate(epochs(make_loader(weights=weights), 1), start=1):
        total += Counter(KINDS[row] for row in batch)
        assert all(abs(total[kind] - share * 8 * number) < 1 for kind, share in weights.items())


def test_every_row_of_a_kind_comes_before_one_comes_again():
    rows = [row for batch in epochs(make_loader(), 3) for row in batch if KINDS[row] == "b"]

    assert [sorted(rows[start : start + 10]) for start in range(0, 40, 10)] == [list(range(40, 50))] * 4
    assert rows[:10] != rows[10:20]


def test_ranks_share_a_step():
    whole = epochs(make_loader(), 1)
    halves = [epochs(make_loader(rank=rank, world_size=2, batch_size=4), 1) for rank in range(2)]

    assert whole == [[row for pair in zip(*parts, strict=True) for row in pair] for parts in zip(*halves, strict=True)]


@pytest.mark.parametrize("steps", [3, 7, 10])
def test_a_resumed_run_goes_on_with_the_same_rows(steps):
    loader, expected = make_loader(), epochs(make_loader(), 3)
    batches = (batch for _ in range(3) for batch in loader)
    for _ in range(steps):
        next(batches)
    resumed = make_loader()
    resumed.load_state_dict(loader.state_dict())

    assert epochs(resumed, 3)[: 21 - steps] == expected[steps:]


def test_another_mixture_begins_the_epoch_again():
    loader = make_loader()
    next(iter(loader))
    resumed = make_loader(quotas={"a": 6, "b": 1, "c": 1})

    with pytest.warns(UserWarning, match=r"mixed by data_source: a 0.625, .* are mixed by data_source: a 0.75.*again"):
        resumed.load_state_dict(loader.state_dict())


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({"quotas": {"a": 1}, "weights": {"a": 1.0}}, "`mixture` must set one of `quotas` and `weights`"),
        ({"quotas": {"a": -1}}, "`quotas.a` must not be negative, got -1"),
        ({"weights": {"a": 0.0}}, "`weights` must give some kind a share above 0"),
        ({"quotas": {"a": 4, "b": 4}}, "rows whose column `data_source` is `c` have no share in `mixture`"),
        ({"quotas": {"a": 4, "b": 2, "bb": 2}}, "`mixture` gives `bb` a share, but no row's .* Did you mean `b`"),
        ({"quotas": {"a": 0, "b": 0, "c": 8}}, "`mixture` takes 8 prompts of `c` in a step, but there are 6"),
    ],
)
def test_shares_that_can_not_be_met_are_refused(shares, message):
    with pytest.raises(ValueError, match=message):
        make_loader(**shares)


def test_quotas_fill_a_step():
    with pytest.raises(ValueError, match="`mixture.quotas` add up to 8 prompts, but a step has `prompts_per_step: 4`"):
        MixtureConfig(quotas={"a": 8}).check_size(4)
