"""Runs the phases of a command line, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import get_loader
from lightning.fabric.utilities import rank_zero_info
from lightning.pytorch import Trainer
from typing_extensions import override

from verl_lightning.callbacks.run_phase import FinishedPhase, read_progress
from verl_lightning.cli.lightning_cli import CLI
from verl_lightning.cli.phase_settings import KEY, PhaseSettings
from verl_lightning.cli.save_config import SaveConfig
from verl_lightning.phases import Phases, saved_phase

PROCESSES = ("accelerator", "devices", "num_nodes", "strategy")
"""Settings of the trainer that are the same in all phases, as they share their processes."""


class Rehearsal(CLI):
    """Reads the settings of a phase and builds its parts without a trainer, to find what is wrong with them early."""

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Builds none."""


class PhaseCLI(CLI):
    """`verl-fit` for a later phase: it logs where earlier ones have.

    Args:
        words: Command line of the phase.
        phases: Phases of the run.
    """

    def __init__(self, words: Sequence[str], phases: Phases) -> None:
        self._phases = phases
        super().__init__(words, run=False)

    @override
    def choose_folder(self, trainer: Trainer) -> None:
        trainer.loggers = self._phases.loggers


def fit_phases(split: Sequence[PhaseSettings]) -> CLI:
    """Runs phases from where they are: from the first, or where ``--ckpt_path`` says to go on with a run.

    Args:
        split: Settings of the phases.

    Returns:
        The command line of the phase that ran last.
    """
    with split[0].words() as words:
        cli = CLI(words, run=False)
    rehearsals: list[CLI] = [cli]
    for settings in split[1:]:
        with settings.words() as words:
            rehearsals.append(Rehearsal(words, run=False))
    check_processes(split, rehearsals)
    whole = {KEY: {settings.name: repeatable(each) for settings, each in zip(split, rehearsals, strict=True)}}
    phases, checkpoint = begun(cli, [settings.name for settings in split])
    for settings in split:
        if settings.name in phases.models:
            rank_zero_info(f"Phase `{settings.name}` is over already.")
            continue
        if settings is not split[0]:
            with settings.words(phases.models) as words:
                cli = PhaseCLI(words, phases)
        for callback in cli.trainer.callbacks:  # type: ignore[attr-defined] # set by a connector
            if isinstance(callback, SaveConfig):
                callback.whole = whole
        phase = phases.prepare(settings.name, cli.trainer, is_last=settings is split[-1])
        cli.run_from(checkpoint or phases.last_checkpoint(settings.name, cli.trainer))
        checkpoint = None
        if not phases.finish(phase):
            break
    return cli


def repeatable(cli: CLI) -> dict[str, Any]:
    """All settings of a phase, without the run that is gone on with and its name."""
    settings: dict[str, Any] = get_loader("yaml")(cli.settings_text())
    return {key: value for key, value in settings.items() if key not in ("ckpt_path", "name")}


def begun(cli: CLI, names: Sequence[str]) -> tuple[Phases, Path | None]:
    """Finds how far the run is that ``--ckpt_path`` says to go on with.

    Args:
        cli: Command line of the first phase.
        names: Names of the phases.

    Returns:
        The run; and the checkpoint that the user has chosen, None to take the newest of the phase that was at work.

    Raises:
        ValueError: If the checkpoint is not of one of these phases.
    """
    path, loggers = cli.built("ckpt_path"), cli.trainer.loggers
    if path is None:
        return Phases.of(None, loggers, []), None
    saved = saved_phase(Path(path))
    if saved.get("name") not in names:
        theirs = f"of the phase `{saved['name']}`" if saved else "of a run without phases"
        raise ValueError(
            f"`--ckpt_path`: `{path}` is {theirs}, but `{KEY}` are {', '.join(f'`{name}`' for name in names)}."
            " Give the settings of its run, or say which run is meant by `--name`."
        )
    if cli.last is not None and cli.last.run is not None:
        return Phases.of(cli.last.run, loggers, read_progress(cli.last.run)), None
    return Phases.of(None, loggers, [FinishedPhase(**each) for each in saved["done"]]), Path(path)


def check_processes(split: Sequence[PhaseSettings], read: Sequence[CLI]) -> None:
    """Refuses phases that ask for different processes.

    Raises:
        ValueError: If two of them do.
    """
    for option in PROCESSES:
        first, *others = (each.setting("trainer").get(option) for each in read)
        for settings, other in zip(split[1:], others, strict=True):
            if other != first:
                raise ValueError(
                    f"`{KEY}.{settings.name}.trainer.{option}` is {other}, but that of `{split[0].name}` is {first}."
                    " Phases share their processes: set it once, outside of them."
                )
