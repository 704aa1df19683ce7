"""The report of a run: one HTML file that needs nothing else, and its pictures beside it.

A run folder may come from elsewhere. No module that it names is imported, and whatever its files
say is text here: the template escapes it, pictures are drawn without markup, and the page forbids
scripts and requests to itself.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, cast

from cluster.media import newest_media
from cluster.pages import Draw, load_template, make_picture, save_pictures, write_file
from cluster.plots import plot_lines, plot_phases, plot_time_line
from cluster.records import as_number, read_events, read_lines, read_object
from cluster.registry import RunSummary, summarise
from heliostat.folder import RunFolder
from heliostat.privacy import scrub
from heliostat.workload import Plot

Row = Mapping[str, float]


_SAMPLES = 8
"""Newest rows shown of each half of a table."""
_PHASES = 5
"""Longest phases that get a layer of their own."""
_CELL_CHARACTERS = 1200
_REASON_CHARACTERS = 400
_MARKED = {
    "attempt": "started again",
    "host-lost": "host lost",
    "learner-lost": "learner lost",
    "stop-asked": "stop asked for",
    "failed": "failed",
    "killed": "killed",
}
"""Event -> name of its row in the picture of progress; the first attempt is no restart."""
_UNITS = (("_per_s", ""), ("_s", "seconds"), ("_gib", "GiB"), ("_bytes", "bytes"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Some rows of a table."""

    title: str
    total: int
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One line of the list of events."""

    after: str
    """Time since the run began."""
    event: str
    details: str


def write_report(folder: RunFolder) -> Path:
    """Writes ``report.html`` and ``plots/*.png`` into the run's folder, whatever its status.

    The plots are those that the run's record asks for. What is torn or of another type is left out.

    Returns:
        The path of the page.
    """
    rows = _rows(folder)
    events = read_events(folder)
    final = _final(folder)
    summary = summarise(folder)
    plots = summary.method.plots
    pictures = [make_picture(title, draw) for title, draw in _drawings(plots, rows, events, final)]
    save_pictures(folder.path / "plots", pictures)
    page = load_template("report.html.j2").render(
        summary=summary,
        method=summary.method,
        headline=_headline(summary, rows, events),
        final={name: _figure(value) for name, value in final.items()},
        pictures=pictures,
        undrawn=[plot.title for plot in plots if not _logged(plot, rows)],
        samples=list(_samples(folder.path / "tables")),
        films=list(newest_media(folder.path / "videos", "gif")),
        recipe=scrub(_text(folder.recipe)),
        figures=list(newest_media(folder.path / "figures", "png")),
        provenance=_provenance(read_object(folder.record)),
        entries=list(_entries(events)),
    )
    path = folder.path / "report.html"
    write_file(path, page.encode("utf-8", errors="replace"))
    return path


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() and not path.is_symlink() else ""


def _drawings(
    plots: Sequence[Plot],
    rows: Sequence[Row],
    events: Sequence[Mapping[str, Any]],
    final: Mapping[str, float],
) -> Iterator[tuple[str, Draw]]:
    for plot in plots:
        if series := _logged(plot, rows):
            yield plot.title, _lines(plot, series, final)
    phases = _phases(rows)
    if phases:
        steps = [row["step"] for row in rows if "perf/step_s" in row]
        yield "Time of a step by phase", lambda dark: plot_phases(steps, phases, dark)
    if len(rows) > 1:
        began = _began(rows, events)
        hours = [(row["time"] - began) / 3600 for row in rows]
        steps_done = [row["step"] for row in rows]
        marks = _marks(events, began)
        yield "Progress by the clock", lambda dark: plot_time_line(hours, steps_done, marks, dark)


def _logged(plot: Plot, rows: Sequence[Row]) -> dict[str, tuple[list[float], list[float]]]:
    """Returns steps and values of each of the plot's metrics that was logged."""
    found = {
        metric: [(row["step"], row[metric]) for row in rows if metric in row]
        for metric in plot.metrics
    }
    return {
        metric: ([step for step, _ in points], [value for _, value in points])
        for metric, points in found.items()
        if points
    }


def _lines(
    plot: Plot, series: Mapping[str, tuple[list[float], list[float]]], final: Mapping[str, float]
) -> Draw:
    value = final.get(plot.level, math.nan) if plot.level else math.nan
    level = (plot.level, value) if plot.level and math.isfinite(value) else None
    prefix = _common_folder(list(series))
    named = {metric.removeprefix(prefix): points for metric, points in series.items()}
    units = {unit for metric in series if (unit := _unit(metric))}
    only = next(iter(series)) if len(series) == 1 else prefix.rstrip("/")
    ylabel = ", ".join(part for part in (only, *sorted(units)) if part)
    return lambda dark: plot_lines(named, plot.title, "step", ylabel, level, dark)


def _common_folder(metrics: Sequence[str]) -> str:
    """Returns what all metrics share up to their last common slash, that included."""
    first, last = min(metrics), max(metrics)
    length = next(
        (place for place, (a, b) in enumerate(zip(first, last, strict=False)) if a != b),
        len(first),
    )
    return first[: first.rfind("/", 0, length) + 1]


def _unit(metric: str) -> str | None:
    return next((unit for suffix, unit in _UNITS if metric.endswith(suffix)), None)


def _phases(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Returns phase -> seconds in each row that timed its step; what no phase took is ``other``."""
    timed = [row for row in rows if "perf/step_s" in row]
    names = sorted(
        {
            name
            for row in timed
            for name in row
            if name.startswith("perf/") and _unit(name) == "seconds" and name != "perf/step_s"
        }
    )
    if not names:
        return {}
    phases = {
        name.removeprefix("perf/").removesuffix("_s"): [row.get(name, 0.0) for row in timed]
        for name in names
    }
    longest = sorted(phases, key=lambda name: -sum(phases[name]))[:_PHASES]
    spent = [sum(moments) for moments in zip(*(phases[name] for name in longest), strict=True)]
    other = [max(0.0, row["perf/step_s"] - phase) for row, phase in zip(timed, spent, strict=True)]
    return {**{name: phases[name] for name in longest}, "other": other}


def _began(rows: Sequence[Row], events: Sequence[Mapping[str, Any]]) -> float:
    times = [_moment(line) for line in (*events[:1], *rows[:1])]
    return min(time for time in times if time is not None)


def _moment(line: Mapping[str, Any]) -> float | None:
    """Returns the Unix seconds of an event or row."""
    seconds = as_number(line.get("time"))
    return seconds if seconds is not None and math.isfinite(seconds) else None


def _marks(events: Sequence[Mapping[str, Any]], began: float) -> dict[str, list[float]]:
    marks: dict[str, list[float]] = defaultdict(list)
    for event in events:
        kind = str(event.get("event"))
        moment = _moment(event)
        if kind in _MARKED and moment is not None:
            marks[kind].append((moment - began) / 3600)
    marks["attempt"] = marks["attempt"][1:]
    return {name: marks[kind] for kind, name in _MARKED.items() if marks[kind]}


def _rows(folder: RunFolder) -> list[Row]:
    """Returns the rows of metrics in order; one without step or time has no place in a picture."""
    rows = [_numbers(line) for line in read_lines(folder.metrics)]
    placed = ("step", "time")
    return [row for row in rows if all(math.isfinite(row.get(name, math.nan)) for name in placed)]


def _final(folder: RunFolder) -> dict[str, float]:
    return _numbers(read_object(folder.result))


def _numbers(found: Mapping[str, Any]) -> dict[str, float]:
    numbers = {name: as_number(value) for name, value in found.items()}
    return {name: number for name, number in numbers.items() if number is not None}


def _figure(value: float) -> str:
    if value.is_integer() and abs(value) < 1e12:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _headline(
    summary: RunSummary, rows: Sequence[Row], events: Sequence[Mapping[str, Any]]
) -> dict[str, str]:
    counts = Counter(str(event.get("event")) for event in events)
    lines = (*rows[:1], *rows[-1:], *events)
    moments = [moment for line in lines if (moment := _moment(line)) is not None]
    steps = summary.method.total_steps
    total = "" if steps is None else f" of {steps:,}"
    facts = {
        "steps": f"{summary.step:,}{total}",
        "began": "" if summary.created is None else _utc(summary.created),
        "took": _span(max(moments) - min(moments)) if moments else "",
        "restarts": str(summary.restarts),
        "hosts lost": str(counts["host-lost"]),
    }
    return {name: fact for name, fact in facts.items() if fact}


def _samples(folder: Path) -> Iterator[Samples]:
    """Yields the newest rows of each table, right and wrong ones apart where a column tells."""
    for path in sorted(folder.glob("**/*.jsonl")):
        name = path.relative_to(folder).with_suffix("").as_posix()
        counts: Counter[str] = Counter()
        newest: dict[str, deque[dict[str, Any]]] = defaultdict(lambda: deque(maxlen=_SAMPLES))
        for row in read_lines(path):
            right = row.pop("right", None)
            half = {True: "right", False: "wrong"}.get(right, "") if isinstance(right, bool) else ""
            counts[half] += 1
            newest[half].append(row)
        for half in sorted(newest):
            rows = list(newest[half])[::-1]
            columns = list(dict.fromkeys(column for row in rows for column in row))
            yield Samples(
                title=f"{name}: {half}" if half else name,
                total=counts[half],
                columns=columns,
                rows=[[_cell(row.get(column, "")) for column in columns] for row in rows],
            )


