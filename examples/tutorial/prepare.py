"""Writes what the tutorial begins with: a tiny model that knows nothing, and word problems in CSV files.

The problems have the form of GSM8K: a question, and an answer that ends in ``#### NUMBER``. Nothing is downloaded. Run
``python examples/tutorial/prepare.py --out runs/tutorial``; it writes there

* ``model/``: a Llama of 341 thousand random weights with a tokenizer of characters, as a Hugging Face folder;
* ``train.csv``, ``val.csv``: columns ``question`` and ``answer``; no question is in both.
"""

from __future__ import annotations

import argparse
import csv
import random
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "quickstart"))
from prepare import build_model, build_tokenizer

NAMES = ("Ann", "Ben", "Eva", "Tom")
THINGS = ("apples", "coins", "shells", "stamps")
MOST = 9


def problems() -> list[tuple[str, str]]:
    """Every question with its answer: sums and differences of numbers up to 9."""
    found = []
    for name in NAMES:
        for thing in THINGS:
            for first in range(1, MOST + 1):
                for second in range(1, MOST + 1):
                    ask = f"How many {thing} does {name} have?"
                    total, left = first + second, first - second
                    more = f"{first} + {second} = {total}\n#### {total}"
                    found.append((f"{name} has {first} {thing} and finds {second}. {ask}", more))
                    if left >= 0:
                        less = f"{first} - {second} = {left}\n#### {left}"
                        found.append((f"{name} has {first} {thing} and loses {second}. {ask}", less))
    return found


def write_csv(path: Path, rows: Iterable[tuple[str, str]]) -> None:
    """Writes questions and answers, with a line of names first."""
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("question", "answer"), *rows])


def main() -> None:
    """Writes model and data."""
    parser = argparse.ArgumentParser(description="Write the tutorial's model and word problems.")
    parser.add_argument("--out", type=Path, default=Path("runs/tutorial"), help="folder to write into")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(out / "model")
    build_model(tokenizer).save_pretrained(out / "model")
    rows = problems()
    random.Random(0).shuffle(rows)
    write_csv(out / "val.csv", rows[:200])
    write_csv(out / "train.csv", rows[200:])
    print(f"Wrote a model and {len(rows)} word problems into {out}")


if __name__ == "__main__":
    main()
