"""Rows from JSON Lines, JSON, CSV and parquet files."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyarrow import ArrowException, parquet, types  # type: ignore[import-untyped]

from verl_lightning.needs import missing_data_file

UNREADABLE = (ValueError, RecursionError)
"""Errors of `json` for texts that are no JSON, have a number of thousands of digits, or nest too deeply."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a data file."""

    values: dict[str, Any]
    """Values of the row by column."""

    name: str
    """Name of the row in error messages: its number, counted from 1, and its file."""

    file: str = ""
    """Path of its file."""


def read_rows(paths: str | Sequence[str], *, columns: Sequence[str]) -> list[Row]:
    """Reads all rows of one or more files, in their order.

    Args:
        paths: Files that end in ``.jsonl`` (an object a line; blank lines are skipped), ``.json`` (a list of objects,
            or an object a line), ``.csv`` (with a line of names; all values are texts) or ``.parquet``.
        columns: Columns that every row must have.

    Raises:
        ValueError: If a file does not exist, is of another kind, has no rows, or lacks one of the ``columns``.
    """
    files = [Path(path) for path in ([paths] if isinstance(paths, str) else paths)]
    return [row for file in files for row in _read_file(file, columns)]


def fingerprint(rows: Iterable[Row], contents: Iterable[str] = ()) -> str:
    """Digests all columns of rows, in the rows' order, into a short text; the files' paths do not count.

    Args:
        rows: Rows.
        contents: Digests of the files that the rows name, such as images, whose content may change under their names.
    """
    digest = hashlib.blake2b(digest_size=8)
    for row in rows:
        digest.update(repr(sorted(row.values.items())).encode(errors="surrogatepass"))
    for content in contents:
        digest.update(content.encode())
    return digest.hexdigest()


def _read_file(file: Path, columns: Sequence[str]) -> list[Row]:
    if (complaint := missing_data_file(file)) is not None:
        raise ValueError(complaint)
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
    try:
        rows = list(readers[file.suffix](file))
    except UnicodeDecodeError as error:
        raise ValueError(f"The data file `{file}` is no text in UTF-8: {error}. Save it as UTF-8.") from error
    if not rows:
        raise ValueError(f"The data file `{file}` has no rows.")
    for row in rows:
        for column in columns:
            if row.values.get(column) is None:
                raise ValueError(
                    f"The column `{column}` is missing in {row.name}, which has {listed_columns(row.values)}."
                )
    return rows


def listed_columns(values: dict[str, Any]) -> str:
    """Lists the columns that a row has, for messages."""
    return ", ".join(f"`{column}`" for column, value in values.items() if value is not None) or "no columns"


def _row(file: Path, number: int, values: dict[str, Any]) -> Row:
    return Row(values=values, name=_name(file, number), file=str(file))


def _name(file: Path, number: int) -> str:
    return f"row {number} of `{file}`"


def _read_jsonl(file: Path) -> Iterator[Row]:
    with file.open(encoding="utf-8-sig") as lines:  # some editors begin a file with a mark
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _row(file, number, _parse_line(line, _name(file, number)))


def _read_json(file: Path) -> Iterator[Row]:
    text = file.read_text(encoding="utf-8-sig")
    if not text.lstrip().startswith("["):
        yield from _read_jsonl(file)
        return
    try:
        rows = json.loads(text)
    except UNREADABLE as error:
        raise ValueError(f"Expected a list of JSON objects in `{file}`, but it can't be parsed: {error}.") from error
    for number, values in enumerate(rows, start=1):
        yield _row(file, number, _checked_object(values, _name(file, number)))


def _read_csv(file: Path) -> Iterator[Row]:
    with file.open(encoding="utf-8-sig", newline="") as lines:
        for number, values in enumerate(csv.DictReader(lines, strict=True), start=1):
            if None in values or None in values.values():
                raise ValueError(
                    f"{_name(file, number).capitalize()} has another number of fields than the line of names. Quote"
                    " fields that have commas or line breaks."
                )
            yield _row(file, number, values)


def _parse_line(line: str, name: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except UNREADABLE as error:
        raise ValueError(f"Expected a JSON object in {name}, but it can't be parsed: {error}.") from error
    return _checked_object(values, name)


def _checked_object(values: Any, name: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ValueError(f"Expected a JSON object in {name}, got {type(values).__name__}.")
    return values


def _read_parquet(file: Path) -> Iterator[Row]:
    try:
        table = parquet.read_table(file)
        rows = table.to_pylist(maps_as_pydicts="strict")
    except (ArrowException, OSError, ValueError) as error:
        raise ValueError(f"The data file `{file}` is no parquet file, or not the whole of one: {error}") from error
    kinds = {field.name: field.type for field in table.schema}
    for number, values in enumerate(rows, start=1):
        yield _row(file, number, {name: _unpadded(value, kinds[name]) for name, value in values.items()})


def _unpadded(value: Any, kind: Any) -> Any:
    """Removes the keys that Arrow adds, as None, so that all objects of a column have the same keys.

    A key that is None in all rows of the file was written as null and stays.
    """
    if types.is_struct(kind) and isinstance(value, dict):
        fields = {kind.field(index).name: kind.field(index).type for index in range(kind.num_fields)}
        return {
            key: _unpadded(item, fields[key])
            for key, item in value.items()
            if item is not None or types.is_null(fields[key])
        }
    if isinstance(value, list) and (types.is_list(kind) or types.is_large_list(kind)):
        return [_unpadded(item, kind.value_type) for item in value]
    return value
