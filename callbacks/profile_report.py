"""A profiled run as people read it: a table of phases, and a timeline in one HTML file."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rich.table import Table

COLORS = ("#4878a8", "#d08850", "#5a9e6f", "#b65a6b", "#8a6fb0", "#8c6d52", "#cf86b4", "#77777f", "#a8a341", "#4aa6b0")
OTHER = "other"
LOOPS = ("run_training_epoch", "run_training_batch", "training_step", "optimizer_step", "backward")
"""Ends of the names of Lightning's actions that hold a step's own work."""
STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #222 }
h1 { font-size: 1.4rem } h2 { font-size: 1rem; margin: 1.6rem 0 .3rem }
table { border-collapse: collapse } td, th { padding: .15rem .8rem; text-align: right; border-bottom: 1px solid #ddd }
td:first-child, th:first-child { text-align: left }
i { display: inline-block; width: .8rem; height: .8rem; margin-right: .5rem; border-radius: 2px }
.lane { position: relative; height: 2rem; background: #f1f1f1; margin-bottom: 2px; overflow: hidden }
.lane.thin { height: .9rem }
.lane div { position: absolute; top: 0; bottom: 0; overflow: hidden; white-space: nowrap; color: #fff;
  font-size: 12px; line-height: 2rem; box-sizing: border-box; border-left: 1px solid #fff; padding-left: 3px }
.axis { display: flex; justify-content: space-between; color: #666; font-size: 12px }
p { color: #555; max-width: 60rem }
"""


class Interval(NamedTuple):
    """A phase or an action within a step; times in seconds, memory in bytes."""

    name: str
    start: float
    end: float
    peak_memory: int = 0


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """A profiled step of one rank; times in seconds of ``time.perf_counter``."""

    step: int
    """Number of the step; the first is 1."""

    start: float
    """Time when the step began."""

    end: float
    """Time when the next step could begin."""

    phases: Sequence[Interval]
    """Phases of the module; none within another."""

    actions: Sequence[Interval]
    """Actions of Lightning: hooks, data, checkpoints; some within others."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics that the step logged."""

    @property
    def outside(self) -> list[Interval]:
        """Intervals that hooks, data and logging took for themselves: their time without that of the phases in them."""
        phases = sorted(self.phases, key=lambda phase: phase.start)
        own = [action for action in self.actions if not action.name.endswith(LOOPS)]
        return list(_subtract(sorted(own, key=lambda action: (action.start, -action.end)), phases, self.start))

    @property
    def coverage(self) -> float:
        """Share of the step's time in which a phase or a named action ran."""
        known = sum(part.end - part.start for part in (*self.phases, *self.outside))
        return known / (self.end - self.start)


def _subtract(parts: Sequence[Interval], holes: Sequence[Interval], start: float) -> Iterator[Interval]:
    """Yields sorted parts without the sorted holes, and without what lies in earlier parts."""
    for part in parts:
        start = max(start, part.start)
        for hole in holes:
            if start < hole.end and hole.start < part.end:
                if start < hole.start:
                    yield part._replace(start=start, end=hole.start)
                start = hole.end
        if start < part.end:
            yield part._replace(start=start)
            start = part.end


class Row(NamedTuple):
    """A line of the table: means over the profiled steps."""

    name: str
    seconds: float
    share: float
    tokens_per_second: float | None
    mfu: float | None
    peak_gib: float | None


