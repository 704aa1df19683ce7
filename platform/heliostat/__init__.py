"""Many Ray actors feeding one learner: a method owns its loop, heliostat everything round it.

The names a method needs are here; what is heavy is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from heliostat.layout import Hosts, Layout
from heliostat.recipe import Recipe
from heliostat.workload import Plot, Workload

if TYPE_CHECKING:
    from heliostat.pool import Member, Pending, Pool, idempotent
    from heliostat.run import Run
    from heliostat.tracker import Tracker
    from heliostat.weights import Weights

__all__ = [
    "Hosts",
    "Layout",
    "Member",
    "Pending",
    "Plot",
    "Pool",
    "Recipe",
    "Run",
    "Tracker",
    "Weights",
    "Workload",
    "idempotent",
]

_HOMES = {
    "Member": "pool",
    "Pending": "pool",
    "Pool": "pool",
    "idempotent": "pool",
    "Run": "run",
    "Tracker": "tracker",
    "Weights": "weights",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the name stands for
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
