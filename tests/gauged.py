"""A workload that reports whatever a dashboard shows, until its run is asked to stop."""

from __future__ import annotations

import time
from collections.abc import Mapping

from heliostat import Recipe, Run, Workload


def train(run: Run[Recipe]) -> Mapping[str, float]:
    run.restore()
    for step in range(1, run.recipe.steps + 1):
        with run.phase("sample"):
            time.sleep(0.1)
        run.count("samples", 8)
        run.count("tokens", 512)
        metrics = {"train/loss": 1 / step, "lag/versions": 1, "perf/queue_depth": 2}
        run.report(step, metrics, lambda at=step: {"step": at})
    return {}


WORKLOAD = Workload(
    name="gauged",
    summary="Reports.",
    paper="none",
    recipes={"default": Recipe(steps=100_000, checkpoint_every=100_000)},
    train=f"{__name__}:train",
)
