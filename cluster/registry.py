"""The registry of runs: what lies in a folder of runs, read from the files alone."""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import yaml

from algorithms.catalog import CATALOG
from heliostat.errors import UsageError
from heliostat.recipe import nearest
from heliostat.run import RunFolder
from heliostat.workload import Workload, load

Status = Literal["finished", "running", "stopped", "failed", "interrupted"]

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
    """``interrupted``: the process died without a word, or was killed while it was stopping."""
    step: int
    """Steps done, over all phases."""
    total_steps: int | None
    created: float | None
    """Unix seconds."""
    restarts: int
    """Attempts after the first, by the launcher or by ``resume``."""
    score: float | None
    """The newest value of the workload's score."""


def summaries(runs: Path) -> list[RunSummary]:
    """Summarises every run in the folder, the oldest first; other folders are passed over."""
    if not runs.is_dir():
        return []
    found = [summarise(folder) for folder in _folders(runs)]
    return sorted(found, key=lambda summary: (summary.created or 0.0, summary.name))


def summarise(folder: RunFolder, workload: Workload | None = None) -> RunSummary:
    """Summarises one run, from whatever its process has written so far.

    Args:
        folder: the run.
        workload: what it runs; None looks in the catalogue.
    """
    record = read_mapping(folder.record)
    events = [str(event.get("event")) for event in read_lines(folder.events.path)]
    spec = str(record.get("workload", ""))
    workload = workload or _catalogued(spec)
    score = workload.score if workload else None
    rows = list(read_lines(folder.path / "metrics.jsonl", tail_bytes=_TAIL_BYTES))
    steps = [row["step"] for row in rows if isinstance(row.get("step"), int)]
    final = as_number(read_mapping(folder.result).get(score)) if score else None
    return RunSummary(
        name=folder.name,
        workload=spec,
        fingerprint=str(record.get("fingerprint", "")),
        status=_status(folder, events),
        step=steps[-1] if steps else 0,
        total_steps=_total_steps(folder, workload),
        created=as_number(record.get("created")),
        restarts=max(0, events.count("attempt") - 1),
        score=_newest(rows, score) if score and final is None else final,
    )


def open_run(runs: Path, name: str) -> RunFolder:
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
    numeric = {4, 6, 7}
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
    total = "?" if summary.total_steps is None else str(summary.total_steps)
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
    # A folder from elsewhere may hold control characters that would steer the terminal.
    return tuple("".join(c if c.isprintable() else "?" for c in cell) for cell in cells)


def _local_time(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (ValueError, OverflowError):
        return "?"


def _folders(runs: Path) -> list[RunFolder]:
    """A run's recipe and record are the first files that its launch writes."""
    folders = (RunFolder(path) for path in sorted(runs.iterdir()) if path.is_dir())
    return [folder for folder in folders if folder.recipe.exists() or folder.record.exists()]


def _status(folder: RunFolder, events: Sequence[str]) -> Status:
    if folder.result.exists():
        return "finished"
    if _locked(folder):
        return "running"
    ends = [event for event in events if event in {"attempt", "stopped", "failed", "killed"}]
    last = ends[-1] if ends else "attempt"
    if last == "stopped":
        return "stopped"
    return "failed" if last == "failed" else "interrupted"


def _locked(folder: RunFolder) -> bool:
    """Whether a process holds the run.

    The shared lock is let go at once and does not hinder other readers; a launch that tries its
    own lock within those microseconds would be refused and can be repeated.
    """
    try:
        file = (folder.path / ".lock").open("rb")
    except FileNotFoundError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _catalogued(spec: str) -> Workload | None:
    """Only our own: a folder from elsewhere must not choose a module that a listing imports."""
    return load(spec, CATALOG)[0] if spec.partition(":")[0] in CATALOG else None


def _total_steps(folder: RunFolder, workload: Workload | None) -> int | None:
    recipe = read_mapping(folder.recipe)
    if workload is not None:
        try:
            return workload.recipe().from_dict(recipe).total_steps
        except UsageError:
            pass  # half-written, or of another version of the code
    steps = recipe.get("steps")
    return steps if isinstance(steps, int) else None


def _newest(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return next((as_number(row[name]) for row in reversed(rows) if name in row), None)


def read_lines(path: Path, tail_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects of a file of lines, of its end only where a length is given.

    What is missing, torn or no object is passed over: the file may be half-written or foreign.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        if tail_bytes is not None:
            file.seek(max(0, path.stat().st_size - tail_bytes))
        for line in file:
            try:
                found: object = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                yield cast("dict[str, Any]", found)


def read_mapping(path: Path) -> dict[str, Any]:
    """Reads a mapping from YAML or JSON by the file's suffix; empty where torn or missing."""
    try:
        text = path.read_text()
        found: object = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (FileNotFoundError, ValueError, yaml.YAMLError):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def as_number(value: object) -> float | None:
    """Reads a number, or "NaN" and the infinities as the tracker spells them; None for the rest."""
    if isinstance(value, str) and value in {"NaN", "Infinity", "-Infinity"}:
        return float(value)
    return float(value) if isinstance(value, int | float) else None
