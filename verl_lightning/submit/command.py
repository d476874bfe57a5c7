"""``verl-fit slurm`` and ``verl-fit kubernetes``: what they write, and what they say of it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from verl_lightning.submit import kubernetes, slurm


def submit_to_slurm(argv: Sequence[str]) -> None:
    """Runs ``verl-fit slurm``.

    Args:
        argv: Words after ``slurm``.

    Raises:
        ValueError: If the job or its run is certain to be refused, or the script is there already.
        FileNotFoundError: If a configuration does not exist.
    """
    options, run = slurm.parse(argv)
    text = slurm.write_script(options, run, Path.cwd(), Path(sys.executable).parent)
    put(text, Path(f"{run.name}.sbatch"), "sbatch", is_shown=options.dry_run)


def submit_to_kubernetes(argv: Sequence[str]) -> None:
    """Runs ``verl-fit kubernetes``.

    Args:
        argv: Words after ``kubernetes``.

    Raises:
        ValueError: If the job or its run is certain to be refused, or the manifest is there already.
        FileNotFoundError: If a configuration does not exist.
    """
    options, run = kubernetes.parse(argv)
    put(kubernetes.write_manifest(options, run), Path(f"{run.name}.yaml"), "kubectl apply -f", is_shown=options.dry_run)


def put(text: str, path: Path, submit: str, *, is_shown: bool) -> None:
    """Shows a text, or writes it to a file and says how that is submitted.

    Args:
        text: Job script or manifest.
        path: File to write.
        submit: Command that takes the file.
        is_shown: True where the text is only shown.

    Raises:
        ValueError: If there is such a file.
    """
    if is_shown:
        sys.stdout.write(text)
        return
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError as error:
        raise ValueError(f"`{path}` is there already. Remove it, or choose another `--name`.") from error
    sys.stdout.write(f"Wrote `{path}`. Submit it: {submit} {shlex.quote(str(path))}\n")
