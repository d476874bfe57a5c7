"""Checks of options that several methods have in common."""

from __future__ import annotations


def check_positive(name: str, value: float) -> None:
    """Refuses a value that is not above 0.

    Raises:
        ValueError: With the option's name.
    """
    if value <= 0:
        raise ValueError(f"`{name}` must be above 0, got {value}.")


def check_not_negative(name: str, value: float) -> None:
    """Refuses a value below 0.

    Raises:
        ValueError: With the option's name.
    """
    if value < 0:
        raise ValueError(f"`{name}` must not be negative, got {value}.")


def check_in_unit_interval(name: str, value: float) -> None:
    """Refuses a value outside ``[0, 1]``.

    Raises:
        ValueError: With the option's name.
    """
    if not 0 <= value <= 1:
        raise ValueError(f"`{name}` must be from 0 to 1, got {value}.")


def check_fraction(name: str, value: float) -> None:
    """Refuses a value outside ``(0, 1]``.

    Raises:
        ValueError: With the option's name.
    """
    if not 0 < value <= 1:
        raise ValueError(f"`{name}` must be above 0 and at most 1, got {value}.")


def check_clip(clip_low: float, clip_high: float) -> None:
    """Refuses bounds that no ratio can meet.

    Raises:
        ValueError: Unless ``0 <= clip_low < 1`` and ``clip_high >= 0``.
    """
    if not 0 <= clip_low < 1:
        raise ValueError(f"`clip_low` must be from 0 to below 1, got {clip_low}.")
    check_not_negative("clip_high", clip_high)
