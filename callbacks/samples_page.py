"""A page on which people read what the policy said: all tables of a run, in one HTML file without a server."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_lightning.callbacks.json_files import to_json, write_whole

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Samples</title><style>
body { font: 14px/1.5 system-ui, sans-serif; margin: 1.5rem; color: #222 }
header { display: flex; gap: 1rem; align-items: center; flex-wrap: wrap; margin-bottom: 1rem }
h1 { font-size: 1.3rem; margin: 0 1rem 0 0 } select, input { font: inherit; padding: .2rem .4rem }
table { border-collapse: collapse; width: 100%; table-layout: fixed }
th { text-align: left; border-bottom: 2px solid #888; padding: .3rem .6rem; cursor: pointer; overflow-wrap: anywhere }
td { vertical-align: top; border-bottom: 1px solid #ddd; padding: .3rem .6rem; overflow-wrap: anywhere }
.text { white-space: pre-wrap; font-family: ui-monospace, monospace; font-size: 13px }
td.text div { max-height: 16rem; overflow-y: auto } tbody tr { cursor: pointer }
th.number { text-align: right } td.number { text-align: right; font-variant-numeric: tabular-nums }
.short { width: 6rem } #count, .quiet { color: #666 } td.more { background: #fff; cursor: auto }
.mark { background: #b3541e; color: #fff; border-radius: .5rem; padding: 0 .5rem; font-size: 12px }
.other { color: #888; font-style: italic } .turn { border-left: 3px solid #ccc; padding-left: .6rem; margin: .4rem 0 }
</style></head><body><header><h1>Samples</h1>
<label>Table <select id="table"></select></label>
<label>Source <select id="source"></select></label>
<input id="search" type="search" placeholder="Text to find"><span id="count"></span></header>
<p class="quiet">Choose a row to see its tokens: the darker, the less likely; point at one for its id and log-prob.</p>
<table><thead><tr id="heads"></tr></thead><tbody id="rows"></tbody></table>
<script type="application/json" id="data">__DATA__</script><script>
const tables = JSON.parse(document.getElementById("data").textContent);
const texts = ["prompt", "response", "ground_truth"], open = new Set();
const get = (id) => document.getElementById(id), is_number = (value) => typeof value === "number";
let order = null, falling = true;
function make(tag, name, text) {
  const node = document.createElement(tag);
  node.className = name || ""; node.textContent = text ?? "";
  return node;
}
function option(select, value, text) {
  const choice = make("option", "", text);
  choice.value = value; select.append(choice);
}
tables.forEach((table, index) => option(get("table"), index, table.name));
get("table").value = tables.length - 1;
option(get("source"), "", "all");
[...new Set(tables.flatMap((table) => table.rows.map((row) => row.data_source)))].sort()
  .forEach((source) => option(get("source"), source, source || "unknown"));
const rewards = tables.flatMap((table) => table.rows.map((row) => row.reward)).filter(is_number);
const low = Math.min(...rewards), high = Math.max(...rewards);
function show_number(value) { return Math.abs(value) < 1e6 ? value.toFixed(3) : value.toPrecision(4); }
function show_text(value) { return typeof value === "string" ? value : JSON.stringify(value); }
function value_of(row, name) { return name in row ? row[name] : (row.reward_parts || {})[name]; }
function colour(row) {
  if (!is_number(row.reward) || high <= low) return "";
  return `hsl(${(120 * (row.reward - low)) / (high - low)}, 60%, 94%)`;
}
function token_view(row) {
  const box = make("div", "text");
  row.tokens.forEach((text, at) => {
    const log_prob = row.log_probs[at], is_own = !row.is_trained || row.is_trained[at];
    const token = make("span", is_own ? "" : "other", text);
    token.title = `id ${row.token_ids[at]}` + (is_own ? `, log-prob ${log_prob}` : ", not trained on");
    if (is_own) token.style.background = `rgba(200, 60, 30, ${Math.min(0.7, -log_prob / 7)})`;
    box.append(token);
  });
  return box;
}
function turn_view(turn) {
  const box = make("div", "turn"), is_own = turn.is_trained !== false;
  const facts = [turn.trajectory ? `trajectory ${turn.trajectory}` : null, turn.tool,
    is_number(turn.reward) ? `reward ${show_number(turn.reward)}` : null,
    is_number(turn.seconds) ? `${show_number(turn.seconds)} s` : null, is_own ? null : "not trained on"];
  box.append(make("b", "", turn.role), make("span", "quiet", " " + facts.filter(Boolean).join(", ")));
  box.append(make("div", is_own ? "text" : "text other", turn.text));
  return box;
}
function details(row, width) {
  const line = make("tr"), cell = make("td", "more");
  cell.colSpan = width;
  (row.turns || []).forEach((turn) => cell.append(turn_view(turn)));
  [...(row.past || []), row].filter((part) => part.tokens).forEach((part) => cell.append(token_view(part)));
  if (!cell.childNodes.length) cell.append(make("span", "quiet", "The tokens of this table are in its file only."));
  line.append(cell);
  return line;
}
function show_row(row, columns) {
  const line = make("tr");
  columns.forEach((name) => {
    const value = value_of(row, name) ?? "";
    const cell = make("td", is_number(value) ? "number" : texts.includes(name) ? "text" : "");
    cell.append(make("div", "", is_number(value) ? show_number(value) : show_text(value)));
    if (name === "prompt") (row.images || []).filter((url) => url.startsWith("data:image/png;base64,"))
      .forEach((url) => { const picture = make("img"); picture.src = url; cell.append(picture); });
    if (name === "response" && row.is_truncated) cell.append(make("span", "mark", "truncated"));
    line.append(cell);
  });
  line.style.background = colour(row);
  line.onclick = () => { open.has(row) ? open.delete(row) : open.add(row); show(); };
  return open.has(row) ? [line, details(row, columns.length)] : [line];
}
function show_heads(columns) {
  get("heads").replaceChildren(...columns.map((name) => {
    const is_text = ["prompt", "response"].includes(name);
    const is_sum = !texts.includes(name) && name !== "data_source";
    const head = make("th", (is_text ? "" : "short") + (is_sum ? " number" : ""), name.replaceAll("_", " "));
    head.onclick = () => { falling = order === name ? !falling : true; order = name; show(); };
    return head;
  }));
}
function show() {
  const table = tables[Number(get("table").value)] || { rows: [] };
  const text = get("search").value.toLowerCase(), source = get("source").value;
  const parts = [...new Set(table.rows.flatMap((row) => Object.keys(row.reward_parts || {})))].sort();
  const has = (name) => table.rows.some((row) => row[name] !== undefined && row[name] !== null);
  const columns = ["data_source", "prompt", "response", ...["ground_truth"].filter(has), "reward",
    ...parts, ...["advantage"].filter(has)];
  const said = (row) => texts.map((name) => show_text(row[name] ?? "")).join("\\n").toLowerCase();
  const rows = table.rows.filter((row) => (!source || row.data_source === source) && said(row).includes(text));
  const key = (row) => value_of(row, order) ?? (falling ? -Infinity : Infinity);
  if (order) rows.sort((a, b) => (key(a) > key(b) ? 1 : key(a) < key(b) ? -1 : 0) * (falling ? -1 : 1));
  show_heads(columns);
  get("rows").replaceChildren(...rows.flatMap((row) => show_row(row, columns)));
  const known = table.rows.map((row) => row.reward).filter(is_number);
  const mean = known.reduce((sum, reward) => sum + reward / known.length, 0);
  const range = rewards.length ? `, all tables ${show_number(low)} to ${show_number(high)}` : "";
  const counted = `${rows.length} of ${table.rows.length} responses`;
  get("count").textContent = `${counted}, mean reward ${show_number(mean)}${range}`;
}
["table", "source", "search"].forEach((id) => { get(id).oninput = show; });
show();
</script></body></html>
"""

