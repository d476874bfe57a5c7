"""Divides sequences among micro-batches of a token budget: numbers in, rows out, the same on every rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from verl_lightning.types import RowLength


@dataclass(frozen=True, kw_only=True)
class TokenBudget:
    """Divides sequences: never more tokens in a micro-batch than allowed, and about equal compute in each.

    The compute of a sequence of ``l`` tokens is counted as ``l + attention_cost * l**2``.
    """

    max_tokens: int
    """Most tokens of a micro-batch, padding included."""

    packs: bool
    """True if the model reads real tokens alone; else each row takes the longest prompt and response of its
    micro-batch."""

    attention_cost: float
    """Cost of attention to one token, as a share of all other compute of a token."""

    rows_per_example: int = 1
    """Sequences behind each of the lengths that are divided; see `example_lengths`."""

    grows: bool = False
    """True if a row over the budget is a micro-batch by itself; else it is refused."""

    def divide(self, rows: Sequence[RowLength]) -> list[list[int]]:
        """Divides rows into as few micro-batches as it can; each is a list of the rows' positions.

        Raises:
            ValueError: If one row alone is over the budget.
        """
        if (longest := max(map(self._alone, rows))) > self.max_tokens and self.grows:
            return dataclasses.replace(self, max_tokens=longest).divide(rows)
        if longest > self.max_tokens:
            count = self.rows_per_example
            what = "a sequence of" if count == 1 else f"an example of {count} sequences with, together,"
            raise ValueError(
                f"{what} {longest} tokens does not fit into `max_tokens_per_micro_batch` ({self.max_tokens})."
                " Raise it, or shorten sequences (`data.max_prompt_length`, `rollout.sampling.max_new_tokens`,"
                " `data.max_length`)."
            )
        if not self.packs:
            return self._consecutive(rows)
        count = -(-sum(row.tokens for row in rows) // self.max_tokens)
        while (parts := self._balanced(rows, max(1, count))) is None:
            count += 1
        return parts

    def divide_into(self, rows: Sequence[RowLength], count: int) -> list[list[int]]:
        """Divides rows into ``count`` micro-batches, as another rank needs; fewer only if there are fewer rows."""
        count = min(count, len(rows))
        parts = self.divide(rows)
        if len(parts) < count and self.packs and (balanced := self._balanced(rows, count)) is not None:
            parts = balanced
        while len(parts) < count:  # a half of what fits, fits
            longest = max(range(len(parts)), key=lambda index: len(parts[index]))
            part = parts.pop(longest)
            parts += [part[: len(part) // 2], part[len(part) // 2 :]]
        # The most expensive first: on each rank, so that ranks wait little for one another.
        return sorted(map(sorted, parts), key=lambda part: -sum(self._cost(rows[index]) for index in part))

    def _balanced(self, rows: Sequence[RowLength], count: int) -> list[list[int]] | None:
        """Gives rows, the most expensive first, to the part with room and the least compute; None without room."""
        parts: list[list[int]] = [[] for _ in range(count)]
        cost, tokens = [0.0] * count, [0] * count
        for index in sorted(range(len(rows)), key=lambda index: -self._cost(rows[index])):
            row = rows[index]
            open_parts = [part for part in range(count) if tokens[part] + row.tokens <= self.max_tokens]
            if not open_parts:
                return None
            part = min(open_parts, key=lambda part: cost[part])
            parts[part].append(index)
            cost[part] += self._cost(row)
            tokens[part] += row.tokens
        return [part for part in parts if part]

    def _consecutive(self, rows: Sequence[RowLength]) -> list[list[int]]:
        """Puts rows of about one length together, which need little padding."""
        parts: list[list[int]] = []
        prompt = response = 0
        for index in sorted(range(len(rows)), key=lambda index: -self._alone(rows[index])):
            row = rows[index]
            prompt, response = max(prompt, row.prompt), max(response, row.response)
            if not parts or (len(parts[-1]) + 1) * self._padded(prompt + response) > self.max_tokens:
                parts.append([])
                prompt, response = row.prompt, row.response
            parts[-1].append(index)
        return parts

    def _alone(self, row: RowLength) -> int:
        return row.tokens if self.packs else self._padded(row.prompt + row.response)

    def _padded(self, columns: int) -> int:
        return self.rows_per_example * columns

    def _cost(self, row: RowLength) -> float:
        tokens = max(1, self._alone(row))
        return tokens + self.attention_cost * tokens**2


def example_lengths(rows: Sequence[RowLength], rows_per_example: int) -> list[RowLength]:
    """The lengths of examples of several rows: the tokens of all, and the columns of the widest.

    Args:
        rows: Lengths of each row, an example's one after another.
        rows_per_example: Number of an example's rows.
    """
    if rows_per_example == 1:
        return list(rows)
    examples = [rows[start : start + rows_per_example] for start in range(0, len(rows), rows_per_example)]
    return [
        RowLength(
            tokens=sum(row.tokens for row in example),
            scored=sum(row.scored for row in example),
            prompt=max(row.prompt for row in example),
            response=max(row.response for row in example),
        )
        for example in examples
    ]
