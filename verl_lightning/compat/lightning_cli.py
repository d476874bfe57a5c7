"""Private methods of `LightningCLI` in lightning>=2.6.4,<2.7."""

from __future__ import annotations

from pathlib import Path
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

    def settings_text(self) -> str:
        """All settings of the subcommand as YAML."""
        settings = self.config[self.subcommand]
        return str(self._parser(self.subcommand).dump(settings, skip_unset=False))

    def run_from(self, ckpt_path: Path | None) -> None:
        """Run the subcommand of a command line that was kept from it, from a checkpoint or from the start."""
        self.config_init[self.subcommand].ckpt_path = ckpt_path and str(ckpt_path)
        super()._run_subcommand(str(self.subcommand))

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        if self.runs:
            super()._run_subcommand(subcommand)

    @override
    def _parse_ckpt_path(self) -> None:
        """Does nothing: Lightning's reads the whole checkpoint to let its hyper-parameters win over the settings."""
