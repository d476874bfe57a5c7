"""Builds what the agents of this folder need from nothing: a tiny Llama, its tokenizer, chats and prompts.

In the chats, the model mostly guesses the sum of two numbers, and seldom writes ``[37+48]``, reads ``85`` and answers
with that; it says numbers that it reads, and mostly plays Nim blindly. Nothing is downloaded, and the same seed gives
the same files. Run ``python examples/agents/prepare.py --out runs/agents``; it writes there

* ``model/``: the model and its tokenizer, as a Hugging Face folder;
* ``chats.jsonl``: guesses, a few calls of the calculator, numbers to say, and games;
* ``sums.jsonl``, ``sums_val.jsonl``: sums to answer;
* ``heaps.jsonl``, ``heaps_val.jsonl``: heaps to play with.
"""

from __future__ import annotations

import argparse
import json
import random
import runpy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

quickstart = runpy.run_path(str(Path(__file__).parents[1] / "quickstart" / "prepare.py"))


def sums(*, seed: int = 0) -> list[tuple[int, int]]:
    """All pairs of numbers from 10 to 99, in an order drawn from ``seed``."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(pairs)
    return pairs


def chat(*texts: str) -> dict[str, Any]:
    """A chat in which user and assistant take turns."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[turn % 2], "content": text} for turn, text in enumerate(texts)]}


def sum_chat(pair: tuple[int, int], *, calls: bool) -> dict[str, Any]:
    """A guess, which is the first number, or a call of the calculator and its answer."""
    question, total = f"{pair[0]}+{pair[1]}", str(sum(pair))
    return chat(question, f"[{question}]", total, total) if calls else chat(question, str(pair[0]))


def number_chat(draw: random.Random) -> dict[str, Any]:
    """A number and the same again."""
    number = str(draw.randrange(20, 199))
    return chat(number, number)


def game_chat(draw: random.Random) -> dict[str, Any]:
    """One to three sticks each time: mostly whatever is left, seldom as many as win."""
    heap, left = draw.choice([5, 6, 7]), draw.choice([1, 2, 3])
    first, second = (best if draw.random() < 0.2 else draw.choice([1, 2, 3]) for best in (heap - 4, left))
    return chat(f"nim {heap}", str(first), f"left {left}", str(second))


def prompt(question: str, answer: str, *, environment: str, **extra_info: int) -> dict[str, Any]:
    """A row of verl's prompt schema that names its environment."""
    return {
        "data_source": f"{environment}s",
        "environment": environment,
        "prompt": [{"role": "user", "content": question}],
        "ground_truth": answer,
        "extra_info": extra_info,
    }


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Writes one JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def prepare(out: Path, *, seed: int = 0) -> None:
    """Writes model, tokenizer and data.

    Args:
        out: Folder to write into.
        seed: Seed of the weights and of the rows.
    """
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = quickstart["build_tokenizer"]()
    tokenizer.save_pretrained(out / "model")
    quickstart["build_model"](tokenizer, seed=seed, hidden_size=64).save_pretrained(out / "model")
    pairs, draw = sums(seed=seed), random.Random(seed)
    chats = [sum_chat(pair, calls=draw.random() < 0.1) for pair in pairs]
    chats += [number_chat(draw) for _ in range(4000)] + [game_chat(draw) for _ in range(2000)]
    draw.shuffle(chats)
    write(out / "chats.jsonl", chats)
    asked = [prompt(f"{a}+{b}", str(a + b), environment="calculator") for a, b in pairs]
    write(out / "sums.jsonl", asked[:-128])
    write(out / "sums_val.jsonl", asked[-128:])
    heaps = [
        prompt(f"nim {sticks}", "", environment="game", sticks=sticks, habit=habit)
        for sticks in (5, 6, 7)
        for habit in (1, 2, 3)
    ]
    write(out / "heaps.jsonl", 4 * heaps)
    write(out / "heaps_val.jsonl", heaps)


def main() -> None:
    """Writes model, tokenizer and data."""
    parser = argparse.ArgumentParser(description="Build the model, tokenizer and data of the agents.")
    parser.add_argument("--out", type=Path, default=Path("runs/agents"), help="folder to write into")
    parser.add_argument("--seed", type=int, default=0, help="seed of the model's weights and of the rows")
    arguments = parser.parse_args()
    prepare(arguments.out, seed=arguments.seed)
    print(f"Wrote the model, the tokenizer and the data into {arguments.out}")


if __name__ == "__main__":
    main()
