"""``verl-fit slurm``: a job script for SLURM, which starts a run, saves before the time limit, and goes on."""

from __future__ import annotations

import argparse
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_lightning.launch.options import split_words
from verl_lightning.processes.exit_codes import ExitCode
from verl_lightning.submit.run import Run, check_ray_fits, read_run

DESCRIPTION = """\
Writes a job script for SLURM; `sbatch` submits it. What follows SLURM's own options is the usual command line of
verl-fit, or `ray` and its options where Ray is to place the processes; see verl-fit --help.

One process runs on each GPU. Before the time limit the run is told, saves and ends within `preemption.grace`, and the
job is put into the queue again. It goes on from there, in the folder of its name, also after a node has failed.
"""

MARGIN = 60
"""Seconds by which SLURM's warning may come too early, and that a process may take to end after its grace."""

TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})")
"""Pattern of a time limit, as `sbatch` takes it."""

OWN = frozenset(
    [
        "job-name",
        "nodes",
        "ntasks",
        "ntasks-per-node",
        "gpus",
        "gpus-per-node",
        "gres",
        "cpus-per-task",
        "time",
        "output",
        "open-mode",
        "chdir",
        "signal",
        "requeue",
        "no-requeue",
        "partition",
        "account",
    ]
)
"""Options of `sbatch` that the script sets itself."""


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """Options of a job script for SLURM: its nodes, limits, and place in the queue."""

    time: str
    """Time limit of one start, as `sbatch` takes it, such as `24:00:00` or `2-00`."""

    nodes: int | None = None
    """Machines; None takes `trainer.num_nodes`, else 1."""

    gpus_per_node: int | None = None
    """GPUs of a machine, each with a process; None takes `trainer.devices`."""

    ntasks_per_node: int | None = None
    """Processes of a machine without GPUs, for `trainer.accelerator: cpu`."""

    cpus_per_task: int | None = None
    """CPUs of a process, of a whole machine under Ray; None leaves it to the cluster, which often gives 1."""

    partition: str | None = None
    """Partition of the cluster."""

    account: str | None = None
    """Account that is charged."""

    name: str | None = None
    """Name of the job, its script and the run's folder; None takes the configuration's and the time."""

    setup: Sequence[str] = ()
    """Lines of shell before the run, such as `module load cuda`."""

    sbatch: Sequence[str] = ()
    """Further options of `sbatch`, such as `--constraint=h100`."""

    requeue: bool = True
    """True where a job that was told to stop is put into the queue again."""

    dry_run: bool = False
    """True where the script is only shown."""

    def __post_init__(self) -> None:
        for key in ("nodes", "gpus_per_node", "ntasks_per_node", "cpus_per_task"):
            if (number := getattr(self, key)) is not None and number < 1:
                raise ValueError(f"`--{key.replace('_', '-')}` must be at least 1, got {number}.")
        if None not in (self.gpus_per_node, self.ntasks_per_node):
            raise ValueError("`--ntasks-per-node` is for machines without GPUs: leave it or `--gpus-per-node` out.")
        seconds_of(self.time)
        for option in self.sbatch:
            if not option.startswith("--"):
                raise ValueError(f"`--sbatch {option}`: expected a whole option, such as `--sbatch=--constraint=h100`.")
            if (name := option[2:].partition("=")[0]) in OWN:
                raise ValueError(f"`--sbatch {option}`: the script sets `{name}` by itself; see verl-fit slurm --help.")


