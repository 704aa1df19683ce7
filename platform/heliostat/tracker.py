"""Trackers: where a run's metrics, tables, histograms and figures go.

``metrics.jsonl`` in the run's folder is the source of truth; W&B and TensorBoard are views beside
it. A view that fails is reported once and never ends a run; a disk that refuses the truth does.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Literal,
    Protocol,
    TypeAlias,
    TypedDict,
    cast,
    runtime_checkable,
)

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger("heliostat")

Number: TypeAlias = float | int
Cell: TypeAlias = str | float | int | bool
WandbMode: TypeAlias = Literal["offline", "online", "disabled"]


@runtime_checkable
class Tracker(Protocol):
    """A place that keeps what a run logs. Steps are the run's own, over all phases."""

    def log(self, metrics: Mapping[str, Number], step: int) -> None:
        """Keeps one row of metrics, such as ``{"train/loss": 0.5}``, logged after ``step``."""
        ...

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], step: int
    ) -> None:
        """Keeps rows of a table; tables of the same name add up over steps."""
        ...

    def log_histogram(self, name: str, values: npt.NDArray[np.generic], step: int) -> None:
        """Keeps the distribution of real ``values`` of any shape."""
        ...

    def log_figure(self, name: str, figure: Figure, step: int) -> None:
        """Keeps a picture of ``figure``, which stays the caller's to close."""
        ...

    def rewind(self, step: int) -> None:
        """Forgets what was logged after ``step``: a resumed run will log it again."""
        ...

    def finish(self, exit_code: int = 0) -> None:
        """Writes out what is pending; nothing may be logged afterwards."""
        ...


class RunLabels(TypedDict):
    """How a run presents itself to a tracking service."""

    run_id: str
    """Equal for all attempts of a run and for no other run."""
    name: str
    """What people read."""
    group: str
    """Runs that belong together, such as the trials of a search."""
    job_type: str
    """The kind of work, such as ``train`` or ``evaluate``."""
    config: Mapping[str, object]
    """The resolved recipe; a tracker publishes ``public_config`` of it."""


class JsonlTracker:
    """Writes JSON lines and pictures into the run's folder.

    ``metrics.jsonl``: ``{"step": 3, "time": 1.7e9, "train/loss": 0.5}``, time in Unix seconds;
    ``tables/<name>.jsonl``: ``{"step": 3, "<column>": cell, ...}``;
    ``histograms.jsonl``: step, time, name, the 65 edges of 64 equal bins, their counts, and how
    many values were not finite; ``figures/<name>-<step>.png``.

    Lines are strict JSON: NaN and the infinities are the strings "NaN", "Infinity" and "-Infinity",
    which ``float`` reads back. A row is one append to the file, so that the death of the process
    leaves at most the last row torn; it is cut off when the next attempt opens the file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[Path, int] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def log(self, metrics: Mapping[str, Number], step: int) -> None:
        """Appends one row to ``metrics.jsonl``.

        Raises:
            ValueError: a metric is called ``step`` or ``time``.
            OSError: the row could not be written.
        """
        values = {name: float(value) for name, value in metrics.items()}
        row = _row({"step": step, "time": time.time()}, values, "metric")
        self._append(self._folder / "metrics.jsonl", [row])

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], step: int
    ) -> None:
        """Appends ``rows`` to the table's file.

        Raises:
            ValueError: a row is not as long as ``columns``, a column is called ``step``, or the
                name is not letters, digits, ``_``, ``-``, ``.`` in parts joined by ``/``.
        """
        found = [_row({"step": step}, _cells(columns, row), "column") for row in rows]
        self._append(self._folder / "tables" / f"{_checked(name)}.jsonl", found)

    def log_histogram(self, name: str, values: npt.NDArray[np.generic], step: int) -> None:
        """Appends the histogram of ``values`` to ``histograms.jsonl``."""
        counts, edges = histogram(values)
        row = {"step": step, "time": time.time(), "name": name}
        row |= {"edges": edges.tolist(), "counts": counts.tolist()}
        row |= {"not_finite": values.size - int(counts.sum())}
        self._append(self._folder / "histograms.jsonl", [row])

    def log_figure(self, name: str, figure: Figure, step: int) -> None:
        """Writes the picture; a name is as for tables."""
        path = self._folder / "figures" / f"{_checked(name)}-{step}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, png(figure))

    def rewind(self, step: int) -> None:
        """Takes rows and pictures of later steps away; each file is replaced in one move."""
        self.finish()
        ours = [self._folder / "metrics.jsonl", self._folder / "histograms.jsonl"]
        for path in [*ours, *self._folder.glob("tables/**/*.jsonl")]:
            if path.exists():
                _drop_later_rows(path, step)
        for picture in self._folder.glob("figures/**/*.png"):
            stamp = re.search(r"-(\d+)$", picture.stem)
            if stamp and int(stamp[1]) > step:
                picture.unlink()

    def finish(self, exit_code: int = 0) -> None:  # noqa: ARG002 - for services only
        """Closes the files; a row is in the kernel's hands from the moment it was logged."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _append(self, path: Path, rows: Iterable[Mapping[str, object]]) -> None:
        lines = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
        if path not in self._open:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open[path] = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            _cut_torn_row(self._open[path])
        written = os.write(self._open[path], lines)
        if written != len(lines):
            _cut_torn_row(self._open[path])
            raise OSError(f"{path}: wrote {written} of {len(lines)} bytes; is the disk full?")


