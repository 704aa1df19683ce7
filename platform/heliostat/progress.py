"""Progress of a run, read by the launching process from the metrics that the learner writes."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self, TextIO

from heliostat.tracker import Number, numbers

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

RATE_WINDOW_S = 60.0
"""Span of the newest rows over which the rate is measured, in seconds."""
LINE_EVERY_S = 5.0
"""Shortest pause between two plain lines, in seconds."""


class Progress:
    """Shows how far a run is: a bar on a terminal, elsewhere a line every few seconds.

    It needs nothing but ``metrics.jsonl``, which may not exist yet, may belong to a resumed run,
    and may be replaced by a rewind, after which the display goes back with it.

    Example::

        with Progress(folder, total_steps=400, name="t1-smoke") as progress:
            while training.is_alive():
                training.join(0.2)
                progress.poll()

        t1-smoke 120/400 steps 3.2/s 1m27s left loss=0.52 reward=0.71
    """

    def __init__(
        self,
        folder: Path,
        total_steps: int,
        name: str,
        stream: TextIO | None = None,
        keys: Sequence[str] = (),
    ) -> None:
        """Prepares the display; nothing is shown before the first row.

        Args:
            folder: the run's folder, with ``metrics.jsonl``.
            total_steps: steps of all phases together.
            name: what the display calls the run.
            stream: where to show it; None takes standard error.
            keys: metrics to show, in this order; without any, the first three that are logged.
        """
        out: TextIO = sys.stderr if stream is None else stream
        self._rows = _AppendedRows(folder / "metrics.jsonl")
        self._pace = _Pace(total_steps)
        self._keys = list(keys)
        self._latest: dict[str, Number] = {}
        kind = _Bar if out.isatty() else _Lines
        self._display: _Display = kind(out, name, total_steps)

    @property
    def step(self) -> int | None:
        """The highest step that was read, None before the first row."""
        return self._pace.step

    def poll(self) -> None:
        """Shows rows that were appended since the last call; costs one ``stat`` where none were."""
        from_the_start, rows = self._rows.read()
        if from_the_start:
            self._pace = _Pace(self._pace.total)
            self._latest.clear()
        for row in rows:
            self._pace.add(int(row.pop("step")), row.pop("time"))
            self._latest |= row
        if from_the_start:
            self._pace.forget_marks()
        if self._pace.step is not None:
            self._display.show(self._pace.step, self._note(), final=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.poll()
        if self._pace.step is not None:
            self._display.show(self._pace.step, self._note(), final=True)
        self._display.close()

    def _note(self) -> str:
        keys = self._keys or list(self._latest)[:3]
        shown = [key for key in keys if key in self._latest]
        return " ".join([self._pace.text(), *_metrics(shown, self._latest)]).strip()


class _AppendedRows:
    """Reads a file of JSON lines piece by piece, as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode: int | None = None

    def read(self) -> tuple[bool, list[dict[str, Number]]]:
        """Returns the whole rows that were appended since, and whether they start the file.

        They start it at the first reading, and again once the file was replaced.
        """
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return False, []
        if status.st_ino != self._inode or status.st_size < self._offset:
            self._offset, self._inode = 0, status.st_ino
        elif status.st_size == self._offset:
            return False, []
        start = self._offset
        with self._path.open("rb") as file:
            file.seek(start)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return start == 0, [numbers(json.loads(line)) for line in whole.splitlines()]


class _Pace:
    """The rate of steps over the newest minute, and the time that the rest will take."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.step: int | None = None
        self._marks: deque[tuple[float, int]] = deque()

    def add(self, step: int, unix_s: float) -> None:
        """Notes that ``step`` was logged at ``unix_s``; a step that is not new changes nothing."""
        if self.step is not None and step <= self.step:
            return
        self.step = step
        self._marks.append((unix_s, step))
        while len(self._marks) > 2 and self._marks[1][0] < unix_s - RATE_WINDOW_S:
            self._marks.popleft()

    def forget_marks(self) -> None:
        """Measures from the next row on: what is in the file may be hours old."""
        self._marks.clear()

    def text(self) -> str:
        """Returns such as ``3.2/s 1m27s left``, nothing before two steps were seen to end."""
        if not self._marks:
            return ""
        (start_s, start), (end_s, end) = self._marks[0], self._marks[-1]
        if end_s <= start_s:
            return ""
        rate = (end - start) / (end_s - start_s)
        left = max(0, self.total - end) / rate
        return f"{_significant(rate)}/s {_duration(left)} left"


class _Display(Protocol):
    def show(self, step: int, note: str, final: bool) -> None: ...

    def close(self) -> None: ...


class _Lines:
    """Prints a line where something changed and the last line is old enough, and at the end."""

    def __init__(self, stream: TextIO, name: str, total: int) -> None:
        self._stream = stream
        self._name = name
        self._total = total
        self._printed = ""
        self._next_s = 0.0

    def show(self, step: int, note: str, final: bool) -> None:
        now = time.monotonic()
        line = f"{self._name} {step}/{self._total} steps {note}".rstrip()
        if line != self._printed and (final or now >= self._next_s):
            self._stream.write(line + "\n")
            self._stream.flush()
            self._printed, self._next_s = line, now + LINE_EVERY_S

    def close(self) -> None:
        """Has nothing to undo."""


class _Bar:
    """A bar that is redrawn in place."""

    def __init__(self, stream: TextIO, name: str, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.table import Column

        note = Column(no_wrap=True, overflow="ellipsis", ratio=1)
        self._rich: RichProgress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}", markup=False, table_column=note),
            console=Console(file=stream),
            auto_refresh=False,
            expand=True,
        )
        self._task: TaskID = self._rich.add_task(name, total=total, note="")
        self._shown: tuple[int, str] | None = None

    def show(self, step: int, note: str, final: bool) -> None:  # noqa: ARG002 - always shown at once
        if self._shown == (step, note):
            return
        self._rich.update(self._task, completed=step, note=note, refresh=True)
        if self._shown is None:
            self._rich.start()
        self._shown = (step, note)

    def close(self) -> None:
        if self._shown is not None:
            self._rich.stop()


def _metrics(keys: Iterable[str], values: Mapping[str, Number]) -> list[str]:
    """Returns ``loss=0.52`` for ``train/loss``, the whole name where the last part is shared."""
    keys = list(keys)
    parts = [key.rpartition("/")[2] for key in keys]
    return [
        f"{part if parts.count(part) == 1 else key}={_significant(values[key])}"
        for key, part in zip(keys, parts, strict=True)
    ]


def _significant(value: float) -> str:
    """Returns three significant digits, and whole numbers below a billion without an exponent."""
    return f"{value:.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.3g}"


def _duration(seconds: float) -> str:
    """Returns such as ``45s``, ``1m27s``, ``2h03m`` or ``3d04h``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
