from __future__ import annotations

import itertools

import pytest

from verl_lightning.data.loader import EvalLoader, TrainLoader


class Indices:
    """A source whose batch is the list of its rows, duplicates negated."""

    def __init__(self, num_rows, fingerprint=""):
        self.num_rows = num_rows
        self.fingerprint = fingerprint

    def __len__(self):
        return self.num_rows

    def batch(self, indices, is_duplicate):
        return [-index if duplicate else index for index, duplicate in zip(indices, is_duplicate, strict=True)]


def train_loader(num_rows=10, *, batch_size=2, rank=0, world_size=1, shuffle=True, seed=0, limit_batches=1.0, rows=""):
    return TrainLoader(
        Indices(num_rows, rows),
        batch_size=batch_size,
        rank=rank,
        world_size=world_size,
        shuffle=shuffle,
        seed=seed,
        limit_batches=limit_batches,
    )


def test_an_epoch_has_each_row_once_and_drops_what_fills_no_batch():
    batches = list(train_loader(11, batch_size=3))

    assert [len(batch) for batch in batches] == [3, 3, 3]
    assert len(set(itertools.chain(*batches))) == 9


def test_each_epoch_and_each_seed_has_an_order_of_its_own():
    loader = train_loader(100)
    first, second = list(loader), list(loader)

    assert first != second
    assert first == list(train_loader(100))
    assert first != list(train_loader(100, seed=1))


def test_rows_keep_their_order_without_shuffling():
    loader = train_loader(4, shuffle=False)

    assert list(loader) == list(loader) == [[0, 1], [2, 3]]


def test_two_ranks_together_read_what_one_rank_reads():
    alone = list(train_loader(13, batch_size=4))
    ranks = [list(train_loader(13, batch_size=2, rank=rank, world_size=2)) for rank in (0, 1)]

    assert [len(batch) for batch in ranks[0]] == [2, 2, 2]
    for whole, mine, theirs in zip(alone, *ranks, strict=True):
        assert whole[0::2] == mine
        assert whole[1::2] == theirs


@pytest.mark.parametrize("num_read", range(7))
def test_goes_on_from_its_state_with_another_world_size(num_read):
    whole = train_loader(13, batch_size=4)
    expected = [*whole, *whole]  # two epochs of three batches
    read = iter(train_loader(13, batch_size=4))
    saved = train_loader(13, batch_size=4)
    stream = itertools.chain.from_iterable(itertools.repeat(saved))
    read = [next(stream) for _ in range(num_read)]

    resumed = [train_loader(13, batch_size=2, rank=rank, world_size=2) for rank in (0, 1)]
    for loader in resumed:
        loader.load_state_dict(saved.state_dict())
    streams = [itertools.chain.from_iterable(itertools.repeat(loader)) for loader in resumed]
    rest = [[next(stream) for stream in streams] for _ in range(6 - num_read)]

    assert read == expected[:num_read]
    assert rest == [[batch[0::2], batch[1::2]] for batch in expected[num_read:]]


def test_iterating_changes_nothing_before_the_first_batch():
    loader = train_loader()
    next(iter(loader))
    before = loader.state_dict()

    iter(loader)

    assert loader.state_dict() == before


def test_an_epoch_that_was_cut_short_is_followed_by_the_next():
    whole = train_loader(100)
    epochs = [list(whole), list(whole)]
    limited = train_loader(100, limit_batches=3)

    assert [list(limited), list(limited)] == [epochs[0][:3], epochs[1][:3]]
    assert list(train_loader(100, limit_batches=0.1)) == epochs[0][:5]


def test_an_epoch_that_was_left_early_is_followed_by_the_next():
    whole = train_loader(100)
    second = [list(whole), list(whole)][1]
    left = train_loader(100)
    next(iter(left))

    assert list(left) == second


def test_the_end_of_an_epoch_resumes_with_a_whole_epoch():
    saved = train_loader(10)
    list(saved)
    resumed = train_loader(10)
    resumed.load_state_dict(saved.state_dict())

    assert list(resumed) == list(saved)


