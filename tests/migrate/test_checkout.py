"""verl's own run scripts: the words that bash passes, and the values that Hydra composes, key by key.

Set ``VERL_CHECKOUT`` to the folder of a checkout (several with colons between), and ``HYDRA_PACKAGES`` to one into
which ``pip install --no-deps --target`` has put hydra-core, omegaconf and antlr4-python3-runtime 4.9. verl is not
imported.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.migrate.checkout import HOME, bash_commands, hydra_values, keys_read, primary_of, same, scripts_of
from verl_lightning.migrate.composing import flatten
from verl_lightning.migrate.reading import is_override, read_run
from verl_lightning.migrate.report import check_is_verls, is_unknown, migrate
from verl_lightning.migrate.scripts import read_script
from verl_lightning.migrate.shell import Shell

CHECKOUTS = [Path(folder) for folder in os.environ.get("VERL_CHECKOUT", "").split(":") if folder]
PACKAGES = os.environ.get("HYDRA_PACKAGES", "")
pytestmark = [pytest.mark.oracle, pytest.mark.skipif(not CHECKOUTS, reason="VERL_CHECKOUT names no checkout")]


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
def test_each_script_is_translated_or_starts_no_trainer(checkout):
    refused = []
    for path in scripts_of(checkout):
        run = read_run(str(path), ())
        if run.given:
            migration = migrate(run.given, run.notes)
            check_is_verls(migration, str(path))
            assert [line.key for line in migration.lines] == list(run.given)
        else:
            refused.append(path.name)

    assert len(refused) < 15, refused


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
def test_overrides_are_the_words_that_bash_passes(checkout, tmp_path):
    """Where a shell decides, and another way is taken, the report says so."""
    compared, differs = 0, []
    for path in scripts_of(checkout):
        script = read_script(path.read_text(), {"HOME": HOME}, is_override)
        ours = [word for word in script.words if "trainer.n" not in word.text]  # those of torchrun are flags there
        if not ours:
            continue
        started = [
            [w for w in words if is_override(w) and "trainer.n" not in w] for words in bash_commands(path, tmp_path)
        ]
        compared += any(started)
        fits = any(
            len(words) == len(ours) and all(a.text == b for a, b in zip(ours, words, strict=True) if a.is_known)
            for words in started
        )
        if any(started) and not fits and not script.notes and not any(word.notes for word in ours):
            differs.append(path)

    assert compared > 60
    assert differs == []


@pytest.mark.skipif(not PACKAGES, reason="HYDRA_PACKAGES names no folder with hydra-core")
@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
def test_values_are_those_that_hydra_composes(checkout):
    """All that is given, and all that the translation takes from our table of verl's own values."""
    runs, jobs = [], []
    for path in scripts_of(checkout):
        text = path.read_text()
        script = read_script(text, {"HOME": HOME}, is_override)
        words = [word.text for command in Shell({}).run(text) for word in command.words]
        if (primary := primary_of(checkout, script, words)) is not None:
            runs.append(path)
            jobs.append((*primary, [word.text for word in script.words if word.is_known]))

    differences, num_scripts, num_keys = [], 0, 0
    for path, composed in zip(runs, hydra_values(checkout, jobs, PACKAGES), strict=True):
        if isinstance(composed, str):
            continue  # Hydra refuses the script: a key that its files don't have, or have already
        given = read_run(str(path), [f"HOME={HOME}"]).given
        known = {key: value for key, value in given.items() if not is_unknown(value)} | keys_read(given)
        pairs = [(key, value, flatten(composed)[key]) for key, value in known.items() if key in flatten(composed)]
        num_scripts, num_keys = num_scripts + 1, num_keys + len(pairs)
        differences += [(path.name, *pair) for pair in pairs if not same(*pair[1:])]

    assert num_scripts >= 60
    assert num_keys > 5000
    assert differences == []
