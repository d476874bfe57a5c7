"""An option's old key works in files and flags, is told of once, and is not in what is printed."""

from __future__ import annotations

import warnings

import pytest

from tests.cli.toy import ParsedCLI
from verl_lightning.cli import deprecation
from verl_lightning.cli.deprecation import RenamedOption

KEYS = {"old": "model.*.slowness", "new": "model.*.lr", "since": "0.2", "gone_in": "0.4"}
MESSAGE = "`model.optim.slowness` is `model.optim.lr` since version 0.2, and will be gone in 0.4. Use `model.optim.lr`."


@pytest.fixture(autouse=True)
def table(monkeypatch):
    """The toy once had a slowness, which was 1 / lr."""
    option = RenamedOption(**KEYS, convert=lambda slowness: 1 / slowness)
    monkeypatch.setattr(deprecation, "RENAMED_OPTIONS", (option,))
    monkeypatch.setattr(deprecation, "_SHOWN", set())


@pytest.mark.parametrize(
    "words",
    [
        ["--config", "old.yaml"],
        ["--model.optim.slowness", "4"],
        ["--model.init_args.optim.slowness=4"],
        ["--model.optim", "{slowness: 4, betas: [0.1, 0.2]}"],
        ["--model.optim={slowness: 4}"],
        ["--config", "old.yaml", "--model.optim.slowness", "4"],
    ],
)
def test_the_old_key_sets_the_new_option_and_is_told_of_once(parse, folder, words):
    (folder / "old.yaml").write_text("model: {init_args: {optim: {slowness: 4}}}")
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        assert parse(*words).model.optim.lr == 0.25
    assert [str(warning.message) for warning in shown] == [MESSAGE]


@pytest.mark.filterwarnings("ignore:`model.optim.slowness`")
def test_the_new_key_is_printed(parse, capsys):
    with pytest.raises(SystemExit):
        parse("--model.optim.slowness", "4", "--print_config")
    printed = capsys.readouterr().out
    assert "lr: 0.25" in printed
    assert "slowness" not in printed


def test_both_keys_in_one_group_are_refused(refuse, folder):
    (folder / "both.yaml").write_text("model: {class_path: ToyModule, init_args: {optim: {slowness: 4, lr: 1}}}")
    said = "`model.optim.slowness` and `model.optim.lr` are one option. Leave out `model.optim.slowness`."
    assert refuse("--config", "both.yaml") == f"in `both.yaml`: {said}"
    assert refuse("--config", "base.yaml", "--model.optim", "{slowness: 4, lr: 1}") == said


def test_other_settings_are_left_as_they_are():
    words = ["fit", "--config", "base.yaml", "--model.optim.lr", "0.5", "--model.judge={class_path: Lenient}"]
    assert list(deprecation.renamed_flags(words)) == words
    assert ParsedCLI(words).model.optim.lr == 0.5
