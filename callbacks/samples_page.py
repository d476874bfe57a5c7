"""A page on which people read what the policy said: all tables of a run, in one HTML file without a server."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from verl_lightning.callbacks.json_files import to_json, write_whole

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Samples</title><style>
body { font: 14px/1.5 system-ui, sans-serif; margin: 1.5rem; color: #222 }
header { display: flex; gap: 1rem; align-items: center; flex-wrap: wrap; margin-bottom: 1rem }
h1 { font-size: 1.3rem; margin: 0 1rem 0 0 } select, input { font: inherit; padding: .2rem .4rem }
table { border-collapse: collapse; width: 100%; table-layout: fixed }
th { text-align: left; border-bottom: 2px solid #888; padding: .3rem .6rem; cursor: pointer }
td { vertical-align: top; border-bottom: 1px solid #ddd; padding: .3rem .6rem; overflow-wrap: anywhere }
td.text { white-space: pre-wrap; font-family: ui-monospace, monospace; font-size: 13px }
td.text div { max-height: 16rem; overflow-y: auto }
th.number { text-align: right } td.number { text-align: right; font-variant-numeric: tabular-nums }
.short { width: 7rem } tr.good td { background: #eef7ef } tr.bad td { background: #fbeff0 } #count { color: #666 }
</style></head><body><header><h1>Samples</h1>
<label>Table <select id="table"></select></label>
<label>Source <select id="source"></select></label>
<input id="search" type="search" placeholder="Text to find"><span id="count"></span></header>
<table><thead><tr id="heads"></tr></thead><tbody id="rows"></tbody></table>
<script type="application/json" id="data">__DATA__</script><script>
const tables = JSON.parse(document.getElementById("data").textContent);
const columns = ["data_source", "prompt", "response", "reward", "advantage"];
const get = (id) => document.getElementById(id);
let order = null, falling = true;
function option(select, value, text) {
  const choice = document.createElement("option");
  choice.value = value; choice.textContent = text; select.append(choice);
}
tables.forEach((table, index) => option(get("table"), index, table.name));
get("table").value = tables.length - 1;
option(get("source"), "", "all");
[...new Set(tables.flatMap((table) => table.rows.map((row) => row.data_source)))].sort()
  .forEach((source) => option(get("source"), source, source || "unknown"));
columns.forEach((name) => {
  const head = document.createElement("th");
  head.textContent = name.replace("_", " ");
  if (!["prompt", "response"].includes(name)) head.className = "short";
  if (["reward", "advantage"].includes(name)) head.className += " number";
  head.onclick = () => { falling = order === name ? !falling : true; order = name; show(); };
  get("heads").append(head);
});
function show_number(value) { return Math.abs(value) < 1e6 ? value.toFixed(3) : value.toPrecision(4); }
function show() {
  const table = tables[Number(get("table").value)] || { rows: [] };
  const text = get("search").value.toLowerCase(), source = get("source").value;
  const rows = table.rows.filter((row) => (!source || row.data_source === source)
    && (row.prompt + "\\n" + row.response).toLowerCase().includes(text));
  const key = (row) => row[order] ?? (falling ? -Infinity : Infinity);
  if (order) rows.sort((a, b) => (key(a) > key(b) ? 1 : key(a) < key(b) ? -1 : 0) * (falling ? -1 : 1));
  const rewards = table.rows.map((row) => row.reward).filter((reward) => typeof reward === "number");
  const middle = rewards.reduce((sum, reward) => sum + reward / rewards.length, 0);
  get("rows").replaceChildren(...rows.map((row) => {
    const line = document.createElement("tr");
    const isScored = typeof row.reward === "number";
    line.className = isScored && row.reward > middle ? "good" : isScored && row.reward < middle ? "bad" : "";
    columns.forEach((name) => {
      const cell = document.createElement("td"), value = row[name];
      const isNumber = typeof value === "number";
      cell.className = isNumber ? "number" : name === "data_source" ? "" : "text";
      const box = document.createElement("div");
      box.textContent = value === undefined || value === null ? "" : isNumber ? show_number(value) : value;
      cell.append(box);
      line.append(cell);
    });
    return line;
  }));
  get("count").textContent = `${rows.length} of ${table.rows.length} responses, mean reward ${show_number(middle)}`;
}
["table", "source", "search"].forEach((id) => { get(id).oninput = show; });
show();
</script></body></html>
"""


def write_page(folder: Path, *, max_tables: int) -> Path:
    """Gathers the newest tables of a folder in its ``index.html``, and returns that.

    Args:
        folder: Folder with ``step=N.jsonl`` of validations and ``train_step=N.jsonl``.
        max_tables: Most tables on the page; the others stay in their files.
    """
    files = sorted(folder.glob("*step=*.jsonl"), key=_step)[-max_tables:]
    tables = [{"name": _title(file), "rows": read_table(file)} for file in files]
    # Nothing in a response may end the script that holds it.
    data = to_json(tables).replace("<", "\\u003c")
    page = folder / "index.html"
    write_whole(page, PAGE.replace("__DATA__", data))
    return page


def read_table(file: Path) -> Sequence[dict[str, object]]:
    """Reads the rows of a JSON Lines file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]


def _step(file: Path) -> tuple[int, str]:
    """Sort key of a table: training comes before the validation that follows it."""
    match = re.search(r"step=(\d+)", file.name)
    return (int(match[1]) if match else 0, "" if file.name.startswith("train") else "val")


def _title(file: Path) -> str:
    step, kind = _step(file)
    return f"step {step}, {'validation' if kind else 'training'}"
