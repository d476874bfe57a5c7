"""The command ``verl-fit migrate``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from verl_lightning.migrate.reading import OVERRIDE, read_run
from verl_lightning.migrate.report import Migration, check_is_verls, config_text, counts, migrate, report_text
from verl_lightning.migrate.trl import read_trl
from verl_lightning.migrate.trl_settings import migrate_trl

EPILOG = """\
examples:
  verl-fit migrate verl.yaml                                     a Hydra file, such as a run's saved configuration
  verl-fit migrate run_qwen.sh NNODES=2 --output qwen.yaml       a run script, which is read and not run
  verl-fit migrate grpo.yaml num_processes=8                     TRL's options, as for `trl grpo --config`
  verl-fit migrate algorithm.adv_estimator=grpo data.train_batch_size=64 ...    a command line of verl's
"""


def main(argv: Sequence[str]) -> None:
    """Writes our configuration and a report of every key.

    Args:
        argv: Words after ``verl-fit migrate``.

    Raises:
        FileNotFoundError: If verl's file does not exist.
        FileExistsError: If a file of the output exists.
        ValueError: If verl's settings can't be read.
    """
    options, words = parse(argv)
    output = Path(options.output)
    report = output.with_suffix(".report.md")
    for path in (output, report):
        if path.exists() and not options.force:
            raise FileExistsError(f"`{path}` exists. Name another file with `--output`, or give `--force`.")
    is_file = bool(words) and OVERRIDE.fullmatch(words[0]) is None
    file = words[0] if is_file else None
    if file is not None and not Path(file).is_file():
        raise FileNotFoundError(f"`{file}` is neither a file nor an override of verl's, such as `trainer.nnodes=2`.")
    migration = translate(file, words[1:] if is_file else words)
    output.write_text(config_text(migration), encoding="utf-8")
    report.write_text(report_text(migration), encoding="utf-8")
    sys.stdout.write(summary(migration, output, report))


def translate(file: str | None, words: Sequence[str]) -> Migration:
    """Translates verl's settings, or TRL's.

    Args:
        file: File of either; None for a command line of verl's.
        words: Overrides, and variables of a script's environment.

    Raises:
        ValueError: If the file is neither's, or its settings can't be read.
    """
    if (trl := read_trl(file, words)) is not None:
        return migrate_trl(trl)
    run = read_run(file, words)
    if not run.given:
        raise ValueError(
            f"`{file}` has no settings of verl's or TRL's: it starts no trainer with options such as"
            " `algorithm.adv_estimator=grpo` or `--num_generations 8`. Nothing was written. Give a YAML file, a run"
            " script, or overrides of verl's."
        )
    migration = migrate(run.given, run.notes)
    check_is_verls(migration, file)
    return migration


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parses the options of the command, and verl's file and overrides."""
    parser = argparse.ArgumentParser(
        prog="verl-fit migrate",
        description="Translates a PPO or SFT configuration of verl, or TRL's `GRPOConfig` or `SFTConfig`, and"
        " reports what became of every key.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("verl", nargs="+", help="YAML file or run script of verl's or TRL's; overrides `key=value`")
    parser.add_argument("--output", default="migrated.yaml", help="our YAML (%(default)s); the report is put beside")
    parser.add_argument("--force", action="store_true", help="write over files that exist")
    options = parser.parse_intermixed_args(list(argv))
    return options, options.verl


def summary(migration: Migration, output: Path, report: Path) -> str:
    """Returns the text that tells what was written, and what a user must decide."""
    lines = [f"wrote {output} and {report}: {counts(migration)}"]
    if migration.choices:
        whole = [f"  taken: {sentence}" for sentence, keys in migration.choices.items() if not keys]
        lines += whole
        if rest := len(migration.choices) - len(whole):
            lines.append(f"  {rest} things that a shell decides were taken as the report says")
    lines += [f"  {line.key}={line.value}: {line.words}" for line in migration.lines if line.fate == "not supported"]
    return "\n".join([*lines, f"next: verl-fit --config {output} --print_config"]) + "\n"
