"""Each step has its share of each kind of rows, in an order that follows from seed and epoch alone."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint

from tests.runs import Recorder, make_ppo, make_prompts, make_rollout, make_trainer
from verl_lightning.data.loader import TrainLoader
from verl_lightning.data.mixture import CurriculumConfig, Mixture, MixtureConfig

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


LEVELS = {"weights": {"a": 2, "b": 1, "c": 1}, "curriculum": CurriculumConfig(pass_rate=0.5, num_steps=2)}


def test_kinds_of_a_curriculum_join_in_their_order():
    loader = make_loader(**LEVELS)
    batches, counts = (batch for _ in range(3) for batch in loader), []
    for number in range(9):
        counts.append(Counter(KINDS[row] for row in next(batches)))
        if number in (2, 8):
            loader.mixture.joined.append(loader.num_handed_out + (number == 2))

    assert counts[:4] == [{"a": 8}] * 4
    assert all(count.keys() == {"a", "b"} for count in counts[4:])
    assert sum(counts[4:], Counter()) == {"a": 27, "b": 13}
    assert Counter(KINDS[row] for row in next(batches)) == {"a": 4, "b": 2, "c": 2}


@pytest.mark.parametrize("steps", [3, 7, 10])
def test_a_curriculum_goes_on_where_it_was(steps):
    def rows(loader, count):
        batches = (batch for _ in range(5) for batch in loader)
        for _ in range(count):
            yield next(batches)
            if loader.num_handed_out in (2, 9):
                loader.mixture.joined.append(loader.num_handed_out)

    whole, loader, resumed = list(rows(make_loader(**LEVELS), 18)), make_loader(**LEVELS), make_loader(**LEVELS)
    list(rows(loader, steps))

    resumed.load_state_dict(loader.state_dict())

    assert list(rows(resumed, 18 - steps)) == whole[steps:]


def test_a_curriculum_that_rows_do_not_fill_is_refused():
    with pytest.raises(ValueError, match="takes 8 prompts of `c` in a step, but there are 6"):
        make_loader(weights={"c": 1, "a": 9, "b": 0}, curriculum=CurriculumConfig())


def learn_in_turn(tmp_path, tiny_folder, prompts, ckpt_path=None):
    """Kinds that join after each step in which every fifth response passes, and the rows of each step."""
    seen, recorder = [], Recorder()
    mixture = MixtureConfig(
        column="level",
        weights={"easy": 1, "hard": 1, "hardest": 2},
        curriculum=CurriculumConfig(pass_rate=0.2, num_steps=1, success_reward=0.5),
    )
    note = LambdaCallback(on_train_batch_start=lambda trainer, module, batch, _: seen.append(batch.row_index.tolist()))
    saves = [ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)] if ckpt_path is None else []
    options = {"max_steps": 6, "enable_checkpointing": ckpt_path is None}
    trainer = make_trainer(tmp_path, make_rollout(), note, recorder, *saves, **options)
    data = make_prompts(prompts, mixture=mixture, shuffle=True)
    trainer.fit(make_ppo(tiny_folder), data, ckpt_path=ckpt_path)
    return seen, recorder


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")  # the resumed run saves nothing
def test_a_run_opens_kinds_by_its_pass_rate_and_a_resumed_one_goes_on(tmp_path, tiny_folder, prompt_file):
    rows = [json.loads(line) for line in prompt_file.read_text().splitlines()]
    levels = [["easy", "hard", "hardest"][number % 3] for number in range(len(rows))]
    prompts = tmp_path / "levels.jsonl"
    prompts.write_text(
        "".join(json.dumps({**row, "level": level}) + "\n" for row, level in zip(rows, levels, strict=True))
    )

    seen, recorder = learn_in_turn(tmp_path, tiny_folder, prompts)
    again, _ = learn_in_turn(tmp_path / "again", tiny_folder, prompts, str(tmp_path / "step=2.ckpt"))

    kinds, rates = recorder.column("curriculum/kinds"), recorder.column("curriculum/pass_rate")
    assert kinds[0] == 1
    for step in range(5):
        assert kinds[step + 1] == min(3, kinds[step] + (rates[step] >= 0.2))
    assert kinds[-1] > 1
    assert [len({levels[row] for row in batch}) for batch in seen] == kinds
    assert again == seen[2:]


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
