"""The ``verl-fit`` command, and how it tells what went wrong."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from verl_lightning import __version__
from verl_lightning.cli.arguments import SUBCOMMANDS, normalize_arguments, shipped_configs
from verl_lightning.cli.help_pages import HELP, short_help, without_all
from verl_lightning.faults import cause_for_user, is_of_collective
from verl_lightning.processes import peers
from verl_lightning.processes.exit_codes import ExitCode
from verl_lightning.processes.messages import has_another_failed, say_once
from verl_lightning.processes.signals import EndSoon, listen

if TYPE_CHECKING:
    from verl_lightning.cli.phase_settings import PhaseSettings

ANSWERS = {
    "doctor": ("verl_lightning.cli.doctor", "main"),
    "kubernetes": ("verl_lightning.submit.command", "submit_to_kubernetes"),
    "migrate": ("verl_lightning.migrate.command", "main"),
    "runs": ("verl_lightning.cli.runs", "main"),
    "slurm": ("verl_lightning.submit.command", "submit_to_slurm"),
}
"""Module and function of each subcommand that trains nothing; imported when it is asked for."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `verl-fit`, showing errors that are meant for the user as one sentence.

    The working directory becomes importable, so that a YAML file can name classes and functions that lie in it.

    Args:
        argv: Words after the program's name; by default those of this process.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(HELP.format(shipped=", ".join(shipped_configs()) or "none"))
        raise SystemExit(0 if argv else 2)
    if argv[0] == "--version":
        sys.stdout.write(f"verl-fit {__version__}\n")
        raise SystemExit(0)
    if argv[0] == "ray":
        from verl_lightning.launch.driver import main as launch  # late: only this needs Ray

        launch(argv[1:])
        raise SystemExit(0)
    if argv[0] == "evaluate":
        from verl_lightning.cli.evaluation.command import main as evaluate  # late: only this needs it

        evaluate(argv[1:])
        raise SystemExit(0)
    if argv[0] in ANSWERS:
        module, function = ANSWERS[argv[0]]
        answer(getattr(importlib.import_module(module), function), argv[1:])
    if len(argv) == 2 and argv[0] in SUBCOMMANDS and argv[1] in ("-h", "--help"):
        sys.stdout.write(short_help(argv[0]))
        raise SystemExit(0)
    argv = without_all(argv)
    sys.path.append(os.getcwd())
    sys.excepthook = show_error
    from verl_lightning.cli.phase_settings import split_phases  # late: it reads YAML, and help needs no package

    try:
        arguments = normalize_arguments(argv)
        phases = split_phases(arguments)
        # Else nothing would be gained, and classes that no setting names may have been imported.
        if "lightning.pytorch" not in sys.modules:
            check_all(arguments, phases)
    except (FileNotFoundError, ValueError) as error:
        fail(str(error))

    peers.join()
    stop_listening = listen(EndSoon())
    try:
        run(arguments, phases)
    finally:
        stop_listening()


def check_all(arguments: Sequence[str], phases: Sequence[PhaseSettings] | None) -> None:
    """Refuses settings that can't be read, or that ask for what this machine has not.

    Args:
        arguments: Words from `normalize_arguments`.
        phases: Settings of each phase, from `split_phases`; None without phases.

    Raises:
        ValueError: If the real parser or the run is certain to refuse them.
    """
    from verl_lightning.cli.preflight import check_settings  # late: other subcommands do without

    if phases is None:
        check_settings(arguments)
    for phase in phases or ():
        with phase.words() as words:
            check_settings(words)


def answer(command: Callable[[Sequence[str]], None], argv: Sequence[str]) -> NoReturn:
    """Runs a subcommand that trains nothing, and ends the process.

    Args:
        command: Function that takes the words after the subcommand's name.
        argv: Those words.
    """
    try:
        command(argv)
    except (OSError, ValueError) as error:
        fail(str(error))
    raise SystemExit(0)


def run(arguments: Sequence[str], phases: Sequence[PhaseSettings] | None = None) -> None:
    """Runs a subcommand of LightningCLI, or several fits one after the other.

    Args:
        arguments: Words from `normalize_arguments`.
        phases: Settings of each phase, from `split_phases`; None without phases.

    Raises:
        SystemExit: With an exit code that tells how it ended, unless that is 0.
    """
    # Late: other subcommands need neither torch nor Lightning.
    from verl_lightning.cli.lightning_cli import CLI
    from verl_lightning.cli.phases import fit_phases

    try:
        cli = CLI(arguments) if phases is None else fit_phases(phases)
    except SystemExit as end:
        peers.fail(end.code if isinstance(end.code, int) else ExitCode.FAILED)
        if isinstance(end.__context__, KeyboardInterrupt):  # of which Lightning makes an ordinary failure
            raise SystemExit(ExitCode.INTERRUPTED) from None
        if words := getattr(end, "words", ""):  # a `Preempted`
            say_once(f"verl-fit: {words}\n")
        raise
    except BaseException:
        peers.fail()
        raise
    peers.leave()
    ending = cli.ending
    if ending.code and cli.trainer.is_global_zero:  # launchers make a failure of what other ranks say
        say_once(f"verl-fit: {ending.words} (exit code {ending.code:d}).\n")
        raise SystemExit(ending.code)


def show_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A `sys.excepthook`: errors that are meant for the user become one sentence, all others keep their traceback.

    Where a fault came up while an error was handled, as when a run is torn down, the error's sentence is the last line.
    """
    cause = cause_for_user(error)
    if cause is None and is_of_collective(error) and has_another_failed():
        say_once("verl-fit: error: another process of this run has failed; its message says why.\n")
        return
    text = "" if cause is error else "".join(traceback.format_exception(kind, error, trace))
    say_once(text if cause is None else f"{text}verl-fit: error: {cause}\n")


def fail(message: str) -> NoReturn:
    """Ends the process with one sentence and the exit code of a wrong command line."""
    say_once(f"verl-fit: error: {message}\n")
    raise SystemExit(ExitCode.USAGE)
