"""The limit on the tokens of a row: longer rows stop the run, or are dropped or truncated with a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lightning.fabric.utilities import rank_zero_info

Overlong = Literal["error", "drop", "truncate"]


def within_limit(
    lengths: Sequence[int], names: Sequence[str], *, limit: int, limit_name: str, overlong: Overlong
) -> list[int]:
    """Returns the positions of the rows to keep; under ``"truncate"`` all of them, and the caller cuts.

    Args:
        lengths: Tokens of each row.
        names: Name of each row, for messages.
        limit: The most tokens a row may have.
        limit_name: Name of the option that sets ``limit``, for messages.
        overlong: Treatment of longer rows.

    Raises:
        ValueError: If a row is too long and ``overlong`` is ``"error"``, or if no row is left.
    """
    too_long = [position for position, length in enumerate(lengths) if length > limit]
    if too_long and overlong == "error":
        raise ValueError(
            f"There are {lengths[too_long[0]]} tokens in {names[too_long[0]]}, over `{limit_name}: {limit}`, and"
            f" {len(too_long)} of {len(lengths)} rows are too long (the longest has {max(lengths)}). Raise"
            f' `{limit_name}`, or set `overlong` to "drop" (leave such rows out) or "truncate" (cut them).'
        )
    if too_long:
        done = "Dropped" if overlong == "drop" else "Truncated"
        rank_zero_info(f"{done} {len(too_long)} of {len(lengths)} rows, which have over {limit} tokens.")
    if overlong == "truncate":
        return list(range(len(lengths)))
    if len(too_long) == len(lengths):
        raise ValueError(f"All {len(lengths)} rows have over `{limit_name}: {limit}` tokens; none is left. Raise it.")
    return [position for position, length in enumerate(lengths) if length <= limit]
