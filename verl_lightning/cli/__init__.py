"""The command line: its words, its settings, its errors."""

from verl_lightning.cli.arguments import find_config, normalize_arguments, shipped_configs
from verl_lightning.cli.command import main, show_error

__all__ = ["find_config", "main", "normalize_arguments", "shipped_configs", "show_error"]
