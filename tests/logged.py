"""What the tests of trackers and views log, and how they read TensorBoard's files."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from heliostat.tracker import Tracker
from heliostat.views import RunLabels

LABELS = RunLabels(
    run_id="t1-smoke-1f2e",
    name="t1-smoke",
    workload="t1",
    group="smoke",
    job_type="train",
    config={"lr": 1.0, "layout": {"learners": 2}},
    score="eval/score",
)
FRAMES = np.random.default_rng(0).integers(0, 256, (3, 8, 6, 3), np.uint8)


def figure() -> Figure:
    drawing = Figure(figsize=(1, 1))
    drawing.subplots().plot([0, 1])
    return drawing


def exercise(tracker: Tracker) -> None:
    """Makes every call once."""
    tracker.rewind(-1)
    tracker.log({"loss": 0.5}, 0)
    tracker.log_table("t", ["a"], [[1]], 0)
    tracker.log_histogram("h", np.arange(3), 0)
    tracker.log_figure("f", figure(), 0)
    tracker.log_video("v", FRAMES, 5.0, 0)
    tracker.log_checkpoint(Path("step-0000000000"), 0)
    tracker.finish()


def next_second() -> None:
    """Waits: event files and W&B's folders are named by the second."""
    time.sleep(1.01 - time.time() % 1)


def tensorboard_events(folder: Path) -> list[Any]:
    from tensorboardX.proto.event_pb2 import Event

    events = []
    for path in sorted(folder.rglob("events.*"), key=lambda path: path.stat().st_mtime_ns):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            events.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return events
