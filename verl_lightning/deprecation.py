"""How a renamed class or option is told of: what, since when, gone in which version, and what to use."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Renamed:
    """A name that still works and will be gone."""

    old: str
    """The name as users write it, such as `update.ppo_epochs`."""

    new: str
    """What to write in its place."""

    since: str
    """First version that warns."""

    gone_in: str
    """First version without the old name."""

    def __str__(self) -> str:
        return (
            f"`{self.old}` is `{self.new}` since version {self.since}, and will be gone in {self.gone_in}."
            f" Use `{self.new}`."
        )

    def warn(self) -> None:
        """Shows the message, the first time in this process."""
        if self not in _SHOWN:
            _SHOWN.add(self)
            warnings.warn(str(self), FutureWarning, stacklevel=3)


_SHOWN: set[Renamed] = set()


def renamed_classes(module: str, names: dict[Renamed, type]) -> Callable[[str], type]:
    """A module's ``__getattr__`` that lends renamed classes under their old names.

    Args:
        module: Name of the module, for the error about any other name.
        names: The class for each renaming; ``old`` is its old name in the module.
    """
    known = {renamed.old: (renamed, cls) for renamed, cls in names.items()}

    def lend(name: str) -> type:
        if name not in known:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        renamed, cls = known[name]
        renamed.warn()
        return cls

    return lend
