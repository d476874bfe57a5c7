"""The options of ``verl-fit ray``, which stand before the usual words of ``verl-fit``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from verl_lightning.compat.jsonargparse import actions_of
from verl_lightning.ray.cluster import Demand

DESCRIPTION = """\
Runs verl-fit in processes that Ray places on the nodes of a cluster, one for each GPU or share of CPUs.
What follows Ray's own options is the usual command line of verl-fit; see verl-fit --help.

The cluster is the one at --address, else the one that runs on this machine, else a new one of this machine alone.
Every node needs the package, and this folder under the same path. `trainer.devices` and `trainer.num_nodes` come from
the placement. When a worker dies, all are started again from the last checkpoint. SIGTERM saves and ends the run.
"""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Options of the processes that Ray starts: their number, resources, cluster and restarts."""

    num_workers: int
    """Training processes, over all nodes."""

    cpus_per_worker: float = 1.0
    """CPUs that each reserves."""

    gpus_per_worker: int | None = None
    """GPUs that each reserves, 0 or 1; None means one if the cluster has any."""

    address: str | None = None
    """Address of the cluster, as `ray.init` takes it."""

    max_restarts: int = 3
    """Number of times that the processes may be started again after one has died."""

    wait: float = 0.0
    """Seconds to wait for nodes that the cluster lacks, at the start and after a death."""

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ValueError(f"`--num-workers` must be at least 1, got {self.num_workers}.")
        if self.cpus_per_worker <= 0:
            raise ValueError(f"`--cpus-per-worker` must be positive, got {self.cpus_per_worker:g}.")
        if self.gpus_per_worker not in (None, 0, 1):
            raise ValueError(f"`--gpus-per-worker` must be 0 or 1, got {self.gpus_per_worker}: a process drives one.")
        if self.max_restarts < 0:
            raise ValueError(f"`--max-restarts` must not be negative, got {self.max_restarts}.")
        if self.wait < 0:
            raise ValueError(f"`--wait` must not be negative, got {self.wait:g}.")

    def demand(self, num_cluster_gpus: float) -> Demand:
        """Returns the resources that the workers need of a cluster with this number of GPUs."""
        gpus = float(num_cluster_gpus > 0) if self.gpus_per_worker is None else float(self.gpus_per_worker)
        return Demand(option="--num-workers", count=self.num_workers, cpus=self.cpus_per_worker, gpus=gpus)


def parse_launch(argv: Sequence[str]) -> tuple[LaunchOptions, list[str]]:
    """Splits the words after ``verl-fit ray`` into Ray's options and those of ``verl-fit``.

    Args:
        argv: Ray's options, then, after a ``--`` or not, the others.

    Raises:
        ValueError: If an option has a bad value, stands too late, or no words for ``verl-fit`` follow.
    """
    given, words = split_words(_make_parser(), argv)
    options = LaunchOptions(**vars(given))
    for name in (word.partition("=")[0] for word in words):
        if name in ("--trainer.devices", "--trainer.num_nodes"):
            raise ValueError(f"`{name}` does not apply under Ray, whose placement decides it. Use `--num-workers`.")
    return options, words


def split_words(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Splits a command line into a launcher's own options and the words of ``verl-fit`` behind them.

    Args:
        parser: Parser of the launcher's options, with the launcher's name.
        argv: Options of the launcher, then, after a ``--`` or not, the others.

    Raises:
        ValueError: If an option stands too late, or no words for ``verl-fit`` follow.
    """
    argv = list(argv)
    num_words = {flag: 1 + (action.nargs != 0) for action in actions_of(parser) for flag in action.option_strings}
    end = 0
    while end < len(argv) and (flag := argv[end].partition("="))[0] in num_words:
        end += 1 if flag[1] else num_words[flag[0]]
    options = parser.parse_args(argv[:end])
    words = argv[end + (argv[end : end + 1] == ["--"]) :]
    for name in (word.partition("=")[0] for word in words):
        if name in num_words.keys() - {"-h", "--help"}:
            raise ValueError(f"`{name}` is an option of `{parser.prog}`: put it before the settings of the run.")
    if not words:
        raise ValueError(f"`{parser.prog}` needs the usual settings too, such as `--config ppo.yaml`.")
    return options, words


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl-fit ray",
        usage="verl-fit ray --num-workers N [RAY'S OPTIONS] [--] --config FILE_OR_NAME [--KEY VALUE ...]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    defaults = LaunchOptions(num_workers=1)
    parser.add_argument("--num-workers", type=int, required=True, help="training processes over all nodes")
    parser.add_argument(
        "--cpus-per-worker", type=float, default=defaults.cpus_per_worker, help="reserved by each (%(default)s)"
    )
    parser.add_argument("--gpus-per-worker", type=int, help="0 or 1 reserved by each (1 if the cluster has GPUs)")
    parser.add_argument("--address", help="of the cluster's head, or `auto`")
    parser.add_argument(
        "--max-restarts", type=int, default=defaults.max_restarts, help="after deaths of workers (%(default)s)"
    )
    parser.add_argument(
        "--wait", type=float, default=defaults.wait, help="seconds for missing nodes to appear (%(default)s)"
    )
    return parser