def summary_rows(records: Sequence[StepRecord], mfu_names: Mapping[str, str]) -> list[Row]:
    """Makes a row for each phase in the order of first runs, one for Lightning's actions, one for what is unnamed.

    Args:
        records: Profiled steps.
        mfu_names: Map from a phase to the ``<name>`` of its ``perf/mfu/<name>``.
    """
    steps = len(records)
    wall = sum(record.end - record.start for record in records) / steps
    seconds: defaultdict[str, float] = defaultdict(float)
    peaks: defaultdict[str, int] = defaultdict(int)
    for record in records:
        for part in record.phases:
            seconds[part.name] += (part.end - part.start) / steps
            peaks[part.name] = max(peaks[part.name], part.peak_memory)
    tokens = _mean(record.metrics.get("perf/total_num_tokens") for record in records)
    rows = []
    for name, spent in seconds.items():
        speed = tokens / spent if tokens is not None and spent > 1e-3 * wall else None
        mfu = _mean(record.metrics.get(f"perf/mfu/{mfu_names.get(name)}") for record in records)
        rows.append(Row(name, spent, spent / wall, speed, mfu, peaks[name] / 2**30 or None))
    outside = sum(part.end - part.start for record in records for part in record.outside) / steps
    rest = max(wall - sum(seconds.values()) - outside, 0.0)
    peak = max(peaks.values(), default=0) / 2**30 or None
    return [
        *rows,
        Row("hooks and data", outside, outside / wall, None, None, None),
        Row(OTHER, rest, rest / wall, None, None, None),
        Row("step", wall, 1.0, tokens / wall if tokens is not None else None, _step_mfu(records, mfu_names), peak),
    ]


def summary_table(rows: Sequence[Row], title: str) -> Table:
    """The rows for a terminal."""
    table = Table(title=title)
    for name in ("phase", "seconds", "share", "tokens/s", "MFU", "peak GiB"):
        table.add_column(name, justify="left" if name == "phase" else "right")
    for row in rows:
        table.add_row(*_cells(row), end_section=row.name == OTHER)
    return table


def timeline_page(records: Sequence[StepRecord], rows: Sequence[Row], title: str) -> str:
    """An HTML page that needs no other file: the table, and each step as a lane of its phases above Lightning's."""
    names = dict.fromkeys(part.name for record in records for part in record.phases)
    colors = {name: COLORS[index % len(COLORS)] for index, name in enumerate(names)}
    table = "".join(_html_row(row, colors.get(row.name)) for row in rows)
    steps = "".join(_html_step(record, colors) for record in records)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{html.escape(title)}</h1>"
        "<table><tr><th>phase<th>seconds<th>share<th>tokens/s<th>MFU<th>peak GiB</tr>"
        f"{table}</table><p>Means over the profiled steps. A tall lane shows the phases of a step, the thin lane below"
        " it what Lightning, callbacks and data took for themselves; rest the pointer on a part for its name.</p>"
        f"{steps}</body></html>\n"
    )


def _html_row(row: Row, color: str | None) -> str:
    name, *cells = _cells(row)
    dot = f'<i style="background:{color or "transparent"}"></i>'
    return f"<tr><td>{dot}{html.escape(name)}" + "".join(f"<td>{cell}" for cell in cells) + "</tr>"


def _html_step(record: StepRecord, colors: Mapping[str, str]) -> str:
    wall = record.end - record.start
    phases = "".join(_html_part(part, record, colors[part.name], part.name) for part in record.phases)
    outside = "".join(_html_part(part, record, "#999", "") for part in record.outside)
    ticks = "".join(f"<span>{wall * tick / 5:.3g} s</span>" for tick in range(6))
    return (
        f"<h2>Step {record.step}: {wall:.3g} s, {record.coverage:.1%} named</h2>"
        f'<div class="lane">{phases}</div><div class="lane thin">{outside}</div><div class="axis">{ticks}</div>'
    )


def _html_part(part: Interval, record: StepRecord, color: str, label: str) -> str:
    wall = record.end - record.start
    left, width = 100 * (part.start - record.start) / wall, 100 * (part.end - part.start) / wall
    tip = html.escape(f"{part.name}: {1000 * (part.end - part.start):.4g} ms", quote=True)
    shown = html.escape(label) if width > 0.75 * len(label) else ""
    return f'<div style="left:{left:.3f}%;width:{width:.3f}%;background:{color}" title="{tip}">{shown}</div>'


def _cells(row: Row) -> list[str]:
    return [
        row.name,
        f"{row.seconds:.4f}",
        f"{row.share:.1%}",
        "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
        "" if row.mfu is None else f"{row.mfu:.1%}",
        "" if row.peak_gib is None else f"{row.peak_gib:.2f}",
    ]


def _step_mfu(records: Sequence[StepRecord], mfu_names: Mapping[str, str]) -> float | None:
    name = mfu_names.get("step")
    return _mean(record.metrics.get(f"perf/mfu/{name}") for record in records) if name else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
