"""One HTML file that shows a run: curves, responses, timings, settings and versions, without scripts or a network."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from verl_lightning.callbacks.json_files import write_whole
from verl_lightning.callbacks.samples_page import newest_table
from verl_lightning.run_records import CONFIG_FILE, METRICS_FILE, RunRecord, finite_number, moment, read_rows

PAGE_FILE = "report.html"
"""File in a run's folder that shows it in a browser."""

MOST_POINTS = 300
"""Points of a curve; more are replaced by the means of their neighbours."""

MOST_RESPONSES = 6
"""Responses on the page; `samples/index.html` has more."""

HEADLINES = ("val/reward", "val/loss", "critic/score/mean", "train/loss", "loss", "val/", "reward/", "actor/entropy")
"""Beginnings of the metrics that stand in the first group, in their order."""

LAST_GROUPS = ("perf", "timing_s", "timing_per_token_ms")
"""Groups of metrics that come after all others."""

NO_CURVES = {"step", "epoch"}

STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 1.5rem; color: #222; max-width: 90rem }
h1 { font-size: 1.4rem; margin: 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem } .quiet { color: #666 }
.state { padding: .1rem .6rem; border-radius: 1rem; background: #dde7f5 } .finished { background: #d9f0dc }
.failed, .killed, .unhealthy { background: #f7d9dc } .preempted, .stopped, .interrupted { background: #f7ecd0 }
.curves { display: flex; flex-wrap: wrap; gap: 1rem } figure { margin: 0; width: 300px }
figcaption { display: flex; justify-content: space-between; font-size: 12px } svg { width: 300px; height: 110px }
polyline { fill: none; stroke: #2563c9; stroke-width: 1.5 } circle { fill: #2563c9 }
.frame { fill: #fafafa; stroke: #ddd } text { font-size: 9px; fill: #777 } summary { cursor: pointer; margin: .5rem 0 }
table { border-collapse: collapse } td, th { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0;
border-bottom: 1px solid #eee } td.number { text-align: right; font-variant-numeric: tabular-nums }
td.said, pre { white-space: pre-wrap; overflow-wrap: anywhere; font: 12px/1.4 ui-monospace, monospace }
"""

Points = list[tuple[float, float]]


def write_report(folder: Path, record: RunRecord) -> Path:
    """Writes the report of a run into its folder, and returns its path.

    Args:
        folder: Folder of the run; what it lacks is left out.
        record: Record of the run.
    """
    rows = read_rows(folder / METRICS_FILE)
    parts = [
        *_head(record),
        *_curves(curves_of(rows)),
        *_responses(folder),
        *_timings(rows),
        *_settings(folder),
        *_section("Environment", _table([*record.environment.items(), ("command", shlex.join(record.command))])),
    ]
    title = escape(record.name)
    page = folder / PAGE_FILE
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    write_whole(
        page, "\n".join([f'<!doctype html><html lang="en"><head>{head}</head><body>', *parts, "</body></html>\n"])
    )
    return page


def curves_of(rows: Sequence[Mapping[str, str]]) -> dict[str, Points]:
    """The finite values of each metric by step, the first step being 1."""
    curves: dict[str, Points] = {}
    for row in rows:
        step = float(row["step"]) + 1
        for name, text in row.items():
            if text and name not in NO_CURVES and (value := finite_number(text)) is not None:
                curves.setdefault(name, []).append((step, value))
    return curves


def thinned(points: Points) -> Points:
    """The same curve with fewer points: means of neighbours, and the last point as it is."""
    width = math.ceil(len(points) / MOST_POINTS)
    if width == 1:
        return points
    chunks = [points[at : at + width] for at in range(0, len(points) - 1, width)]
    means = [(chunk[-1][0], sum(value for _, value in chunk) / len(chunk)) for chunk in chunks]
    return [*means, points[-1]]


def chart(name: str, points: Points) -> str:
    """A curve as a figure."""
    drawn = thinned(points)
    steps, values = [step for step, _ in drawn], [value for _, value in drawn]
    places = [
        (f"{45 + 245 * _share(step, steps):.1f}", f"{90 - 80 * _share(value, values):.1f}") for step, value in drawn
    ]
    dots = "".join(f'<circle cx="{x}" cy="{y}" r="2"/>' for x, y in places) if len(places) <= 40 else ""
    line = " ".join(f"{x},{y}" for x, y in places)
    texts = [(42, 14, "end", max(values)), (42, 92, "end", min(values)), (45, 103, "start", steps[0])]
    labels = "".join(
        f'<text x="{x}" y="{y}" text-anchor="{anchor}">{number:.4g}</text>'
        for x, y, anchor, number in [*texts, (290, 103, "end", steps[-1])]
    )
    return (
        f"<figure><figcaption><span>{escape(name)}</span><b>{points[-1][1]:.4g}</b></figcaption>"
        f'<svg viewBox="0 0 300 110" role="img" aria-label="{escape(name)}">'
        f'<rect class="frame" x="45" y="8" width="245" height="84"/>{labels}<polyline points="{line}"/>{dots}</svg>'
        "</figure>"
    )


def _head(record: RunRecord) -> Iterator[str]:
    total = "" if record.max_steps == -1 else f" of {record.max_steps}"
    quality = "" if record.quality is None else f", {escape(record.quality[0])} {record.quality[1]:.4g}"
    yield f'<h1>{escape(record.name)} <span class="state {escape(record.state)}">{escape(record.state)}</span></h1>'
    reason = "" if record.ended_by == record.state else f" {escape(record.ended_by)}"
    yield f"<p>Step {record.step}{total}{quality}.{reason}</p>"
    times = f"Began {moment(record.started)}, this page is of {moment(record.updated)} (UTC), on {record.host}."
    yield f'<p class="quiet">{escape(times)}</p>'


def _curves(curves: Mapping[str, Points]) -> Iterator[str]:
    yield "<h2>Curves</h2>"
    if not curves:
        yield '<p class="quiet">Nothing is logged yet.</p>'
    groups: dict[str, list[str]] = {}
    for name in sorted(curves, key=_order):
        groups.setdefault(_group(name), []).append(name)
    for at, (group, names) in enumerate(groups.items()):
        yield f"<details{'' if at else ' open'}><summary>{escape(group)} ({len(names)})</summary>"
        yield '<div class="curves">' + "".join(chart(name, curves[name]) for name in names) + "</div></details>"


def _responses(folder: Path) -> Iterator[str]:
    title, rows = newest_table(folder / "samples")
    if not rows:
        return
    yield f"<h2>Responses</h2><p>The first of {escape(title)}. "
    yield '<a href="samples/index.html">All tables</a></p><table><tr><th>reward</th><th>prompt</th><th>response</th>'
    yield "<th>ground truth</th></tr>"
    for row in rows[:MOST_RESPONSES]:
        reward = row.get("reward")
        cells = [f'<td class="number">{f"{reward:.4g}" if isinstance(reward, int | float) else ""}</td>']
        said = (row.get("prompt"), row.get("response"), row.get("ground_truth"))
        cells += [f'<td class="said">{"" if text is None else escape(str(text))}</td>' for text in said]
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</table>"


def _timings(rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
    curves = {name.removeprefix("timing_s/"): points for name, points in curves_of(rows).items() if "timing_s/" in name}
    means = {name: sum(value for _, value in points) / len(points) for name, points in curves.items()}
    if not means:
        return
    step = means.get("step")
    lines = [
        (name, f"{seconds:.4g} s" + (f", {seconds / step:.1%}" if step and name != "step" else ""))
        for name, seconds in sorted(means.items(), key=lambda each: -each[1])
    ]
    yield from _section("Mean time of a step", _table(lines))


def _settings(folder: Path) -> Iterator[str]:
    file = folder / CONFIG_FILE
    if file.exists():
        text = escape(file.read_text(encoding="utf-8"))
        yield f"<h2>Settings</h2><details><summary>{CONFIG_FILE}</summary><pre>{text}</pre></details>"


def _section(title: str, table: str) -> Iterator[str]:
    yield f"<h2>{title}</h2>{table}"


def _table(lines: Iterable[tuple[str, str]]) -> str:
    return "<table>" + "".join(f"<tr><th>{escape(a)}</th><td>{escape(b)}</td></tr>" for a, b in lines) + "</table>"


def _order(name: str) -> tuple[int, int, str]:
    headline = next((at for at, start in enumerate(HEADLINES) if name.startswith(start)), len(HEADLINES))
    group = _group(name)
    return LAST_GROUPS.index(group) + 1 if group in LAST_GROUPS else 0, headline, name


def _group(name: str) -> str:
    return "learning" if name.startswith(HEADLINES) else name.partition("/")[0]


def _share(value: float, values: Sequence[float]) -> float:
    low, high = min(values), max(values)
    return (value - low) / (high - low) if high > low else 0.5