def seconds_of(time: str) -> float:
    """Returns a time limit in seconds.

    Raises:
        ValueError: If `sbatch` would not take it, or take it for no limit.
    """
    match = TIME.fullmatch(time)
    parts = [] if match is None else [int(part) for part in match["parts"].split(":")]
    if match is None or not any((*parts, int(match["days"] or 0))):
        raise ValueError(f"`--time {time}`: expected a time limit such as `90` (minutes), `24:00:00` or `2-12:00:00`.")
    if match["days"] is not None:  # hours come first
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:  # minutes do, unless there are three
        hours, minutes, seconds = parts if len(parts) == 3 else (0, *[*parts, 0][:2])
    return ((int(match["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def parse(argv: Sequence[str]) -> tuple[SlurmOptions, Run]:
    """Reads and checks the words after ``verl-fit slurm``.

    Raises:
        ValueError: If the run or SLURM is certain to refuse them.
        FileNotFoundError: If a configuration does not exist.
    """
    given, words = split_words(make_parser(), argv)
    options = SlurmOptions(**vars(given))
    return options, read_run(words, options.name)


def make_parser() -> argparse.ArgumentParser:
    """The options of ``verl-fit slurm``."""
    parser = argparse.ArgumentParser(
        prog="verl-fit slurm",
        usage="verl-fit slurm --time T [SLURM'S OPTIONS] [--] [ray ...] --config FILE_OR_NAME [--KEY VALUE ...]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--time", required=True, help="limit of one start, such as 24:00:00")
    parser.add_argument("--nodes", type=int, help="machines (`trainer.num_nodes`, else 1)")
    parser.add_argument("--gpus-per-node", type=int, help="of each machine, with a process each (`trainer.devices`)")
    parser.add_argument("--ntasks-per-node", type=int, help="processes of a machine without GPUs")
    parser.add_argument("--cpus-per-task", type=int, help="of each process; of a machine under Ray")
    parser.add_argument("--partition", help="of the cluster")
    parser.add_argument("--account", help="that is charged")
    parser.add_argument("--name", help="of the job, the script and the run's folder (configuration and time)")
    parser.add_argument("--setup", action="append", default=[], help="line of shell before the run; may be repeated")
    parser.add_argument("--sbatch", action="append", default=[], help="such as --sbatch=--qos=long; may be repeated")
    parser.add_argument("--no-requeue", dest="requeue", action="store_false", help="end for good when told to stop")
    parser.add_argument("--dry-run", action="store_true", help="show the script, write nothing")
    return parser


def write_script(options: SlurmOptions, run: Run, folder: Path, programs: Path) -> str:
    """Writes the job script of a run.

    Args:
        options: Options of the job.
        run: Run that it starts.
        folder: Working directory of the run, on all machines.
        programs: Folder with the programs of this Python environment, on all machines.

    Raises:
        ValueError: If job and run do not fit together.
    """
    nodes, tasks, has_gpus = shape(options, run)
    lead = math.ceil(run.grace) + MARGIN
    if seconds_of(options.time) <= lead:
        raise ValueError(
            f"`--time {options.time}` leaves no time to train: the run is told to stop {lead} s before it"
            f" (`preemption.grace` {run.grace:g} s and {MARGIN} s). Raise it, or lower `preemption.grace`."
        )
    cpus = [] if options.cpus_per_task is None else [f"--cpus-per-task={options.cpus_per_task}"]
    if run.ray is None:
        words = run.with_devices(tasks, nodes)
        start = srun_lines(run.going_on(words) if options.requeue else words, cpus)
    else:
        start = ray_lines(
            run, run.going_on(run.words) if options.requeue else run.words, tasks if has_gpus else 0, cpus
        )
    header = [
        f"--job-name={run.name}",
        f"--nodes={nodes}",
        f"--ntasks-per-node={tasks if run.ray is None else 1}",
        *([f"--gpus-per-node={tasks}"] if has_gpus else []),
        *cpus,
        f"--time={options.time}",
        f"--chdir={shlex.quote(str(folder))}",
        "--output=%x-%j.out",
        "--open-mode=append",
        f"--signal={'' if run.ray is None else 'B:'}USR1@{lead}",  # B: to this script alone, which Ray needs
        "--requeue" if options.requeue else "--no-requeue",
        *(f"--{key}={value}" for key in ("partition", "account") if (value := getattr(options, key)) is not None),
        *options.sbatch,
    ]
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in header), ""]
    lines += [f"export PATH={shlex.quote(str(programs))}:$PATH", *options.setup, "", *start]
    return "\n".join([*lines, *(requeue_lines() if options.requeue else []), 'exit "$code"', ""])


def shape(options: SlurmOptions, run: Run) -> tuple[int, int, bool]:
    """Returns the number of machines, of processes or GPUs on each, and whether these are GPUs.

    Raises:
        ValueError: If options and settings contradict each other.
    """
    is_cpu = run.reading.get("trainer.accelerator") == "cpu" or options.ntasks_per_node is not None
    key = "ntasks_per_node" if is_cpu else "gpus_per_node"
    if is_cpu and options.gpus_per_node is not None:
        raise ValueError("`--gpus-per-node` does not fit `trainer.accelerator: cpu`. Use `--ntasks-per-node`.")
    if is_cpu and run.reading.get("trainer.accelerator") not in ("cpu", "auto", None):
        accelerator = run.reading.get("trainer.accelerator")
        raise ValueError(
            f"`--ntasks-per-node` does not fit `trainer.accelerator: {accelerator}`. Use `--gpus-per-node`."
        )
    if run.ray is not None:
        return ray_shape(options, run, is_cpu)
    nodes = agreed(options.nodes, "--nodes", run.reading.get("trainer.num_nodes"), "trainer.num_nodes")
    flag = f"--{key.replace('_', '-')}"
    tasks = agreed(getattr(options, key), flag, run.reading.get("trainer.devices"), "trainer.devices")
    if tasks is None:
        raise ValueError(f"`verl-fit slurm` needs `{flag}`, or `trainer.devices` in the settings.")
    return nodes or 1, tasks, not is_cpu


def ray_shape(options: SlurmOptions, run: Run, is_cpu: bool) -> tuple[int, int, bool]:
    """Returns the same of a job that runs Ray, whose own options say how many processes there are.

    Raises:
        ValueError: If what the nodes have is not said, or too little.
    """
    if options.ntasks_per_node is not None:
        raise ValueError("`--ntasks-per-node` does not apply under Ray, whose `--num-workers` decides it.")
    if options.cpus_per_task is None:
        raise ValueError(
            "`verl-fit slurm ... ray` needs `--cpus-per-task`: the CPUs of a machine, which Ray shares out."
        )
    gpus = 0 if is_cpu else options.gpus_per_node or 0
    check_ray_fits(run, nodes=options.nodes or 1, cpus=options.cpus_per_task, gpus=gpus)
    return options.nodes or 1, max(gpus, 1), gpus > 0


def agreed(option: int | None, flag: str, setting: object, key: str) -> int | None:
    """Returns the number that an option or a setting gives; None where neither does.

    Raises:
        ValueError: If they differ.
    """
    known = int(setting) if isinstance(setting, int) and not isinstance(setting, bool) and setting > 0 else None
    if option is not None and setting not in (None, "auto", -1, "-1", option):
        raise ValueError(f"`{flag} {option}` and `{key}: {setting}` of the settings differ. Leave one of them out.")
    return known if option is None else option


def srun_lines(words: Sequence[str], cpus: Sequence[str]) -> list[str]:
    """Starts one process for each task, which Lightning's `SLURMEnvironment` makes a rank of."""
    # A cluster may kill all others when one ends by a code that is not 0: the first rank's 75 would become their 137.
    # SLURM 22.05 and later hands the CPUs of a job's tasks to no step by itself.
    step = shlex.join(["srun", "--kill-on-bad-exit=0", *cpus])
    return [f"{step} verl-fit {shlex.join(words)}", "code=$?"]


def ray_lines(run: Run, words: Sequence[str], gpus: int, cpus: Sequence[str]) -> list[str]:
    """Starts Ray on all machines, with a token of its own, and `verl-fit ray` on the first, where this script runs."""
    assert run.ray is not None
    wait = [] if run.ray.wait else ["--wait", "300"]
    command = ["ray", *run.ray_words, *wait]
    number = cpus[0].partition("=")[2]
    ray = f"--num-cpus={number} --num-gpus={gpus} --block"
    step = shlex.join(["srun", "--overlap", "--nodes=1", "--ntasks=1", *cpus])
    return [
        "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')",
        'mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        'head="${nodes[0]}:$((20000 + SLURM_JOB_ID % 10000))"',
        f'{step} --nodelist="${{nodes[0]}}" ray start --head --port="${{head#*:}}" {ray} &',
        'for _ in {1..60}; do ray status --address "$head" > /dev/null 2>&1 && break; sleep 5; done',
        'for node in "${nodes[@]:1}"; do',
        f'    {step} --nodelist="$node" ray start --address="$head" {ray} &',
        "done",
        "",
        'trap \'[ -z "$driver" ] || kill -USR1 "$driver"\' USR1',
        f'verl-fit {shlex.join(command)} --address "$head" -- {shlex.join(words)} &',
        "driver=$!",
        'wait "$driver"; code=$?',
        'while [ "$code" -eq 138 ]; do wait "$driver"; code=$?; done  # USR1 ends a wait, not the driver',
    ]


def requeue_lines() -> list[str]:
    """Puts the job into the queue again if its run was told to stop."""
    return [
        f'if [ "$code" -eq {ExitCode.PREEMPTED:d} ]; then',
        '    scontrol requeue "$SLURM_JOB_ID" || echo "verl-fit slurm: not requeued; sbatch the script again." >&2',
        "fi",
    ]
