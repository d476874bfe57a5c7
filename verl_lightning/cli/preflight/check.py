"""The check of a whole command line before Lightning is imported."""

from __future__ import annotations

from collections.abc import Sequence

from verl_lightning.cli.preflight.machine import obstacles
from verl_lightning.cli.preflight.reading import Reading
from verl_lightning.cli.preflight.words import read_settings


def check_settings(words: Sequence[str], *, is_here: bool = True) -> None:
    """Refuses settings that can't be read, or that ask for what this machine has not.

    Args:
        words: Words of the command line, as `normalize_arguments` gives them.
        is_here: True if the run is on this machine.

    Raises:
        ValueError: If the real parser or the run is certain to refuse them.
    """
    flags = [word.partition("=")[0] for word in words]
    if any(flag in ("-h", "--help") or (flag.startswith("--") and flag.endswith(".help")) for flag in flags):
        return
    reading = Reading(words[0])
    for setting in read_settings(words[1:]):
        reading.add(setting)
    if "--print_config" in flags or not is_here:  # settings may be put together elsewhere than they are used
        return
    for obstacle in obstacles(reading, words):
        raise ValueError(obstacle)
