"""The command ``verl-fit migrate``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from verl_lightning.migrate.reading import OVERRIDE, read_verl
from verl_lightning.migrate.report import Migration, config_text, counts, migrate, report_text

EPILOG = """\
examples:
  verl-fit migrate verl.yaml                                     a Hydra file, such as a run's saved configuration
  verl-fit migrate run_qwen.sh --output qwen.yaml                a run script, which is read and not run
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
    given = read_verl(file, words[1:] if is_file else words)
    if not given:
        raise ValueError(f"`{file}` has no settings of verl's. Give a Hydra YAML file, a run script, or overrides.")
    migration = migrate(given)
    output.write_text(config_text(migration), encoding="utf-8")
    report.write_text(report_text(migration), encoding="utf-8")
    sys.stdout.write(summary(migration, output, report))


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parses the options of the command, and verl's file and overrides."""
    parser = argparse.ArgumentParser(
        prog="verl-fit migrate",
        description="Translates a PPO or SFT configuration of verl 0.8 or 0.9, and reports what became of every key.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("verl", nargs="+", help="a YAML file or run script of verl's, and overrides in Hydra's form")
    parser.add_argument("--output", default="migrated.yaml", help="our YAML (%(default)s); the report is put beside")
    parser.add_argument("--force", action="store_true", help="write over files that exist")
    options = parser.parse_intermixed_args(list(argv))
    return options, options.verl


def summary(migration: Migration, output: Path, report: Path) -> str:
    """Returns the text that tells what was written, and what a user must decide."""
    lines = [f"wrote {output} and {report}: {counts(migration)}"]
    lines += [f"  {line.key}={line.value}: {line.words}" for line in migration.lines if line.fate == "not supported"]
    return "\n".join([*lines, f"next: verl-fit --config {output} --print_config"]) + "\n"
