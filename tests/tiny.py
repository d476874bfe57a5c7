"""The tiny model, tokenizer and data of all tests: those of ``examples/quickstart/prepare.py``, in small."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).parents[1]


def load_script(path: Path) -> ModuleType:
    """Imports a script of ``examples/`` by its path."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


quickstart = load_script(ROOT / "examples" / "quickstart" / "prepare.py")


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """The character tokenizer of the quick start."""
    return quickstart.build_tokenizer()


def tiny_model(*, seed: int = 0, hidden_size: int = 32, num_layers: int = 2, num_heads: int = 2) -> LlamaForCausalLM:
    """A Llama for ``tiny_tokenizer()``: 24 thousand random weights in float32, in evaluation mode."""
    return quickstart.build_model(
        tiny_tokenizer(), seed=seed, hidden_size=hidden_size, num_layers=num_layers, num_heads=num_heads
    ).eval()


def write_tiny_folder(path: Path, *, seed: int = 0, hidden_size: int = 32) -> Path:
    """Saves ``tiny_model`` and ``tiny_tokenizer`` as a Hugging Face folder, and returns its path."""
    tiny_tokenizer().save_pretrained(path)
    tiny_model(seed=seed, hidden_size=hidden_size).save_pretrained(path)
    return path


def write_prompt_file(path: Path, *, num_rows: int = 64) -> Path:
    """Writes ``sort4`` prompts in verl's schema as JSON Lines, and returns the path."""
    questions = quickstart.sort_questions()[:num_rows]
    rows = [quickstart.prompt_row(question, split="train", index=index) for index, question in enumerate(questions)]
    quickstart.write_jsonl(path, rows)
    return path


def write_chat_file(path: Path, *, num_rows: int = 64) -> Path:
    """Writes ``sort4`` questions and answers as chats, in JSON Lines, and returns the path."""
    questions = quickstart.sort_questions()[:num_rows]
    rows = [quickstart.prompt_row(question, split="train", index=index) for index, question in enumerate(questions)]
    quickstart.write_jsonl(path, map(quickstart.chat_row, rows))
    return path


def write_uneven_chat_file(path: Path, *, num_rows: int = 64) -> Path:
    """Writes chats whose answers have one to seven characters, as JSON Lines, and returns the path."""
    answers = [str(index) * (1 + index * index % 7) for index in range(num_rows)]
    chats = [
        {"messages": [{"role": "user", "content": "repeat"}, {"role": "assistant", "content": answer[:7]}]}
        for answer in answers
    ]
    quickstart.write_jsonl(path, chats)
    return path


def write_pair_file(path: Path, *, num_rows: int = 64) -> Path:
    """Writes ``sort4`` questions, each with its answer and a wrong one that is longer, as JSON Lines of pairs."""
    questions = quickstart.sort_questions()[:num_rows]
    rows = [quickstart.prompt_row(question, split="train", index=index) for index, question in enumerate(questions)]
    quickstart.write_jsonl(path, [uneven_pair(row, 1 + index % 3) for index, row in enumerate(rows)])
    return path


def uneven_pair(row: dict, more: int) -> dict:
    """A question with its answer, and with a wrong one that has more digits."""
    pair = quickstart.pair_row(row)
    pair["rejected"][0]["content"] += "1" * more
    return pair