def read_rows(path: Path) -> list[dict[str, object]]:
    """Returns the rows of a file that ``JsonlTracker`` writes; without it, none.

    Raises:
        ValueError: a line that ends in a newline is no JSON object.
    """
    if not path.exists():
        return []
    # A row exists once its newline does, so the last piece is empty or torn.
    pieces = path.read_bytes().split(b"\n")[:-1]
    rows: list[dict[str, object]] = []
    for number, piece in enumerate(pieces, start=1):
        try:
            rows.append(json.loads(piece))
        except ValueError:
            raise ValueError(
                f"{path}:{number}: expected one JSON object, found {piece[:80]!r}; remove the line"
            ) from None
    return rows


def read_metrics(folder: Path) -> list[dict[str, Number]]:
    """Returns the rows of ``metrics.jsonl`` in the order of logging, a torn last one left out."""
    return [numbers(row) for row in read_rows(folder / "metrics.jsonl")]


def numbers(row: Mapping[str, object]) -> dict[str, Number]:
    """Returns a row of metrics with "NaN", "Infinity" and "-Infinity" as the floats they name."""
    return {
        name: float(value) if isinstance(value, str) else cast("Number", value)
        for name, value in row.items()
    }


def _row(fixed: Mapping[str, Number], values: Mapping[str, Cell], what: str) -> dict[str, Cell]:
    """Joins our own columns and the caller's, with floats as JSON can hold them."""
    if taken := fixed.keys() & values.keys():
        raise ValueError(f"no {what} may be called {min(taken)!r}, which every row has; rename it")
    return {**fixed, **{name: _plain(value) for name, value in values.items()}}


def _plain(value: object) -> Cell:
    """Returns a cell as strict JSON can hold it; NumPy's scalars become Python's."""
    cell = cast("Cell", value.item() if isinstance(value, np.generic) else value)
    if not isinstance(cell, float) or math.isfinite(cell):
        return cell
    return "NaN" if math.isnan(cell) else "Infinity" if cell > 0 else "-Infinity"


def _cells(columns: Sequence[str], row: Sequence[Cell]) -> dict[str, Cell]:
    if len(row) != len(columns):
        raise ValueError(f"expected one cell for each of {list(columns)}, found {list(row)}")
    return dict(zip(columns, row, strict=True))


def _checked(name: str) -> str:
    """Returns a name that is safe as a relative path."""
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)*", name):
        raise ValueError(
            "expected letters, digits, '_', '-' and '.' in parts joined by '/', "
            f"found {name!r}; rename the table or figure"
        )
    return name


