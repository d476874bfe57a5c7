"""Private methods of `LightningCLI` in lightning>=2.6.4,<2.7."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.cli import LightningCLI
from typing_extensions import override


class OpenCLI(LightningCLI):
    """A `LightningCLI` that can be kept from running, and takes no settings from checkpoints."""

    runs = True
    """True if the subcommand is run; to be set before the constructor is called."""

    def setting(self, key: str) -> Any:
        """A setting of the subcommand, as it was read."""
        return self.config[self.subcommand].get(key)

    def built(self, key: str) -> Any:
        """A setting of the subcommand; an object where it is a class."""
        return self.config_init[self.subcommand].get(key)

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        if self.runs:
            super()._run_subcommand(subcommand)

    @override
    def _parse_ckpt_path(self) -> None:
        """Does nothing: Lightning's reads the whole checkpoint to let its hyper-parameters win over the settings."""
