"""Rows from JSON Lines and parquet files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyarrow import ArrowException, parquet  # type: ignore[import-untyped]

from verl_lightning.needs import missing_data_file


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a data file."""

    values: dict[str, Any]
    """Its columns."""

    name: str
    """What error messages call it: its number, counted from 1, and its file."""

    file: str = ""
    """Path of its file."""


def read_rows(paths: str | Sequence[str], *, columns: Sequence[str]) -> list[Row]:
    """Reads all rows of one or more files, in their order.

    Args:
        paths: Files that end in ``.jsonl`` (an object a line; blank lines are skipped) or ``.parquet``.
        columns: Those that every row must have.

    Raises:
        ValueError: If a file does not exist, is of another kind, has no rows, or lacks one of the ``columns``.
    """
    files = [Path(path) for path in ([paths] if isinstance(paths, str) else paths)]
    return [row for file in files for row in _read_file(file, columns)]


def fingerprint(rows: Iterable[Row]) -> str:
    """A short text that tells rows from others: of all their columns, in their order, wherever the files lie."""
    digest = hashlib.blake2b(digest_size=8)
    for row in rows:
        digest.update(repr(sorted(row.values.items())).encode(errors="surrogatepass"))
    return digest.hexdigest()


def _read_file(file: Path, columns: Sequence[str]) -> list[Row]:
    if (complaint := missing_data_file(file)) is not None:
        raise ValueError(complaint)
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if file.suffix not in readers:
        raise ValueError(f"The data file `{file}` should end in `.jsonl` or `.parquet`.")
    rows = list(readers[file.suffix](file))
    if not rows:
        raise ValueError(f"The data file `{file}` has no rows.")
    for row in rows:
        for column in columns:
            if row.values.get(column) is None:
                raise ValueError(f"The column `{column}` is missing in {row.name}, which has {_listed(row.values)}.")
    return rows


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"`{column}`" for column, value in values.items() if value is not None) or "no columns"


def _read_jsonl(file: Path) -> Iterator[Row]:
    try:
        with file.open(encoding="utf-8-sig") as lines:  # some editors begin a file with a mark
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    name = f"row {number} of `{file}`"
                    yield Row(values=_parse_line(line, name), name=name, file=str(file))
    except UnicodeDecodeError as error:
        raise ValueError(f"The data file `{file}` is no text in UTF-8: {error}. Save it as UTF-8.") from error


def _parse_line(line: str, name: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"Expected a JSON object in {name}, but it can't be parsed: {error}.") from error
    if not isinstance(values, dict):
        raise ValueError(f"Expected a JSON object in {name}, got {type(values).__name__}.")
    return values


def _read_parquet(file: Path) -> Iterator[Row]:
    try:
        rows = parquet.read_table(file).to_pylist()
    except (ArrowException, OSError, ValueError) as error:
        raise ValueError(f"The data file `{file}` is no parquet file, or not the whole of one: {error}") from error
    for number, values in enumerate(rows, start=1):
        yield Row(values=values, name=f"row {number} of `{file}`", file=str(file))
