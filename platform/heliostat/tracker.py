"""Trackers: where a run's metrics, tables, histograms, figures and videos go.

``metrics.jsonl`` in the run's folder is the source of truth; W&B, TensorBoard and Prometheus are
views beside it. A view that fails is reported once and never ends a run; a disk that refuses the
truth does.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Number: TypeAlias = float | int
Cell: TypeAlias = str | float | int | bool


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

    def log_figure(self, name: str, figure: Figure, step: int) -> object:
        """Keeps a picture of ``figure``, which stays the caller's to close."""
        ...

    def log_video(self, name: str, frames: npt.NDArray[np.uint8], fps: float, step: int) -> object:
        """Keeps a film of RGB ``frames`` [T, H, W, 3], ``fps`` of them a second."""
        ...

    def log_checkpoint(self, path: Path, step: int) -> None:
        """Takes notice of the folder of a whole checkpoint that was saved after ``step``."""
        ...

    def rewind(self, step: int) -> None:
        """Forgets what was logged after ``step``: a resumed run will log it again."""
        ...

    def finish(self, exit_code: int = 0) -> None:
        """Writes out what is pending; nothing may be logged afterwards."""
        ...


class JsonlTracker:
    """Writes JSON lines and pictures into the run's folder.

    ``metrics.jsonl``: ``{"step": 3, "time": 1.7e9, "train/loss": 0.5}``, time in Unix seconds;
    ``tables/<name>.jsonl``: ``{"step": 3, "<column>": cell, ...}``;
    ``histograms.jsonl``: step, time, name, the 65 edges of 64 equal bins, their counts, and how
    many values were not finite; ``figures/<name>-<step>.png``; ``videos/<name>-<step>.gif``.

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

    def log_figure(self, name: str, figure: Figure, step: int) -> Path:
        """Writes the picture and returns its path; a name is as for tables."""
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=120)
        return self._keep(f"figures/{_checked(name)}-{step}.png", buffer.getvalue())

    def log_video(self, name: str, frames: npt.NDArray[np.uint8], fps: float, step: int) -> Path:
        """Writes the film and returns its path; a name is as for tables.

        Raises:
            ValueError: the frames are not uint8 [T, H, W, 3], or there are none.
        """
        return self._keep(f"videos/{_checked(name)}-{step}.gif", _gif(frames, fps))

    def log_checkpoint(self, path: Path, step: int) -> None:
        """Does nothing: the checkpoint lies in the run's folder."""

    def rewind(self, step: int) -> None:
        """Takes rows and pictures of later steps away; each file is replaced in one move."""
        self.finish()
        ours = [self._folder / "metrics.jsonl", self._folder / "histograms.jsonl"]
        for path in [*ours, *self._folder.glob("tables/**/*.jsonl")]:
            if path.exists():
                _drop_later_rows(path, step)
        drawn = [*self._folder.glob("figures/**/*.png"), *self._folder.glob("videos/**/*.gif")]
        for picture in drawn:
            stamp = re.search(r"-(\d+)$", picture.stem)
            if stamp and int(stamp[1]) > step:
                picture.unlink()

    def finish(self, exit_code: int = 0) -> None:  # noqa: ARG002 - for services only
        """Closes the files; a row is in the kernel's hands from the moment it was logged."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _keep(self, name: str, content: bytes) -> Path:
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, content)
        return path

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


def _gif(frames: npt.NDArray[np.uint8], fps: float) -> bytes:
    """Returns an animated GIF that repeats; it counts time in hundredths of a second."""
    from PIL import Image

    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or not frames.size:
        raise ValueError(
            f"expected frames uint8 [T, H, W, 3], found {frames.dtype} {list(frames.shape)}; "
            "stack what the environment renders"
        )
    first, *rest = map(Image.fromarray, frames)
    buffer = io.BytesIO()
    first.save(buffer, "GIF", save_all=True, append_images=rest, duration=round(1000 / fps), loop=0)
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
