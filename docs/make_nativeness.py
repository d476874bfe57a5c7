"""Writes the README's table of what Lightning has in stock: ``python docs/make_nativeness.py``.

Its lines are those of `tests/nativeness.py`, which are tried.

A test fails when the table is not what this script would write.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.nativeness import BY_HAND, CALLBACKS, FLAGS, LOGGERS, PRECISIONS, PROFILERS, STRATEGIES, Stock  # noqa: E402

README = ROOT / "README.md"
NEEDS = "needs the package"
BEGIN, END = "<!-- nativeness: written by docs/make_nativeness.py -->\n", "<!-- end -->\n"
KINDS = {
    "Callbacks": CALLBACKS,
    "Loggers": LOGGERS,
    "Profilers": PROFILERS,
    "Precisions": PRECISIONS,
    "Strategies": STRATEGIES,
    "Options of `Trainer`": FLAGS,
}


def table() -> str:
    """The table, and a list of what is refused."""
    lines = ["| | works | is refused | asks for a package that the tests lack |", "|---|---|---|---|"]
    for kind, stock in KINDS.items():
        cells: list[list[str]] = [[], [], []]
        for name, each in stock.items():
            cells[2 if NEEDS in each.refusal else bool(each.refusal)].append(shown(name, each))
        lines.append(" | ".join([f"| {kind}", *(", ".join(cell) for cell in cells)]) + " |")
    return "\n".join([*lines, "", *reasons(), ""])


def shown(name: str, stock: Stock) -> str:
    """A name, with a mark where not all modules refuse it."""
    return f"`{name}`" + (" (PPO)" if stock.only_ppo else "")


def reasons() -> list[str]:
    """The sentence of each refusal, once, and what was tried by hand."""
    found = dict.fromkeys(each.refusal for stock in KINDS.values() for each in stock.values() if each.refusal)
    first = "What is refused is refused before models load, in a message that begins so and says what to use:"
    by_hand = "Loggers whose packages the tests lack were tried by hand, on 2026-11-30:"
    tried = (f"- {what}: {outcome}." for what, outcome in BY_HAND.items())
    return [first, "", *(f"- {each}" for each in found), "", by_hand, "", *tried]


def written(text: str) -> str:
    """The README with a fresh table."""
    head, _, rest = text.partition(BEGIN)
    return head + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    README.write_text(written(README.read_text(encoding="utf-8")), encoding="utf-8")
