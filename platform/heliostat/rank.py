"""One learner rank of a run: opens the tracker, calls the method's ``train``, keeps its result.

The launching process runs the only rank itself, or Ray Train runs several of them.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from heliostat.errors import HeliostatError
from heliostat.folder import replace_text
from heliostat.gauges import GaugeView, is_connected
from heliostat.mirror import host_name, mirrored
from heliostat.recipe import Recipe, Tracking
from heliostat.run import Assignment, Run
from heliostat.tracker import JsonlTracker, Tracker
from heliostat.views import FanOut, RunLabels, Silent, TensorBoardView, View
from heliostat.wandb_view import WandbView, wandb_mode
from heliostat.workload import resolve

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("heliostat")


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
    tracker = _tracker(assignment) if rank == 0 else Silent()
    run = Run[Recipe](assignment, tracker, rank, world, device)
    try:
        metrics = resolve(assignment.workload.train)(run)
    except BaseException:
        tracker.finish(0 if folder.pruned else 1)
        raise
    tracker.finish(0)
    if rank == 0:
        final = {name: float(value) for name, value in metrics.items()}
        strict = {name: v if math.isfinite(v) else None for name, v in final.items()}
        replace_text(folder.result, json.dumps(strict, indent=2))


def _tracker(assignment: Assignment) -> Tracker:
    folder = assignment.folder
    record = json.loads(folder.record.read_text())
    labels = RunLabels(
        run_id=record["id"],
        name=folder.name,
        workload=assignment.workload.name,
        group=record["group"],
        job_type=record["job_type"],
        config={**assignment.recipe.to_dict(), "code": record["code"]},
        score=assignment.workload.score,
        url=folder.url,
    )
    return open_trackers(folder.path, labels, assignment.recipe.tracker)


def open_trackers(folder: Path, labels: RunLabels, tracking: Tracking) -> Tracker:
    """Opens the run's folder and the views beside it; a view that fails is left out.

    Where this process is connected to Ray, its metrics are exported to Prometheus too.

    Args:
        folder: the run's folder, made where missing.
        labels: how the run presents itself.
        tracking: which views, and how.

    Raises:
        UsageError: ``WANDB_MODE`` holds something unknown.
    """
    primary = JsonlTracker(folder)
    openers: list[Callable[[], View]] = []
    if wandb_mode(tracking) != "disabled":
        openers.append(lambda: WandbView(folder, labels, tracking))
    if tracking.tensorboard:
        openers.append(lambda: TensorBoardView(folder))
    if is_connected():
        openers.append(lambda: GaugeView(folder, labels))
    views: list[View] = []
    for opener in openers:
        try:
            views.append(opener())
        except Exception as error:  # noqa: BLE001 - as in FanOut, a view must not end a run
            logger.warning("a view could not start and the run goes on: %r", error)
    return FanOut(primary, views)
