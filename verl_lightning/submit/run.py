"""A run that is to be submitted to a cluster: its command line, read and checked before anything waits in a queue."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_lightning.cli.arguments import normalize_arguments
from verl_lightning.cli.phase_settings import refuse_phases, split_phases
from verl_lightning.cli.preflight.machine import about_parts
from verl_lightning.cli.preflight.reading import Reading
from verl_lightning.cli.preflight.words import read_settings
from verl_lightning.launch.actor_demands import GRACE, actor_demands
from verl_lightning.launch.options import LaunchOptions, parse_launch
from verl_lightning.ray.cluster import Node, shortage
from verl_lightning.run_records import stem_of, timed_name, wrong_name

INTERACTIVE = ("bash", "interactive")
"""Names of jobs in which Lightning takes no notice of SLURM."""

VERSION = re.compile(r"--trainer\.logger\.(init_args\.)?version\b")
"""Pattern of a flag that names a run."""

OWN_LOGGER = "ResumableCSVLogger"
"""Logger whose ``version`` names the run's folder; it is there where the settings name none."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A command line of `verl-fit`, and what is known of it."""

    name: str
    """Name of the run, of its job, and of the folder in which it goes on."""

    words: list[str]
    """The words of `verl-fit`, without a subcommand's."""

    reading: Reading
    """The settings in them."""

    ray: LaunchOptions | None
    """Options of `verl-fit ray`; None where the cluster itself starts the processes."""

    ray_words: list[str]
    """The same options as the user wrote them."""

    @property
    def grace(self) -> float:
        """Seconds that the run takes at most to save and end when it is told to."""
        grace = self.reading.get("preemption.grace")
        return float(grace) if isinstance(grace, int | float) else GRACE

    def with_devices(self, devices: int, num_nodes: int) -> list[str]:
        """Returns the words with the number of processes, where the settings do not have it."""
        known = {"trainer.devices": devices, "trainer.num_nodes": num_nodes}
        added = [(f"--{key}", str(number)) for key, number in known.items() if self.reading.get(key) != number]
        return [*self.words, *(word for pair in added for word in pair)]

    def going_on(self, words: Sequence[str]) -> list[str]:
        """Returns words by which every start but the first goes on with the start before; an evaluation has none.

        Raises:
            ValueError: If the settings do not let it.
        """
        if self.reading.command != "fit":
            return list(words)
        if self.reading.get("ckpt_path") not in (None, "auto"):
            raise ValueError(
                f"`ckpt_path: {self.reading.get('ckpt_path')}` is where each start would begin again. Leave it out: a"
                " job that is started again goes on with its own last checkpoint. Or say `--no-requeue`."
            )
        for complaint in without_checkpoint(self.reading):
            raise ValueError(complaint)
        auto = ["--ckpt_path", "auto"] if self.reading.get("ckpt_path") is None else []
        return [*words, *own_folder(self.reading, words, self.name), *auto]


def read_run(words: Sequence[str], name: str | None) -> Run:
    """Reads the words behind a cluster's own options.

    Args:
        words: Words of `verl-fit`: ``ray`` with its options, or a subcommand and settings.
        name: Name of the run; None makes one of its configuration and the time.

    Raises:
        ValueError: If the run is certain to refuse them.
        FileNotFoundError: If a configuration does not exist.
    """
    options, inner = parse_launch(words[1:]) if words[:1] == ["ray"] else (None, list(words))
    ray_words = list(words[1 : len(words) - len(inner)]) if options else []
    normalized = normalize_arguments(inner)
    phases = split_phases(normalized)
    if options is not None:
        refuse_phases(phases)
    reading = Reading(normalized[0])
    with phases[0].words() if phases else nullcontext(normalized) as of_first:  # all have the same processes
        for setting in read_settings(of_first[1:]):
            reading.add(setting)
    for complaint in about_parts(reading):
        raise ValueError(complaint)
    name = default_name(normalized) if name is None else name
    if (wrong := wrong_name(name)) is not None:
        raise ValueError(wrong)
    if name in INTERACTIVE:
        raise ValueError(f"`--name {name}`: in a job of this name, Lightning takes no notice of SLURM. Choose another.")
    return Run(
        name=name, words=inner, reading=reading, ray=options, ray_words=[word for word in ray_words if word != "--"]
    )


def default_name(words: Sequence[str]) -> str:
    """Makes a name of the first configuration and the time, as a run does that is given none."""
    stems = [stem_of(Path(words[at + 1])) for at, word in enumerate(words[:-1]) if word == "--config"]
    return timed_name(next(iter(stems), words[0]))


def own_folder(reading: Reading, words: Sequence[str], name: str) -> list[str]:
    """Returns words by which a run has a folder to itself, where `--ckpt_path auto` finds no other run's checkpoint."""
    given, logger = reading.get("trainer.logger"), reading.classes.get("trainer.logger")
    is_chosen = given is False and reading.get("trainer.default_root_dir") is not None
    is_versioned = any(VERSION.match(word) for word in words) or reading.get("trainer.logger.version") is not None
    is_own = logger is None or logger.name == OWN_LOGGER
    loggers = given if isinstance(given, list) else []
    is_named = (is_versioned and is_own) or any(version_in(each) is not None for each in loggers)
    return [] if reading.get("name") is not None or is_chosen or is_named else ["--name", name]


def version_in(logger: Any) -> Any:
    """The version of the logger whose folder is the run's, as a list of loggers has it; None where there is none."""
    is_own = isinstance(logger, Mapping) and str(logger.get("class_path")).rpartition(".")[2] == OWN_LOGGER
    settings = logger.get("init_args") if is_own else None
    return settings.get("version") if isinstance(settings, Mapping) else None


def without_checkpoint(reading: Reading) -> Iterator[str]:
    """Yields complaints about settings with which a run saves nothing to go on from."""
    if reading.get("trainer.enable_checkpointing") is False:
        yield "`trainer.enable_checkpointing: false` saves nothing to go on from. Leave it out, or say `--no-requeue`."
    callbacks = reading.get("trainer.callbacks")
    given = callbacks if isinstance(callbacks, list) else []
    names = [str(item.get("class_path")).rpartition(".")[2] for item in given if isinstance(item, Mapping)]
    if "HFCheckpoint" in names and not any(name.endswith("ModelCheckpoint") for name in names):
        yield (
            "`trainer.callbacks` have an `HFCheckpoint`, from which no run goes on, but no `ModelCheckpoint`. Add one"
            " with `save_last: true`, or say `--no-requeue`."
        )


def check_ray_fits(run: Run, *, nodes: int, cpus: int, gpus: int) -> None:
    """Refuses a run that the nodes can't hold once Ray has them.

    Args:
        run: Run under Ray.
        nodes: Number of nodes.
        cpus: CPUs of each.
        gpus: GPUs of each.

    Raises:
        ValueError: With the arithmetic, if it can't.
    """
    assert run.ray is not None
    demands = [run.ray.demand(gpus), *actor_demands(run.words, run.ray.num_workers)]
    room = {"CPU": float(cpus), "GPU": float(gpus)}
    if complaint := shortage(demands, [Node(address=f"node {node}", resources=room) for node in range(1, nodes + 1)]):
        raise ValueError(complaint)
