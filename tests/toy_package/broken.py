"""Ways to write ``train`` wrong, each breaking one law of workloads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from heliostat import Recipe, Run
from heliostat.errors import Stopped
from heliostat.seeding import numpy_generator


@dataclass(frozen=True, kw_only=True, slots=True)
class Walk(Recipe):
    warm_up: int = 0

    @property
    def total_steps(self) -> int:
        return self.warm_up + self.steps


def walk(
    run: Run[Walk],
    draw: Callable[[int], float],
    kept: tuple[str, ...] = ("step", "place", "speed"),
) -> Mapping[str, float]:
    """A walk that has momentum; ``kept`` names what its checkpoints hold."""
    now: dict[str, Any] = {"step": 0, "place": 0.0, "speed": 0.0}
    now |= run.restore() or {}
    while now["step"] < run.recipe.steps:
        now["speed"] = 0.9 * now["speed"] + draw(now["step"])
        now["place"] += now["speed"]
        now["step"] += 1
        metrics = {"train/place": now["place"]}
        run.report(now["step"], metrics, lambda: {name: now[name] for name in kept})
    return {"place": now["place"]}


def seeded(run: Run[Walk]) -> Callable[[int], float]:
    return lambda step: float(numpy_generator(run.recipe.seed, "walk", step).normal())


def right(run: Run[Walk]) -> Mapping[str, float]:
    return walk(run, seeded(run))


def forgetful(run: Run[Walk]) -> Mapping[str, float]:
    return walk(run, seeded(run), kept=("step", "place"))


_moves = itertools.count()


def unseeded(run: Run[Walk]) -> Mapping[str, float]:
    return walk(run, lambda step: float(next(_moves)))


def deaf(run: Run[Walk]) -> Mapping[str, float]:
    try:
        return right(run)
    except Stopped:
        return {"place": 0.0}


def crashing(run: Run[Walk]) -> Mapping[str, float]:
    raise LookupError("no such street")


class Homeless:
    def __init__(self, recipe: Walk, member: object) -> None: ...
