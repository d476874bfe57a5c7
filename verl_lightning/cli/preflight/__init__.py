"""Early checks of a command line, before Lightning and torch are imported, which takes ten times as long.

They refuse only what the real parser or the run is certain to refuse too. All else is left to these.
"""

from verl_lightning.cli.preflight.check import check_settings

__all__ = ["check_settings"]
