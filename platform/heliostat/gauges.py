"""A run's numbers as Prometheus gauges, exported by the Ray that the learner is connected to.

Ray adds the prefix ``ray_`` and labels of the process. Each gauge carries ``run`` and ``workload``:

    heliostat_running              1 while the run is going on, 0 once it has ended
    heliostat_step                 steps done
    heliostat_step_seconds         time of the last step, ``perf/step_s``
    heliostat_phase_seconds        of it by ``phase``, ``perf/<phase>_s``
    heliostat_samples_per_second   ``perf/samples_per_s``, likewise tokens
    heliostat_queue_depth          answers that wait for the learner, ``perf/queue_depth``
    heliostat_lag_versions         age of the weights behind a batch, ``lag/versions``
    heliostat_restarts             deaths made good, by ``kind``: learner or host
    heliostat_metric               everything else by ``metric``, such as ``train/loss``
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from heliostat.folder import RunFolder
from heliostat.tracker import Number
from heliostat.views import RunLabels, Silent

if TYPE_CHECKING:
    from ray.util.metrics import Gauge

_EVERY_S = 2.0
"""Prometheus asks every ten seconds or so: exporting each step of a fast loop would be waste."""
_EVENTS_EVERY_S = 15.0
_MOST_METRICS = 64
"""Series of ``heliostat_metric`` that one run may make."""
_NAMED = {
    "perf/step_s": "step_seconds",
    "perf/samples_per_s": "samples_per_second",
    "perf/tokens_per_s": "tokens_per_second",
    "perf/queue_depth": "queue_depth",
    "lag/versions": "lag_versions",
}
_RESTARTS = {"learner": "learner-lost", "host": "host-lost"}


def is_connected() -> bool:
    """Whether this process is connected to a Ray; does not import it."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


class GaugeView(Silent):
    """Exports the newest values, at most every two seconds."""

    def __init__(self, folder: Path, labels: RunLabels) -> None:
        self._events = RunFolder(folder).events
        self._labels = {"run": labels.name, "workload": labels.workload}
        self._gauges: dict[str, Gauge] = {}
        self._newest: dict[str, Number] = {}
        self._metrics: set[str] = set()
        self._next = self._next_events = 0.0
        self._set("running", 1)

    def log(self, metrics: Mapping[str, Number], step: int) -> None:
        """Keeps the row and exports it where it is time to."""
        self._newest |= metrics
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _EVERY_S
            self._export(step)
        if now >= self._next_events:
            self._next_events = now + _EVENTS_EVERY_S
            self._count_restarts()

    def finish(self, exit_code: int = 0) -> None:  # noqa: ARG002 - a gauge holds no reason
        """Says that the run is over; its last values stay until the process ends."""
        self._set("running", 0)

    def _export(self, step: int) -> None:
        self._set("step", step)
        for name, value in self._newest.items():
            if name in _NAMED:
                self._set(_NAMED[name], value)
            elif name.startswith("perf/") and name.endswith("_s") and name[-6:] != "_per_s":
                self._set("phase_seconds", value, phase=name[5:-2])
            elif name in self._metrics or len(self._metrics) < _MOST_METRICS:
                self._metrics.add(name)
                self._set("metric", value, metric=name)
        self._newest.clear()

    def _count_restarts(self) -> None:
        found = [event.get("event") for event in self._events.read()]
        for kind, event in _RESTARTS.items():
            self._set("restarts", found.count(event), kind=kind)

    def _set(self, name: str, value: Number, **labels: str) -> None:
        if name not in self._gauges:
            from ray.util.metrics import Gauge

            keys = (*self._labels, *labels)
            gauge = Gauge(f"heliostat_{name}", f"See heliostat.gauges: {name}.", keys)
            self._gauges[name] = gauge.set_default_tags(self._labels)
        self._gauges[name].set(float(value), labels)
