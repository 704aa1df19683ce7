"""One learner rank of a run: opens the tracker, calls the method's ``train``, keeps its result.

The launching process runs the only rank itself, or Ray Train runs several of them.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from heliostat.errors import HeliostatError
from heliostat.folder import replace_text
from heliostat.mirror import host_name, mirrored
from heliostat.recipe import Recipe
from heliostat.run import Assignment, Run
from heliostat.tracker import Tracker
from heliostat.views import open_trackers
from heliostat.workload import resolve

if TYPE_CHECKING:
    import torch


class Death(HeliostatError, RuntimeError):
    """A process of the run died through no fault of the method."""


def train_rank(assignment: Assignment, rank: int, world: int, device: torch.device | None) -> None:
    """Runs the method's ``train`` on one rank; rank 0 tracks, and writes the final metrics.

    On another machine than the launcher's, rank 0 keeps the run's URL up to date by itself.
    """
    folder = assignment.folder
    if folder.url and assignment.host != host_name():
        folder.path.mkdir(parents=True, exist_ok=True)
        with mirrored(folder, "learn" if rank == 0 else "read", assignment.attempt):
            _train_rank(assignment, rank, world, device)
    else:
        _train_rank(assignment, rank, world, device)


def _train_rank(assignment: Assignment, rank: int, world: int, device: torch.device | None) -> None:
    folder = assignment.folder
    tracker = _tracker(assignment) if rank == 0 else _Silent()
    run = Run[Recipe](assignment, tracker, rank, world, device)
    try:
        metrics = resolve(assignment.workload.train)(run)
    except BaseException:
        tracker.finish(1)
        raise
    tracker.finish(0)
    if rank == 0:
        final = {name: float(value) for name, value in metrics.items()}
        strict = {name: v if math.isfinite(v) else None for name, v in final.items()}
        replace_text(folder.result, json.dumps(strict, indent=2))


class _Silent:
    """Tracks nothing: the ranks but the first."""

    def log(self, metrics: object, step: int) -> None: ...
    def log_table(self, name: str, columns: object, rows: object, step: int) -> None: ...
    def log_histogram(self, name: str, values: object, step: int) -> None: ...
    def log_figure(self, name: str, figure: object, step: int) -> None: ...
    def rewind(self, step: int) -> None: ...
    def finish(self, exit_code: int = 0) -> None: ...


def _tracker(assignment: Assignment) -> Tracker:
    folder = assignment.folder
    record = json.loads(folder.record.read_text())
    return open_trackers(
        folder.path,
        run_id=record["id"],
        name=folder.name,
        group=record["group"],
        job_type=record["job_type"],
        config={**assignment.recipe.to_dict(), "code": record["code"]},
        wandb=None,
        tensorboard=assignment.tensorboard,
    )