def histogram(
    values: npt.NDArray[np.generic], bins: int = 64
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Returns counts [bins] and edges [bins + 1] of the finite values, for every finite range."""
    found = finite(values)
    low, high = (found.min(), found.max()) if found.size else (0.0, 1.0)
    if low == high:
        low, high = low - 0.5, high + 0.5
    share = np.linspace(0.0, 1.0, bins + 1)
    # high - low may overflow, and rounding may swap edges of a tiny range.
    edges = np.maximum.accumulate(low * (1.0 - share) + high * share)
    return np.histogram(found, edges)[0].astype(np.int64), edges


def finite(values: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    """Returns the finite ones of real values, flat."""
    flat = values.astype(np.float64).ravel()
    return flat[np.isfinite(flat)]


def png(figure: Figure) -> bytes:
    """Returns the figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def _replace(path: Path, content: bytes) -> None:
    """Writes a file so that a reader sees the old content or the new, nothing between."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _drop_later_rows(path: Path, step: int) -> None:
    content = path.read_bytes()
    lines = content[: content.rfind(b"\n") + 1].splitlines(keepends=True)
    rows = read_rows(path)
    kept = b"".join(
        line for line, row in zip(lines, rows, strict=True) if cast("int", row["step"]) <= step
    )
    if kept != content:
        _replace(path, kept)


def _cut_torn_row(descriptor: int) -> None:
    """Shortens a file to its last newline, found from the end."""
    end = os.lseek(descriptor, 0, os.SEEK_END)
    while end > 0:
        start = max(0, end - 65536)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    os.ftruncate(descriptor, end)


class FanOut:
    """Sends what is logged to a primary tracker, whose errors count, and to views beside it.

    The first failure of a view is reported and the run goes on. A call that failed three times in a
    row is not made again on that view, since each may have waited for a time-out.
    """

    def __init__(
        self,
        primary: Tracker,
        views: Sequence[Tracker],
        warn: Callable[[str], object] = logger.warning,
    ) -> None:
        self._primary = primary
        self._views = list(views)
        self._warn = warn
        self._failures: Counter[tuple[int, str]] = Counter()
        self._reported: set[int] = set()

    def log(self, metrics: Mapping[str, Number], step: int) -> None:
        """Logs one row of metrics everywhere."""
        self._primary.log(metrics, step)
        self._show("log", lambda view: view.log(metrics, step))

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], step: int
    ) -> None:
        """Logs rows of a table everywhere."""
        self._primary.log_table(name, columns, rows, step)
        self._show("log_table", lambda view: view.log_table(name, columns, rows, step))

    def log_histogram(self, name: str, values: npt.NDArray[np.generic], step: int) -> None:
        """Logs a distribution everywhere."""
        self._primary.log_histogram(name, values, step)
        self._show("log_histogram", lambda view: view.log_histogram(name, values, step))

    def log_figure(self, name: str, figure: Figure, step: int) -> None:
        """Logs a picture everywhere."""
        self._primary.log_figure(name, figure, step)
        self._show("log_figure", lambda view: view.log_figure(name, figure, step))

    def rewind(self, step: int) -> None:
        """Forgets later steps everywhere."""
        self._primary.rewind(step)
        self._show("rewind", lambda view: view.rewind(step))

    def finish(self, exit_code: int = 0) -> None:
        """Closes all trackers, the views even where the primary one fails."""
        try:
            self._primary.finish(exit_code)
        finally:
            self._show("finish", lambda view: view.finish(exit_code))

    def _show(self, call: str, send: Callable[[Tracker], None]) -> None:
        for number, view in enumerate(self._views):
            if self._failures[number, call] >= 3:
                continue
            try:
                send(view)
            except Exception as error:  # noqa: BLE001 - services fail in ways of their own
                self._failures[number, call] += 1
                if number not in self._reported:
                    self._reported.add(number)
                    name = type(view).__name__
                    self._warn(f"{name}.{call} failed and the run goes on: {error!r}")
            else:
                self._failures[number, call] = 0
