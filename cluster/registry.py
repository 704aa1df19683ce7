"""The registry of runs: what lies in a folder of runs, read from the files alone."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cluster.records import (
    Method,
    as_count,
    as_number,
    as_text,
    printable,
    read_events,
    read_lines,
    read_object,
)
from heliostat.errors import UsageError, nearest
from heliostat.folder import ALIVE_S, RunFolder

Status = Literal["finished", "queued", "running", "stopped", "failed", "pruned", "interrupted"]

_TURNS: Mapping[str, Status] = {
    "attempt": "interrupted",
    "killed": "interrupted",
    "submitted": "queued",
    "job-attempt": "queued",
    "stopped": "stopped",
    "failed": "failed",
    "pruned": "pruned",
}
"""Event -> where a run stands whose process is gone and whose last such event it is."""
_TAIL_BYTES = 2**18
"""How much of the end of ``metrics.jsonl`` is searched for the newest values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """One run at a glance; None or an empty string where its folder does not tell."""

    name: str
    workload: str
    """As the user named it, such as ``t1`` or ``package.module:NAME``."""
    fingerprint: str
    """Of the recipe: 16 hex digits."""
    status: Status
    """``queued``: submitted, not begun. ``pruned``: a search gave it up for better ones.
    ``interrupted``: the process died without a word, or was killed while it was stopping."""
    step: int
    """Steps done, over all phases."""
    created: float | None
    """Unix seconds."""
    restarts: int
    """Attempts after the first, by the launcher or by ``resume``."""
    score: float | None
    """The newest value of the method's score."""
    method: Method


def summaries(runs: Path) -> list[RunSummary]:
    """Summarises every run in the folder, the oldest first; other folders are passed over."""
    if not runs.is_dir():
        return []
    found = [summarise(folder) for folder in _folders(runs)]
    return sorted(found, key=lambda summary: (summary.created or 0.0, summary.name))


def summarise(folder: RunFolder) -> RunSummary:
    """Summarises one run, from whatever its process has written so far.

    Nothing is imported that the folder names: it may come from elsewhere. A search counts the
    trials that have ended as its steps.
    """
    return _search(folder) if is_search(folder) else _run(folder)


def _run(folder: RunFolder) -> RunSummary:
    record = read_object(folder.record)
    method = Method.of(record)
    events = [str(event.get("event")) for event in read_events(folder)]
    rows = list(read_lines(folder.metrics, tail_bytes=_TAIL_BYTES))
    steps = [step for row in rows if (step := as_count(row.get("step"))) is not None]
    score = method.score
    final = as_number(read_object(folder.result).get(score)) if score else None
    return RunSummary(
        name=folder.name,
        workload=as_text(record.get("workload")) or "",
        fingerprint=as_text(record.get("fingerprint")) or "",
        status=_status(folder, events),
        step=max(steps, default=0),
        created=as_number(record.get("created")),
        restarts=max(0, events.count("attempt") - 1),
        score=_newest(rows, score) if score and final is None else final,
        method=method,
    )


def is_search(folder: RunFolder) -> bool:
    """Whether the folder is that of a search, which holds its trials' folders."""
    return (folder.path / "search.json").is_file()


def _search(folder: RunFolder) -> RunSummary:
    plan = read_object(folder.path / "search.json")
    events = [str(event.get("event")) for event in read_events(folder)]
    trials = [_run(trial) for trial in _folders(folder.path) if trial.record.is_file()]
    ended = [trial for trial in trials if trial.status in ("finished", "pruned", "failed")]
    status = _status(folder, events)
    return RunSummary(
        name=folder.name,
        workload=f"search {as_text(plan.get('workload')) or ''}",
        fingerprint="",
        status="finished" if status == "interrupted" and "finished" in events[-1:] else status,
        step=len(ended),
        created=as_number(plan.get("created")),
        restarts=max(0, events.count("attempt") - 1),
        score=as_number(read_object(folder.path / "best.json").get("score")),
        method=Method(total_steps=as_count(plan.get("trials"))),
    )


def find_run(runs: Path, name: str) -> RunFolder:
    """Returns the run's folder.

    Raises:
        UsageError: no run has that name; the message gives the nearest.
    """
    known = [folder.name for folder in _folders(runs)] if runs.is_dir() else []
    if name in known:
        return RunFolder(runs / name)
    if not known:
        raise UsageError(
            f"expected run {name!r} in {runs}, found no runs there; give their folder with --runs"
        )
    raise UsageError(nearest(name, known, f"run of {runs}"))


def format_table(summaries: Sequence[RunSummary]) -> str:
    """Returns the runs as aligned text, one a line; times are local."""
    if not summaries:
        return "no runs"
    rows = [("RUN", "WORKLOAD", "RECIPE", "STATUS", "STEP", "CREATED", "RESTARTS", "SCORE")]
    rows += [_cells(summary) for summary in summaries]
    return align(rows, {4, 6, 7})


def align(rows: Sequence[Sequence[str]], numeric: Collection[int]) -> str:
    """Returns rows of equal length as a table, the ``numeric`` columns flush right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = (
        "  ".join(
            cell.rjust(width) if column in numeric else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
    return "\n".join(lines)


def _cells(summary: RunSummary) -> tuple[str, ...]:
    steps = summary.method.total_steps
    total = "?" if steps is None else str(steps)
    cells = (
        summary.name,
        summary.workload or "?",
        summary.fingerprint[:8] or "?",
        summary.status,
        f"{summary.step}/{total}",
        _local_time(summary.created),
        str(summary.restarts),
        "-" if summary.score is None else f"{summary.score:.4g}",
    )
    return tuple(map(printable, cells))


def _local_time(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):
        return "?"


def _folders(runs: Path) -> list[RunFolder]:
    """A run's recipe and record are the first files that its launch writes."""
    folders = (RunFolder(path) for path in sorted(runs.iterdir()) if path.is_dir())
    return [
        folder
        for folder in folders
        if folder.recipe.exists() or folder.record.exists() or is_search(folder)
    ]


def _status(folder: RunFolder, events: Sequence[str]) -> Status:
    if folder.result.exists():
        return "finished"
    if is_locked(folder) or _alive(folder):
        return "running"
    ends = [event for event in events if event in _TURNS]
    return _TURNS[ends[-1] if ends else "attempt"]


def _alive(folder: RunFolder) -> bool:
    """Whether a copy from an object store holds a sign of life of the last minute."""
    told = as_number(read_object(folder.alive).get("time"))
    return told is not None and abs(time.time() - told) < ALIVE_S


def is_locked(folder: RunFolder) -> bool:
    """Whether a process holds the run.

    The shared lock is let go at once and does not hinder other readers; a launch that tries its
    own lock within those microseconds would be refused and can be repeated.
    """
    if not folder.lock.is_file():  # a foreign one may be anything
        return False
    try:
        file = folder.lock.open("rb")
    except FileNotFoundError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _newest(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return next((as_number(row[name]) for row in reversed(rows) if name in row), None)
