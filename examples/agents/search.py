"""A search tool over a small corpus: passages by BM25, with nothing but the standard library.

    verl-fit --config grpo --data.train_files questions.jsonl --model.reward exact_match \
        --rollout.environment '{tools: [examples/agents/search.py:search]}'

Replace `CORPUS` by your own passages; it is read once for each process of tools.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from functools import cache

CORPUS = {
    "Harbour of Velin": "The harbour of Velin was dug in 1731. Its pilot tower has 96 steps and a copper bell.",
    "Velin bell": "The copper bell of Velin weighs 412 kilograms and was cast by Ida Morel.",
    "Ida Morel": "Ida Morel, born in Tarsk in 1690, cast bells for nine towns and wrote a book on alloys.",
    "Tarsk": "Tarsk lies on the river Oule. Its market is held on Thursdays, and its bridge has seven arches.",
    "Oule": "The Oule rises on Mount Kessen and is 310 kilometres long. Its water turned 40 mills.",
    "Mount Kessen": "Mount Kessen is 2,140 metres high. A weather station has stood on it since 1904.",
    "Weather station on Kessen": "The station on Kessen was built by Jon Aldery, who measured wind there for 30 years.",
    "Jon Aldery": "Jon Aldery invented a cup anemometer with four arms, and kept 17 goats.",
}
"""Passages by title."""

_SATURATION, _LENGTH = 1.5, 0.75  # k1 and b of BM25


def search(query: str, limit: int = 2) -> str:
    """Searches the corpus, and returns the passages that fit best.

    Args:
        query: Words to look for.
        limit: Most passages to return.
    """
    passages, frequency, mean = _index()
    scores = {title: _score(words, _words(query), frequency, mean) for title, words in passages.items()}
    best = sorted((title for title in scores if scores[title] > 0), key=lambda title: (-scores[title], title))
    return "\n".join(f"{title}: {CORPUS[title]}" for title in best[: max(1, limit)]) or "Nothing was found."


def _score(words: Counter[str], query: list[str], frequency: Counter[str], mean: float) -> float:
    length = _SATURATION * (1 - _LENGTH + _LENGTH * words.total() / mean)
    rarity = {word: math.log(1 + (len(CORPUS) - frequency[word] + 0.5) / (frequency[word] + 0.5)) for word in query}
    return sum(rarity[word] * words[word] * (_SATURATION + 1) / (words[word] + length) for word in query)


@cache
def _index() -> tuple[dict[str, Counter[str]], Counter[str], float]:
    """Words of each passage, the number of passages with each word, and the mean length of a passage."""
    passages = {title: Counter(_words(f"{title} {text}")) for title, text in CORPUS.items()}
    frequency = Counter(word for words in passages.values() for word in words)
    return passages, frequency, sum(words.total() for words in passages.values()) / len(passages)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
