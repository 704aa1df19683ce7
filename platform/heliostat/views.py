"""Views of a run beside its own folder: what they must do, how they are told, and TensorBoard."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from heliostat.tracker import Cell, JsonlTracker, Number, finite

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from tensorboardX import SummaryWriter

logger = logging.getLogger("heliostat")


@runtime_checkable
class View(Protocol):
    """A place that shows what the run's folder keeps, told after the folder."""

    def log(self, metrics: Mapping[str, Number], step: int) -> None:
        """Shows one row of metrics."""
        ...

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], step: int
    ) -> None:
        """Shows rows of a table."""
        ...

    def log_histogram(self, name: str, values: npt.NDArray[np.generic], step: int) -> None:
        """Shows a distribution."""
        ...

    def log_picture(self, name: str, path: Path, step: int) -> None:
        """Shows a file of the run's folder: a figure, ``.png``, or a film, ``.gif``."""
        ...

    def log_checkpoint(self, path: Path, step: int) -> None:
        """Shows that a checkpoint was saved."""
        ...

    def rewind(self, step: int) -> None:
        """Takes notice that the folder has forgotten what was logged after ``step``."""
        ...

    def finish(self, exit_code: int = 0) -> None:
        """Sends what is pending; nothing more is logged afterwards."""
        ...


class Silent:
    """Shows and tracks nothing: the ranks but the first, and views of a part to build on."""

    def log(self, metrics: Mapping[str, Number], step: int) -> None:
        """Does nothing."""

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], step: int
    ) -> None:
        """Does nothing."""

    def log_histogram(self, name: str, values: npt.NDArray[np.generic], step: int) -> None:
        """Does nothing."""

    def log_figure(self, name: str, figure: Figure, step: int) -> None:
        """Does nothing."""

    def log_video(self, name: str, frames: npt.NDArray[np.uint8], fps: float, step: int) -> None:
        """Does nothing."""

    def log_picture(self, name: str, path: Path, step: int) -> None:
        """Does nothing."""

    def log_checkpoint(self, path: Path, step: int) -> None:
        """Does nothing."""

    def rewind(self, step: int) -> None:
        """Does nothing."""

    def finish(self, exit_code: int = 0) -> None:
        """Does nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLabels:
    """How a run presents itself to a view."""

    run_id: str
    """Equal for all attempts of a run and for no other run."""
    name: str
    """What people read."""
    workload: str
    group: str
    """Runs that belong together, such as the trials of a search."""
    job_type: str
    """The kind of work, such as ``train`` or ``evaluate``."""
    config: Mapping[str, object]
    """The resolved recipe; a view publishes ``public_config`` of it."""
    score: str | None = None
    """Metric whose best value sums the run up, larger is better."""
    url: str = ""
    """Where an object store keeps the run's folder, if one does."""


class FanOut:
    """Keeps what is logged in the run's folder, whose errors count, and tells the views beside it.

    The first failure of a view is reported and the run goes on. A call that failed three times in a
    row is not made again on that view, since each may have waited for a time-out.
    """

    def __init__(
        self,
        primary: JsonlTracker,
        views: Sequence[View],
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
        """Draws a picture once and shows the file everywhere."""
        path = self._primary.log_figure(name, figure, step)
        self._show("log_picture", lambda view: view.log_picture(name, path, step))

    def log_video(self, name: str, frames: npt.NDArray[np.uint8], fps: float, step: int) -> None:
        """Encodes a film once and shows the file everywhere."""
        path = self._primary.log_video(name, frames, fps, step)
        self._show("log_picture", lambda view: view.log_picture(name, path, step))

    def log_checkpoint(self, path: Path, step: int) -> None:
        """Tells the views of a checkpoint."""
        self._show("log_checkpoint", lambda view: view.log_checkpoint(path, step))

    def rewind(self, step: int) -> None:
        """Forgets later steps everywhere."""
        self._primary.rewind(step)
        self._show("rewind", lambda view: view.rewind(step))

    def finish(self, exit_code: int = 0) -> None:
        """Closes the folder and the views, these even where the folder fails."""
        try:
            self._primary.finish(exit_code)
        finally:
            self._show("finish", lambda view: view.finish(exit_code))

    def _show(self, call: str, send: Callable[[View], None]) -> None:
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


class TensorBoardView(Silent):
    """Writes TensorBoard's event files into ``<folder>/tensorboard``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tensorboard"
        self._writer = self._opened(purge_step=None)

    def log(self, metrics: Mapping[str, Number], step: int) -> None:
        """Adds one scalar for each metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], step: int
    ) -> None:
        """Adds the rows as a table of text."""
        lines = [columns, ["---"] * len(columns), *rows]
        table = "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
        self._writer.add_text(name, table, step)

    def log_histogram(self, name: str, values: npt.NDArray[np.generic], step: int) -> None:
        """Adds the finite values, in bins that grow exponentially."""
        if (found := finite(values)).size:
            self._writer.add_histogram(name, found, step)

    def log_picture(self, name: str, path: Path, step: int) -> None:
        """Adds the file as it is: TensorBoard plays a GIF."""
        from PIL import Image
        from tensorboardX.proto import summary_pb2

        with Image.open(path) as picture:
            width, height = picture.size
        messages, file = cast("Any", summary_pb2), cast("Any", self._writer.file_writer)
        image = messages.Summary.Image(
            height=height, width=width, colorspace=3, encoded_image_string=path.read_bytes()
        )
        value = messages.Summary.Value(tag=name, image=image)
        file.add_summary(messages.Summary(value=[value]), step)

    def rewind(self, step: int) -> None:
        """Starts a new event file, which makes TensorBoard hide later steps of the former."""
        self._writer.close()
        self._writer = self._opened(purge_step=step + 1)

    def finish(self, exit_code: int = 0) -> None:  # noqa: ARG002 - for services only
        """Flushes and closes the event file."""
        self._writer.close()

    def _opened(self, purge_step: int | None) -> SummaryWriter:
        from tensorboardX import SummaryWriter

        return SummaryWriter(str(self._folder), purge_step=purge_step, flush_secs=10)
