"""Private methods of Lightning's command line are where `compat.lightning_cli` looks for them."""

from __future__ import annotations

import inspect

from lightning.pytorch.cli import LightningCLI

from verl_lightning.compat.lightning_cli import OpenCLI


def test_lightnings_command_line_runs_and_reads_checkpoints_by_these_methods():
    """`OpenCLI` overrides them."""
    for name in ("_run_subcommand", "_parse_ckpt_path"):
        theirs, ours = (inspect.signature(getattr(kind, name)) for kind in (LightningCLI, OpenCLI))
        assert list(theirs.parameters) == list(ours.parameters)
    assert {"_run_subcommand", "_parse_ckpt_path"} <= set(LightningCLI.__init__.__code__.co_names)