TOKENS = {"tokens", "token_ids", "log_probs", "is_trained", "past"}
"""Keys of what a row says of each token."""

TABLES_WITH_TOKENS = 8
"""Newest tables on the page that show tokens; those of older ones would make it slow, and stay in their files."""


def write_page(folder: Path, *, max_tables: int) -> Path:
    """Gathers the newest tables of a folder in its ``index.html``, and returns that.

    Args:
        folder: Folder with ``step=N.jsonl`` of validations and ``train_step=N.jsonl``.
        max_tables: Most tables on the page; the others stay in their files.
    """
    files = sorted(folder.glob("*step=*.jsonl"), key=_step)[-max_tables:]
    tables: list[dict[str, Any]] = [{"name": _title(file), "rows": read_table(file)} for file in files]
    for table in tables[:-TABLES_WITH_TOKENS]:
        table["rows"] = [{key: row[key] for key in row.keys() - TOKENS} for row in table["rows"]]
    # Nothing in a response may end the script that holds it.
    data = to_json(tables).replace("<", "\\u003c")
    page = folder / "index.html"
    write_whole(page, PAGE.replace("__DATA__", data))
    return page


def read_table(file: Path) -> Sequence[dict[str, object]]:
    """Reads the rows of a JSON Lines file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]


def newest_table(folder: Path) -> tuple[str, Sequence[dict[str, object]]]:
    """Title and rows of a folder's newest table, of a validation if there is one; an empty one where there is none."""
    files = sorted(folder.glob("step=*.jsonl"), key=_step) or sorted(folder.glob("train_step=*.jsonl"), key=_step)
    return (_title(files[-1]), read_table(files[-1])) if files else ("", [])


def _step(file: Path) -> tuple[int, str]:
    """Sort key of a table: training comes before the validation that follows it."""
    match = re.search(r"step=(\d+)", file.name)
    return (int(match[1]) if match else 0, "" if file.name.startswith("train") else "val")


def _title(file: Path) -> str:
    step, kind = _step(file)
    return f"step {step}, {'validation' if kind else 'training'}"
