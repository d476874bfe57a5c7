"""Builds the quick start from nothing: a tiny Llama, a character tokenizer and the data of the task ``sort4``.

``sort4`` asks to sort four digits: the answer to "sort 7301" is "0137". Nothing is downloaded, and the same seed gives
the same files. Run ``python examples/quickstart/prepare.py --out runs/quickstart``; it writes there

* ``model/``: the model and its tokenizer, as a Hugging Face folder;
* ``train.jsonl``, ``test.jsonl``: prompts for PPO and GRPO, in verl's schema;
* ``val.jsonl``: the first 256 prompts of ``test.jsonl``, for validation during training;
* ``sft.jsonl``, ``sft_val.jsonl``: the questions of ``train.jsonl`` and ``val.jsonl`` with their answers, as chats;
* ``pairs.jsonl``, ``pairs_val.jsonl``: the same with the answer backwards as well, as preferences for DPO.

A tenth of all questions is held out for ``test.jsonl``; a hash of the question decides which.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import string
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, END, UNKNOWN = "<|pad|>", "<|end|>", "<|unknown|>"
SPECIAL_TOKENS = [PAD, END, UNKNOWN, "<|user|>", "<|assistant|>", "<|system|>"]
CHARACTERS = [chr(code) for code in range(ord(" "), ord("~") + 1)] + ["\n"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each printable ASCII character, the line feed and six marks; any other character is unknown."""
    vocabulary = {token: index for index, token in enumerate(SPECIAL_TOKENS + CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int = 0,
    hidden_size: int = 128,
    num_layers: int = 2,
    num_heads: int = 4,
) -> LlamaForCausalLM:
    """A Llama with tied embeddings and random weights in float32; 341 thousand of them at the default size.

    Args:
        tokenizer: Its vocabulary and its pad and end tokens are the model's.
        seed: Of the weights. The global random state is left as it was.
        hidden_size: Width of the residual stream; the MLP is twice as wide.
        num_layers: Decoder layers.
        num_heads: Attention heads of a layer.
    """
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def sort_questions(*, seed: int = 0) -> list[str]:
    """Every question of ``sort4``, ten thousand of them, in an order drawn from ``seed``."""
    questions = [f"sort {digits:04d}" for digits in range(10_000)]
    random.Random(seed).shuffle(questions)
    return questions


def is_held_out(question: str) -> bool:
    """Whether a question belongs to the test tenth: its SHA-256 is a multiple of 10."""
    return int.from_bytes(hashlib.sha256(question.encode()).digest()) % 10 == 0


def answer(question: str) -> str:
    """The digits of a question in rising order."""
    return "".join(sorted(character for character in question if character in string.digits))


def prompt_row(question: str, *, split: str, index: int) -> dict[str, Any]:
    """A question as a row of verl's prompt schema."""
    return {
        "data_source": "sort4",
        "prompt": [{"role": "user", "content": question}],
        "ability": "sort",
        "reward_model": {"style": "rule", "ground_truth": answer(question)},
        "extra_info": {"split": split, "index": index},
    }


def chat_row(row: dict[str, Any]) -> dict[str, Any]:
    """A prompt row with its ground truth as the assistant's turn."""
    reply = {"role": "assistant", "content": row["reward_model"]["ground_truth"]}
    return {"messages": [*row["prompt"], reply], "data_source": row["data_source"], "extra_info": row["extra_info"]}


def pair_row(row: dict[str, Any]) -> dict[str, Any]:
    """The question of a prompt row with its answer, and with the same digits backwards."""
    right = row["reward_model"]["ground_truth"]
    chosen, rejected = ([{"role": "assistant", "content": text}] for text in (right, right[::-1]))
    return {"prompt": row["prompt"], "chosen": chosen, "rejected": rejected}


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Writes one JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_data(out: Path, *, seed: int = 0) -> None:
    """Writes the prompt and chat files into a folder.

    Args:
        out: The folder; it must exist.
        seed: Of the order of the rows. Which questions are held out does not depend on it.
    """
    questions = sort_questions(seed=seed)
    train = [question for question in questions if not is_held_out(question)]
    test = [question for question in questions if is_held_out(question)]
    train_rows = [prompt_row(question, split="train", index=index) for index, question in enumerate(train)]
    test_rows = [prompt_row(question, split="test", index=index) for index, question in enumerate(test)]
    write_jsonl(out / "train.jsonl", train_rows)
    write_jsonl(out / "test.jsonl", test_rows)
    write_jsonl(out / "val.jsonl", test_rows[:256])
    write_jsonl(out / "sft.jsonl", map(chat_row, train_rows))
    write_jsonl(out / "sft_val.jsonl", map(chat_row, test_rows[:256]))
    for name, rows in {"pairs": train_rows, "pairs_val": test_rows[:256]}.items():
        pairs = map(pair_row, rows)
        write_jsonl(out / f"{name}.jsonl", (pair for pair in pairs if pair["chosen"] != pair["rejected"]))


def main() -> None:
    """Writes model, tokenizer and data."""
    parser = argparse.ArgumentParser(description="Build the model, tokenizer and data of the quick start.")
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart"), help="folder to write into")
    parser.add_argument("--seed", type=int, default=0, help="seed of the model's weights and of the order of the rows")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(arguments.out / "model")
    build_model(tokenizer, seed=arguments.seed).save_pretrained(arguments.out / "model")
    write_data(arguments.out, seed=arguments.seed)
    print(f"Wrote the model, the tokenizer and seven data files into {arguments.out}")


if __name__ == "__main__":
    main()