def _cell(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return _cut(text, _CELL_CHARACTERS)


def _cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else text[: characters - 1] + "…"


def _provenance(record: Mapping[str, Any]) -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in record.items():
        if key == "method":  # the head of the page
            continue
        if key == "created" and (created := as_number(value)) is not None:
            flat[key] = _utc(created)
        elif isinstance(value, dict):
            flat |= {str(name): str(found) for name, found in cast("Row", value).items()}
        else:
            flat[str(key)] = str(value)
    return flat


def _entries(events: Iterable[Mapping[str, Any]]) -> Iterator[Entry]:
    """Yields the events in order; checkpoints saved one after another share a line."""
    began: float | None = None
    for kind, group in groupby(events, key=lambda event: str(event.get("event"))):
        same = list(group)
        if kind == "saved" and len(same) > 1:
            steps = f"{same[0].get('step')} … {same[-1].get('step')}"
            same = [{"time": same[-1].get("time"), "step": steps, "checkpoints": len(same)}]
        for event in same:
            moment = _moment(event)
            began = moment if began is None else began
            after = "" if moment is None or began is None else _span(moment - began)
            details = {key: value for key, value in event.items() if key not in {"time", "event"}}
            text = ", ".join(f"{key} {value}" for key, value in details.items())
            yield Entry(after=after, event=kind, details=_cut(scrub(text), _REASON_CHARACTERS))


def _span(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


def _utc(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
    except (ValueError, OverflowError, OSError):
        return ""
