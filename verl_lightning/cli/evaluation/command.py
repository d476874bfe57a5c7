"""``verl-fit evaluate``: its options, the run that it takes the policy from, and where the scores go."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from verl_lightning.cli.arguments import SUBCOMMANDS, normalize_arguments
from verl_lightning.cli.command import fail, show_error
from verl_lightning.cli.preflight import check_settings
from verl_lightning.launch.options import split_words
from verl_lightning.needs import missing_package

if TYPE_CHECKING:
    from verl_lightning.cli.evaluation.policy import Score

DESCRIPTION = """\
Runs tasks of lm-eval (--tasks) or inspect (--inspect) on the policy of a run, whose own engine answers. What follows
these options is the usual command line of verl-fit validate: settings, with --ckpt_path for the weights of a
checkpoint. Without --ckpt_path it is the model at model.actor.path, such as a folder that HFCheckpoint has written.

  verl-fit evaluate --tasks gsm8k --limit 100 --config grpo --name first --ckpt_path last
  verl-fit evaluate --tasks gsm8k --config grpo --model.actor.path runs/first/hf/last
  verl-fit evaluate --inspect my_task.py --config grpo --name first --ckpt_path last

One process runs it, on one device. Scores are printed and written to evaluation.json in a folder below
trainer.default_root_dir. The packages: pip install lm_eval, pip install inspect_ai.
"""

RESULTS_FILE = "evaluation.json"
"""File of the scores, in the evaluation's folder."""


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Options of an evaluation by other projects' tasks."""

    tasks: list[str] = field(default_factory=list)
    """Names of lm-eval's tasks."""

    inspect: list[str] = field(default_factory=list)
    """Files or registered names of inspect's tasks."""

    include_path: str | None = None
    """Folder with further tasks of lm-eval."""

    limit: int | None = None
    """Most samples of each task; None for all."""

    num_fewshot: int | None = None
    """Examples before each question of lm-eval's; None leaves it to the task."""

    apply_chat_template: bool = False
    """True puts lm-eval's prompts into the policy's chat template; inspect always does."""

    def __post_init__(self) -> None:
        if bool(self.tasks) == bool(self.inspect):
            raise ValueError("`verl-fit evaluate` needs `--tasks` for lm-eval or `--inspect` for inspect, one of them.")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"`--limit` must be at least 1, got {self.limit}.")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise ValueError(f"`--num_fewshot` must not be negative, got {self.num_fewshot}.")
        of_lm_eval = {"include_path": None, "num_fewshot": None, "apply_chat_template": False}
        given = [f"--{name}" for name, default in of_lm_eval.items() if getattr(self, name) != default]
        if self.inspect and given:
            raise ValueError(f"`{given[0]}` is an option of lm-eval's tasks, which `--inspect` has none of.")
        if self.include_path is not None and not Path(self.include_path).is_dir():
            raise ValueError(f"`--include_path {self.include_path}` is no folder (looked from `{Path.cwd()}`).")


def main(argv: Sequence[str]) -> None:
    """Evaluates a policy, prints its scores and writes them to a file.

    Args:
        argv: Words after ``evaluate``.
    """
    sys.excepthook = show_error
    try:
        options, arguments = parse(argv)
    except (FileNotFoundError, ValueError) as error:
        fail(str(error))
    sys.path.append(os.getcwd())  # so that settings can name what lies there

    from verl_lightning.cli.evaluation.run import evaluate  # late: torch and Lightning are imported with it

    folder, scores = evaluate(options, arguments)
    path = folder / RESULTS_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(score) for score in scores], indent=2) + "\n", encoding="utf-8")
    sys.stdout.write("".join(f"{line}\n" for line in (*table(scores), f"Written to `{path}`.")))


def parse(argv: Sequence[str]) -> tuple[EvaluationOptions, list[str]]:
    """Reads the words after ``verl-fit evaluate``: its options, and the words of a validation of the run.

    Raises:
        FileNotFoundError: If a configuration does not exist.
        ValueError: If an option or a setting is wrong, or a package is missing.
    """
    given, words = split_words(make_parser(), argv)
    options = EvaluationOptions(**vars(given))
    if (complaint := missing_harness(options)) is not None:
        raise ValueError(complaint)
    arguments = as_validation(words)
    check_settings(arguments, is_here=False)
    return options, arguments


def make_parser() -> argparse.ArgumentParser:
    """The options of ``verl-fit evaluate``."""
    parser = argparse.ArgumentParser(
        prog="verl-fit evaluate",
        usage="verl-fit evaluate --tasks NAMES | --inspect FILES [OPTIONS] --config FILE_OR_NAME [--KEY VALUE ...]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--tasks", type=listed, default=[], help="of lm-eval, separated by commas, such as gsm8k")
    parser.add_argument("--inspect", type=listed, default=[], help="files or names of inspect's tasks")
    parser.add_argument("--include_path", help="folder with lm-eval tasks of your own")
    parser.add_argument("--limit", type=int, help="most samples of each task (all)")
    parser.add_argument("--num_fewshot", type=int, help="examples before each question (the task's own number)")
    parser.add_argument("--apply_chat_template", action="store_true", help="for lm-eval; inspect always does")
    return parser


def listed(text: str) -> list[str]:
    """The words of a list that is written with commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def missing_harness(options: EvaluationOptions) -> str | None:
    """Says that the package of the tasks is not installed; None if it is."""
    if options.tasks:
        return missing_package("`verl-fit evaluate --tasks`", "lm_eval", "Install it: `pip install lm_eval`.")
    return missing_package("`verl-fit evaluate --inspect`", "inspect_ai", "Install it: `pip install inspect_ai`.")


def as_validation(words: Sequence[str]) -> list[str]:
    """The words of a run as those of a validation of it in one process.

    Raises:
        FileNotFoundError: If a configuration does not exist.
        ValueError: If a word is wrong.
    """
    own = list(words[words[0] in SUBCOMMANDS :])
    return normalize_arguments(["validate", *own, "--trainer.devices", "1", "--trainer.num_nodes", "1"])


def table(scores: Sequence[Score]) -> Iterator[str]:
    """Yields lines that show the scores."""
    from verl_lightning.cli.runs import align

    rows: list[tuple[str, ...]] = [("task", "metric", "value", "stderr", "samples")]
    for score in scores:
        stderr = "" if score.stderr is None else f"{score.stderr:.4f}"
        rows.append((score.task, score.metric, f"{score.value:.4f}", stderr, str(score.samples)))
    yield from align(rows)
