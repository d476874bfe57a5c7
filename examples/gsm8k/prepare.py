"""Turns GSM8K into prompts for PPO and GRPO, in verl's schema, and into chats for SFT.

Run ``python examples/gsm8k/prepare.py --out runs/gsm8k`` to read ``openai/gsm8k`` from the Hugging Face hub (it needs
the package ``datasets``), or name local copies with ``--train FILE --test FILE``: JSON Lines or parquet, with the
columns ``question`` and ``answer`` of the original or already in verl's schema. It writes

* ``train.jsonl``, ``test.jsonl``: prompts, with the final number as ground truth;
* ``sft.jsonl``, ``sft_test.jsonl``: the same questions with their worked answers, calculator marks removed.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from verl_lightning.data.files import read_rows

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def final_number(answer: str) -> str:
    """The number after ``####`` of a worked answer, without thousands separators.

    Raises:
        ValueError: If there is none.
    """
    match = re.search(r"####\s*(-?[\d.,]*\d)", answer)
    if match is None:
        raise ValueError(f"Expected a number after `####` in the answer {answer!r}.")
    return match[1].replace(",", "")


def prompt_row(question: str, answer: str, *, split: str, index: int) -> dict[str, Any]:
    """A question as a row of verl's prompt schema."""
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": final_number(answer)},
        "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
    }


def chat_row(row: dict[str, Any]) -> dict[str, Any]:
    """A prompt row with its worked answer, without ``<<calculator marks>>``, as the assistant's turn."""
    worked = re.sub(r"<<[^>]*>>", "", row["extra_info"]["answer"])
    reply = {"role": "assistant", "content": worked}
    return {"messages": [*row["prompt"], reply], "data_source": row["data_source"]}


def local_rows(file: Path, *, split: str) -> list[dict[str, Any]]:
    """Prompt rows from a local copy in either form.

    Raises:
        ValueError: If a row has neither ``question`` and ``answer`` nor verl's ``extra_info`` with both.
    """
    rows = []
    for index, row in enumerate(read_rows(str(file), columns=())):
        source = row.values if "question" in row.values else row.values.get("extra_info") or {}
        if not source.get("question") or not source.get("answer"):
            raise ValueError(
                f"Expected `question` and `answer`, as columns or within `extra_info`, in {row.name}, which has"
                f" {', '.join(row.values)}."
            )
        rows.append(prompt_row(source["question"], source["answer"], split=split, index=index))
    return rows


def hub_rows(*, split: str) -> list[dict[str, Any]]:
    """Prompt rows from the Hugging Face hub."""
    from datasets import load_dataset  # optional: only those who have no local copy need it

    raw = load_dataset("openai/gsm8k", "main", split=split)
    return [prompt_row(row["question"], row["answer"], split=split, index=index) for index, row in enumerate(raw)]


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Writes one JSON object a line."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Writes the four files."""
    parser = argparse.ArgumentParser(description="Write GSM8K as prompts and as chats.")
    parser.add_argument("--out", type=Path, default=Path("runs/gsm8k"), help="folder to write into")
    parser.add_argument("--train", type=Path, help="local copy of the training rows; from the hub if absent")
    parser.add_argument("--test", type=Path, help="local copy of the test rows; from the hub if absent")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for split, file, chats in (("train", arguments.train, "sft.jsonl"), ("test", arguments.test, "sft_test.jsonl")):
        rows = local_rows(file, split=split) if file else hub_rows(split=split)
        write_jsonl(arguments.out / f"{split}.jsonl", rows)
        write_jsonl(arguments.out / chats, map(chat_row, rows))
        print(f"Wrote {len(rows)} rows to {split}.jsonl and {chats} in {arguments.out}")


if __name__ == "__main__":
    main()