def test_other_data_than_in_the_checkpoint_starts_the_epoch_again():
    saved = train_loader(20)
    next(iter(saved))
    loader = train_loader(10)

    with pytest.warns(UserWarning, match="saved with 20 rows of training data, and there are now 10"):
        loader.load_state_dict(saved.state_dict())

    assert list(loader) == list(train_loader(10))


CHANGES = {
    "rows": ({"rows": "other"}, r"as many rows of training data as there are now, 20, but with others \(their digests"),
    "seed": (
        {"seed": 1},
        "were shuffled by the seed 0 when .*, and are shuffled by the seed 1 now",
    ),
    "shuffle": ({"shuffle": False}, "were shuffled by the seed 0 when .*, and are not shuffled now"),
}


@pytest.mark.parametrize(("change", "told"), CHANGES.values(), ids=CHANGES)
def test_other_rows_or_another_order_start_the_epoch_again(change, told):
    """As many rows as before: their number says nothing."""
    saved = train_loader(20, rows="these")
    next(iter(saved))
    loader = train_loader(20, **{"rows": "these"} | change)

    with pytest.warns(UserWarning, match=f"{told}.* so the epoch begins again"):
        loader.load_state_dict(saved.state_dict())

    assert list(loader) == list(train_loader(20, **change))


@pytest.mark.parametrize(("change", "told"), CHANGES.values(), ids=CHANGES)
def test_after_an_epoch_the_next_one_begins_with_what_there_is(change, told):
    saved = train_loader(20, rows="these")
    list(saved)
    loader, expected = train_loader(20, **change), train_loader(20, **change)
    list(expected)

    with pytest.warns(UserWarning, match=f"{told}.* The next epoch begins"):
        loader.load_state_dict(saved.state_dict())

    assert list(loader) == list(expected)


def test_a_state_of_an_older_version_goes_on():
    saved = train_loader(20, rows="these")
    read = [next(iter(saved))]
    loader = train_loader(20, rows="these")
    loader.load_state_dict({name: saved.state_dict()[name] for name in ("epoch", "position", "num_rows")})

    assert read + list(loader) == list(train_loader(20))


@pytest.mark.parametrize("num_read", [1, 2, 3])
def test_another_batch_size_goes_on_with_the_rows_that_are_left(num_read):
    """12 rows in batches of 3, then of 4; after 9 there is too little for one."""
    saved = train_loader(12, batch_size=3, shuffle=False)
    for _, _ in zip(range(num_read), saved, strict=False):
        pass
    loader = train_loader(12, batch_size=4, shuffle=False)

    told = "goes on after the" if num_read < 3 else "Fewer are left, so the next epoch begins"
    with pytest.warns(UserWarning, match=f"had 3 rows when the checkpoint was saved, and has 4 now. .*{told}"):
        loader.load_state_dict(saved.state_dict())

    rest = list(range(3 * num_read, 12)) if num_read < 3 else list(range(12))
    assert list(loader) == [rest[begin : begin + 4] for begin in range(0, len(rest) // 4 * 4, 4)]


def test_refuses_fewer_rows_than_a_step_takes():
    with pytest.raises(ValueError, match=r"takes 8 rows \(4 on each of 2 ranks\), but the training data has 7"):
        train_loader(7, batch_size=4, world_size=2)


def test_evaluation_reads_each_row_once_and_marks_what_fills_up():
    ranks = [EvalLoader(Indices(8), batch_size=2, rank=rank, world_size=3) for rank in range(3)]

    assert [len(loader) for loader in ranks] == [2, 2, 2]
    assert [list(loader) for loader in ranks] == [[[0, 3], [6]], [[1, 4], [7]], [[2, 5], [-0]]]


def test_evaluation_of_fewer_rows_than_ranks_fills_up_each_rank():
    flags = []
    source = Indices(1)
    source.batch = lambda indices, is_duplicate: flags.append((indices, is_duplicate))

    for rank in range(3):
        list(EvalLoader(source, batch_size=4, rank=rank, world_size=3))

    assert flags == [([0], [False]), ([0], [True]), ([0], [True])]
