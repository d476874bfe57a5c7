"""Runs the scenarios of all layouts in one launch of two processes and saves their results.

``python tests/strategies/megatron/run_layouts.py --folder inputs --out results.pt [LAYOUT...]``, from the root of the
repository; Lightning starts the second process.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.strategies.conformance import Bench, run_scenarios
from tests.strategies.megatron.cpu import pretend_cuda
from tests.strategies.megatron.layouts import LAYOUTS, MORE


def main() -> None:
    """Runs the layouts, then the rest; rank 0 saves what they returned, after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layouts", nargs="*", default=[*LAYOUTS, *MORE])
    parser.add_argument("--folder", type=Path, required=True, help="models and data, by `layouts.write_kinds`")
    parser.add_argument("--out", type=Path, required=True, help="file for the results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pretend_cuda()
    results: dict[str, Any] = {}
    for name in arguments.layouts:
        layout, run = MORE.get(name) or (LAYOUTS[name], None)
        sys.stderr.write(f"layout: {name}\n")
        options = {"timeout": 600.0} | layout.options
        bench = Bench(strategy="megatron", devices=2, folder=arguments.folder / layout.kind, options=options)
        results[name] = dict(run_scenarios(bench, layout.scenarios)) if run is None else run(bench)
        results.setdefault("threads", []).append(len(os.listdir("/proc/self/task")))
        if os.environ.get("LOCAL_RANK", "0") == "0":
            torch.save(results, arguments.out)


if __name__ == "__main__":
    main()
