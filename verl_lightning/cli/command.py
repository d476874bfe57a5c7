"""The ``verl-fit`` command, and how it tells what went wrong."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NoReturn

from verl_lightning import __version__
from verl_lightning.cli.arguments import normalize_arguments, shipped_configs
from verl_lightning.faults import cause_for_user, is_of_collective
from verl_lightning.processes import peers
from verl_lightning.processes.exit_codes import ExitCode
from verl_lightning.processes.messages import has_another_failed, say_once
from verl_lightning.processes.signals import EndSoon, listen

HELP = """\
usage: verl-fit [ray --num-workers N] [fit|validate|test] --config FILE_OR_NAME [--KEY VALUE ...]
       verl-fit slurm --time T --nodes N [ray ...] --config FILE_OR_NAME [--KEY VALUE ...]
       verl-fit migrate FILE [KEY=VALUE ...]
       verl-fit runs [FOLDER]
       verl-fit doctor [PART ...]

Post-trains language models with reinforcement learning (PPO, GRPO and others) or supervised fine-tuning, on PyTorch
Lightning. Settings come from one or more YAML files, merged in their order; flags always win over files.

  fit        Train; meant when no subcommand is given.
  validate   Evaluate on the validation data; `--ckpt_path` picks the weights.
  test       The same on the test data.
  ray        Any of these in processes that Ray starts on a cluster; see verl-fit ray --help.
  slurm      Write a job script for SLURM that runs any of these; see verl-fit slurm --help.
  migrate    Translate a configuration of verl; see verl-fit migrate --help.
  runs       List the runs in a folder, how far they are and how they ended.
  doctor     Show versions, GPUs, and what each part needs; see verl-fit doctor --help.

Examples:
  verl-fit --config grpo                           a configuration that ships with the package
  verl-fit --config my.yaml --trainer.max_steps 10 --model.actor.optim.lr 2e-6
  verl-fit --config my.yaml --strategy ddp         short for --trainer.strategy ddp
  verl-fit --config my.yaml --name first           a run of this name, in runs/first
  verl-fit --config my.yaml --ckpt_path last       go on with the newest run; auto begins anew where there is none
  verl-fit --config my.yaml --print_config         show every setting and stop

Shipped configurations: {shipped}

More help:
  verl-fit fit --help                              every option of the trainer, strategies and callback slots
  verl-fit fit --model.help PPOModule              what the algorithm can be told; also SFTModule, DPOModule and others
  verl-fit fit --data.help PromptDataModule        also ChatDataModule, PreferenceDataModule
  verl-fit fit --rollout.help HFRollout            how responses are sampled
  verl-fit fit --trainer.callbacks.help EarlyStopping
  verl-fit --version
"""


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
    if argv[0] == "migrate":
        from verl_lightning.migrate.command import main as migrate  # late: only this needs its tables

        answer(migrate, argv[1:])
    if argv[0] == "slurm":
        from verl_lightning.submit.command import submit_to_slurm  # late: others do without

        answer(submit_to_slurm, argv[1:])
    if argv[0] == "runs":
        from verl_lightning.cli.runs import main as list_runs  # late: others do without

        answer(list_runs, argv[1:])
    if argv[0] == "doctor":
        from verl_lightning.cli.doctor import main as examine  # late: it reads torch

        answer(examine, argv[1:])
    sys.path.append(os.getcwd())
    sys.excepthook = show_error
    try:
        arguments = normalize_arguments(argv)
        # Else nothing would be gained, and classes that no setting names may have been imported.
        if "lightning.pytorch" not in sys.modules:
            from verl_lightning.cli.preflight import check_settings  # late: the answers above do without

            check_settings(arguments)
    except (FileNotFoundError, ValueError) as error:
        fail(str(error))

    peers.join()
    stop_listening = listen(EndSoon())
    try:
        run(arguments)
    finally:
        stop_listening()


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


def run(arguments: Sequence[str]) -> None:
    """Runs a subcommand of LightningCLI.

    Args:
        arguments: From `normalize_arguments`.

    Raises:
        SystemExit: With an exit code that tells how it ended, unless that is 0.
    """
    from verl_lightning.cli.lightning_cli import CLI  # late: other subcommands need neither torch nor Lightning

    try:
        cli = CLI(arguments)
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
