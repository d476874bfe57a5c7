from __future__ import annotations

import json

import pyarrow
import pytest
from pyarrow import parquet

from verl_lightning.data.files import read_rows

ROWS = [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_jsonl_and_parquet_give_the_same_rows_in_the_order_of_the_files(tmp_path):
    first = write_jsonl(tmp_path / "a.jsonl", ROWS)
    second = str(tmp_path / "b.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), second)

    rows = read_rows([first, second], columns=["prompt"])

    assert [row.values for row in rows] == ROWS + ROWS
    assert [row.name for row in rows] == [f"row {n} of `{path}`" for path in (first, second) for n in (1, 2)]


def test_blank_lines_are_skipped_but_counted(tmp_path):
    (tmp_path / "a.jsonl").write_text('\n{"prompt": "a"}\n\n')

    (row,) = read_rows(str(tmp_path / "a.jsonl"), columns=["prompt"])

    assert row.name.startswith("row 2 of")


def test_refuses_a_file_that_does_not_exist(tmp_path):
    with pytest.raises(ValueError, match=r"data file `.*none.jsonl` does not exist \(looked from `/"):
        read_rows(str(tmp_path / "none.jsonl"), columns=[])


def test_refuses_a_folder(tmp_path):
    with pytest.raises(ValueError, match=r"` is a folder\. Name `\.jsonl` or `\.parquet` files"):
        read_rows(str(tmp_path), columns=[])


def test_a_mark_at_the_beginning_is_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "é"}', encoding="utf-8-sig")

    (row,) = read_rows(str(tmp_path / "a.jsonl"), columns=["prompt"])

    assert row.values == {"prompt": "é"}


def test_refuses_text_in_another_encoding(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "é"}', encoding="latin-1")

    with pytest.raises(ValueError, match=r"a\.jsonl` is no text in UTF-8: .*0xe9.*Save it as UTF-8"):
        read_rows(str(tmp_path / "a.jsonl"), columns=[])


def test_refuses_parquet_that_is_none_or_cut_off(tmp_path):
    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), file)
    for content in (b"", b"PK" + bytes(40), file.read_bytes()[:-9]):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.parquet` is no parquet file, or not the whole of one: "):
            read_rows(str(file), columns=[])


def test_refuses_a_file_without_rows(tmp_path):
    (tmp_path / "empty.jsonl").touch()

    with pytest.raises(ValueError, match=r"empty.jsonl` has no rows"):
        read_rows(str(tmp_path / "empty.jsonl"), columns=[])


def test_refuses_a_file_of_another_kind(tmp_path):
    (tmp_path / "rows.txt").touch()

    with pytest.raises(ValueError, match=r"rows.txt` should end in `.jsonl` or `.parquet`, or in `.json` or `.csv`"):
        read_rows(str(tmp_path / "rows.txt"), columns=[])


@pytest.mark.parametrize("row", [{"n": 3}, {"prompt": None, "n": 3}])
def test_names_the_row_of_a_missing_column_and_what_is_there(tmp_path, row):
    file = write_jsonl(tmp_path / "a.jsonl", [*ROWS, row])

    with pytest.raises(ValueError, match=r"column `prompt` is missing in row 3 of `.*a.jsonl`, which has `n`"):
        read_rows(file, columns=["prompt"])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "it can't be parsed"),
        ("[1]", "got list"),
        ('{"n": ' + "1" * 5000 + "}", "it can't be parsed"),
        ('{"n": ' + "[" * 100_000, "it can't be parsed"),
    ],
    ids=["cut off", "a list", "a long number", "deep"],
)
def test_names_the_line_that_is_no_object(tmp_path, line, reason):
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(ROWS[0])}\n{line}\n")

    with pytest.raises(ValueError, match=rf"Expected a JSON object in row 2 of .*{reason}"):
        read_rows(str(tmp_path / "a.jsonl"), columns=[])


@pytest.mark.parametrize("text", [json.dumps(ROWS, indent=1), "".join(json.dumps(row) + "\n" for row in ROWS)])
def test_json_is_a_list_or_an_object_a_line(tmp_path, text):
    (tmp_path / "a.json").write_text(text)

    rows = read_rows(str(tmp_path / "a.json"), columns=["prompt"])

    assert [(row.values, row.name) for row in rows] == [
        (values, f"row {number} of `{tmp_path / 'a.json'}`") for number, values in enumerate(ROWS, start=1)
    ]


def test_csv_has_a_line_of_names_and_texts(tmp_path):
    (tmp_path / "a.csv").write_text('question,answer\n"1, 2\n3",é\n,4\n')

    rows = read_rows(str(tmp_path / "a.csv"), columns=[])

    assert [row.values for row in rows] == [{"question": "1, 2\n3", "answer": "é"}, {"question": "", "answer": "4"}]


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [("a.csv", "a,b\n1,2,3\n", "Row 1 of .* another number of fields"), ("a.json", "[{]", "can't be parsed"),
     ("a.json", "[1]", "Expected a JSON object in row 1"), ("a.csv", "a,b\n1\n", "another number of fields")],
)  # fmt: skip
def test_refuses_files_that_are_cut_or_of_another_form(tmp_path, name, text, complaint):
    (tmp_path / name).write_text(text)

    with pytest.raises(ValueError, match=complaint):
        read_rows(str(tmp_path / name), columns=[])


def test_parquet_gives_what_was_written_without_padding(tmp_path):
    written = [
        {"chat": [{"role": "a", "calls": [{"args": {"x": 1}}]}], "info": {"left": None, "n": 1, "list": [None, 2]}},
        {"chat": [{"role": "b"}, {"role": "c", "calls": [{"args": {"y": "z"}}]}], "info": {"left": None, "list": []}},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(written), tmp_path / "a.parquet")

    assert [row.values for row in read_rows(str(tmp_path / "a.parquet"), columns=[])] == written
