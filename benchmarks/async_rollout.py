"""GRPO that samples while it learns, for several bounds on age, beside the synchronous run: tokens per second.

    python benchmarks/async_rollout.py --out async_1.json                     # engine and trainer on one card
    python benchmarks/async_rollout.py --engine-gpus 1 --out async_2.json     # an engine on a card of its own
    python benchmarks/async_rollout.py --tiny --engine-gpus --accelerator cpu # every line of it, on the CPU

Each row is a run of `vllm_rollout.py` in a process of its own: first the synchronous one, whose engine sleeps on the
training cards while the policy learns, then one for each bound, all with responses whose lengths have a coefficient of
variation of 1. With engines on other cards, the synchronous run has all cards: it trains on each and has an engine on
each. The last lines have each row's tokens per second over the synchronous one, and what weights take to go over.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("vllm_rollout.py")


def words_of(arguments: argparse.Namespace, bound: int, others: list[str]) -> list[str]:
    """The command of a row.

    Args:
        arguments: Ours.
        bound: Bound on age; 0 is the synchronous run.
        others: Arguments for `vllm_rollout.py` as they were given.
    """
    sizes = ["--response-length", "768", "--mean-length", "170", "--strategy", "auto", "--steps", "12", "--warmup", "4"]
    words = [sys.executable, str(SCRIPT), *sizes, "--no-bare", "--repeats", "3"]
    words += ["--tiny"] if arguments.tiny else []
    words += ["--accelerator", arguments.accelerator, "--out", str(arguments.folder / f"{bound}.json")]
    if bound:
        gpus = [str(gpu) for gpu in arguments.engine_gpus]
        words += ["--max-staleness", str(bound), "--in-flight", arguments.in_flight, "--beside-gpus", *gpus]
    elif own := [gpu for gpu in arguments.engine_gpus if gpu > 0]:
        words += ["--strategy", "fsdp", "--devices", str(1 + len(own))]
    return [*words, *others]


def row_of(arguments: argparse.Namespace, bound: int, others: list[str]) -> dict[str, Any]:
    """What one run measured; its last words if it fails or takes too long."""
    words = words_of(arguments, bound, others)
    sys.stdout.write(f"$ {' '.join(words)}\n")
    sys.stdout.flush()
    out = arguments.folder / f"{bound}.json"
    out.unlink(missing_ok=True)
    log = arguments.folder / f"{bound}.log"
    with log.open("w") as file:
        try:
            subprocess.run(words, stdout=file, stderr=subprocess.STDOUT, timeout=arguments.row_seconds, check=False)
        except subprocess.TimeoutExpired:
            file.write(f"\nended after {arguments.row_seconds} s\n")
    if not out.exists():
        return {"max_staleness": bound, "failed": log.read_text()[-2000:]}
    return {"max_staleness": bound, **json.loads(out.read_text())}


def compared(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Tokens per second of each row over the synchronous one, by its bound."""
    speeds = {row["max_staleness"]: row["response_tokens_per_s"] for row in rows if "failed" not in row}
    return {f"max_staleness {bound}": round(speed / speeds[0], 3) for bound, speed in speeds.items() if 0 in speeds}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bounds", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--engine-gpus", type=int, nargs="*", default=[0], help="of engines; none: on the CPU")
    parser.add_argument("--in-flight", choices=["finish", "continue", "abort"], default="continue")
    parser.add_argument("--accelerator", default="gpu")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/async-bench"), help="for logs")
    parser.add_argument("--row-seconds", type=float, default=240.0, help="most of a row")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments, others = parser.parse_known_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    rows = [row_of(arguments, bound, others) for bound in (0, *arguments.bounds)]
    result = {
        "command": " ".join(sys.argv),
        "rows": rows,
        "over_synchronous": compared(rows),
        "load_s": {str(row["max_staleness"]): row["sync"]["load_s"] for row in rows if row.get("sync")},
    }
    text = json.dumps(result, indent=1)
    sys.stdout.write(text + "\n")
    if arguments.out is not None:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
