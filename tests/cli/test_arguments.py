"""What the words of a command line mean, before Lightning sees them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from verl_lightning.cli import find_config, main, normalize_arguments, shipped_configs


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["--config", "base.yaml"], ["fit", "--config", "base.yaml"]),
        (["validate", "--config=base.yaml"], ["validate", "--config", "base.yaml"]),
        (["test", "-c", "base.yaml"], ["test", "--config", "base.yaml"]),
        (["--strategy", "ddp", "-c", "base.yaml"], ["fit", "--config", "base.yaml", "--trainer.strategy", "ddp"]),
        (["--strategy=ddp"], ["fit", "--trainer.strategy=ddp"]),
        (["--strategy.x", "1"], ["fit", "--strategy.x", "1"]),
        (["--a", "1", "--config", "base", "--b=1"], ["fit", "--config", "base.yaml", "--a", "1", "--b=1"]),
        (["fit", "--print_config"], ["fit", "--print_config"]),
    ],
)
def test_arguments_are_normalized(given, meant, folder):
    """Files come first, `fit` is meant where no subcommand stands, and `--strategy` is short for the trainer's."""
    (folder / "base").write_text("")  # a file without a suffix is a file
    meant = [word.replace("base.yaml", "base") if "base" in given else word for word in meant]
    assert normalize_arguments(given) == meant


def test_normalizing_twice_changes_nothing():
    once = normalize_arguments(["--strategy", "ddp", "--config", "base.yaml", "--a=1"])
    assert normalize_arguments(once) == once


def test_later_files_stay_behind_earlier_ones(folder):
    (folder / "over.yaml").write_text("")
    words = normalize_arguments(["--a", "1", "--config", "base.yaml", "--config", "over.yaml"])
    assert words == ["fit", "--config", "base.yaml", "--config", "over.yaml", "--a", "1"]


def test_missing_config_names_the_closest_file():
    with pytest.raises(FileNotFoundError, match=r"`--config bas.yaml` is neither .* Did you mean `base.yaml`\?"):
        find_config("bas.yaml")


@pytest.mark.parametrize("words", [["--config"], ["--config", "--strategy", "ddp"], ["--config="]])
def test_config_without_a_value_is_refused(words):
    with pytest.raises(ValueError, match="`--config` needs a YAML file"):
        normalize_arguments(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["base.yaml"], "say that `base.yaml` is a configuration: `--config base.yaml`"),
        (["fit", "grpo", "--a"], "say that `grpo` is a configuration: `--config grpo`"),
        (["train"], "there is no subcommand `train`. Choose from fit, validate, test, ray, slurm, kubernetes, migrate"),
        (
            ["--config", "a", "--model.x=\udcff"],
            r"the word `--model.x=\\udcff` is no text in UTF-8",
        ),
        (["predict"], "`predict` is not offered. Sample with transformers or vLLM from the folder"),
    ],
)
def test_a_first_word_without_a_meaning_is_refused(words, message):
    with pytest.raises(ValueError, match=message):
        normalize_arguments(words)


@pytest.mark.parametrize("suffix", ["", ".yaml"])
def test_every_shipped_config_is_found_by_name(suffix):
    for name, path in shipped_configs().items():
        assert find_config(name + suffix) == path


@pytest.mark.parametrize(("words", "code"), [([], 2), (["--help"], 0), (["-h"], 0), (["--version"], 0)])
def test_general_questions_are_answered_on_stdout(words, code, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == code
    assert "verl-fit" in capsys.readouterr().out


def test_help_without_a_parser_imports_neither_torch_nor_lightning():
    """`verl-fit --help` and `verl-fit fit --help` answer at once."""
    code = "import sys\nfrom verl_lightning.cli import main\n"
    for words in (["--help"], ["fit", "--help"]):
        code += f"try: main({words})\nexcept SystemExit: pass\n"
    code += "assert not {'torch', 'lightning', 'transformers'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_missing_config_is_one_line(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--config", "nothing_like_it.yaml"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("verl-fit: error: `--config nothing_like_it.yaml` is neither a file nor")
