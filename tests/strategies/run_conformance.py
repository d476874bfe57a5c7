"""Runs all conformance scenarios under one strategy and saves their results.

``python tests/strategies/run_conformance.py --strategy ddp --devices 2 --folder inputs --out results.pt``, from the
root of the repository; Lightning starts the other processes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.strategies.conformance import Bench, run_scenarios
from tests.strategies.fsdp_layouts import run_layouts


def main() -> None:
    """Runs the scenarios; rank 0 saves what they returned."""
    parser = argparse.ArgumentParser(description="Run the conformance scenarios under one strategy.")
    parser.add_argument("--strategy", required=True, help="ours by name, or auto")
    parser.add_argument("--options", type=json.loads, default={}, help="of the strategy, as JSON")
    parser.add_argument("--devices", type=int, required=True, help="processes")
    parser.add_argument("--scenarios", type=names, help="between commas; all by default")
    parser.add_argument("--layouts", action="store_true", help="run those of `fsdp_layouts` too")
    parser.add_argument("--folder", type=Path, required=True, help="model and data, by `conformance.write_inputs`")
    parser.add_argument("--out", type=Path, required=True, help="file for the results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.strategy == "megatron":
        from tests.strategies.megatron.cpu import pretend_cuda

        pretend_cuda()
    bench = Bench(
        strategy=arguments.strategy, devices=arguments.devices, folder=arguments.folder, options=arguments.options
    )
    results = dict(run_scenarios(bench, arguments.scenarios))
    if arguments.layouts:
        results["layouts"] = dict(run_layouts(bench))
    if os.environ.get("LOCAL_RANK", "0") == "0":
        torch.save(results, arguments.out)


def names(said: str) -> list[str]:
    """Those between commas."""
    return [name for name in said.split(",") if name]


if __name__ == "__main__":
    main()
