"""What can be told of a command line before Lightning and torch are imported, which takes ten times as long.

Only what is certain is told: what the real parser or the run would refuse too. All else is left to them.
"""

from verl_lightning.cli.preflight.check import check_settings

__all__ = ["check_settings"]
