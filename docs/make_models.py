"""Writes ``docs/models.md`` from ``docs/models.json``, which `make families` records."""

from __future__ import annotations

import json
from pathlib import Path

FOLDER = Path(__file__).parent

COLUMNS = {
    "auto": "`auto`",
    "fsdp": "`fsdp`, 2 ranks",
    "megatron": "`megatron`",
    "megatron_tp2": "`megatron`, tensor parallel",
    "vllm": "vLLM",
}
"""Columns of the record, and what the page calls them."""

HEAD = """# Model families

Each family of transformers is trained here as a tiny random model with sharp scores, whose norms, biases and buffers
all matter. **yes** under a strategy: two steps of SFT, then two of GRPO with `HFRollout`, after each of which
transformers' own scores of the exported folder, by plain attention and one sequence at a time, are those that the run
ended with, to 1e-5 of the largest in float32. **yes** under vLLM: after a sync of weights its log-probs of its own
responses are transformers', to .0001 nats a token. A number is a sentence below with which the run ended before its
first step, or with which vLLM refused the model; one that begins with FAULT is a crash that we know of. Other families
may work; these are tested.

Models that read images are on [a page of their own](vision.md).

`make families` runs all of it on a CPU, where Megatron-Core has no TransformerEngine, and writes this page.
"""


def make_page(table: dict[str, dict[str, str]]) -> str:
    """The page, of what became of each family in each column."""
    notes: dict[str, int] = {}
    families = sorted({family for column in table.values() for family in column})
    lines = [HEAD, "| family | " + " | ".join(COLUMNS.values()) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for family in families:
        told = [table.get(column, {}).get(family, "not run") for column in COLUMNS]
        cells = [each if each in ("yes", "not run") else str(notes.setdefault(each, len(notes) + 1)) for each in told]
        lines.append(f"| `{family}` | " + " | ".join(cells) + " |")
    lines += ["", *(f"{number}. {note}" for note, number in notes.items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (FOLDER / "models.md").write_text(make_page(json.loads((FOLDER / "models.json").read_text())))
