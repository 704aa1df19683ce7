"""What is wanted of a search, and the folder that says so: all that can be known without Ray."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from cluster.records import read_lines, read_object
from cluster.spaces import Point, Space, assignments, build_space, grid_points, random_points
from heliostat.errors import UsageError
from heliostat.folder import RunFolder
from heliostat.recipe import Recipe
from heliostat.workload import Workload

SchedulerName = Literal["asha", "pbt", "median", "none"]
SearchName = Literal["random", "grid", "optuna"]

_TURNS = ("attempt", "stopped", "pruned", "failed")
"""Events after which a trial goes on, waits, or has ended."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A metric and which way it should go."""

    metric: str
    mode: Literal["min", "max"] = "max"

    @classmethod
    def parse(cls, text: str) -> Goal:
        """Reads ``NAME`` or ``NAME:min`` or ``NAME:max``; without either, larger is better.

        Raises:
            UsageError: the part behind the colon is something else.
        """
        name, colon, mode = text.partition(":")
        if not name or (colon and mode not in ("min", "max")):
            raise UsageError(f"--metric: expected NAME, NAME:min or NAME:max, found {text!r}")
        return cls(name, "min" if mode == "min" else "max")

    @property
    def text(self) -> str:
        """The goal as it is written."""
        return f"{self.metric}:{self.mode}"

    def gain(self, value: float) -> float:
        """Returns the value so that larger is better; NaN is worst."""
        if math.isnan(value):
            return -math.inf
        return value if self.mode == "max" else -value


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is wanted of a search; ``search.json`` holds it."""

    workload: str
    """As the user named it."""
    recipe_name: str
    recipe: Mapping[str, Any]
    """The recipe that points change."""
    space: Mapping[str, str]
    """Recipe key -> distribution."""
    goals: tuple[str, ...]
    """Metrics with their directions; the scheduler judges by the first."""
    scheduler: SchedulerName = "none"
    search: SearchName = "random"
    trials: int = 8
    concurrent: int | None = None
    """Trials at a time; None: as many as fit."""

    @property
    def wanted(self) -> tuple[Goal, ...]:
        """The goals, read.

        Raises:
            UsageError: one of them is malformed.
        """
        return tuple(map(Goal.parse, self.goals))


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """A checked plan with what it names."""

    plan: Plan
    workload: Workload
    recipe: Recipe
    space: Space
    folder: Path

    @classmethod
    def of(cls, plan: Plan, workload: Workload, folder: Path) -> Search:
        """Reads and checks a plan, all points that are known beforehand included.

        Raises:
            UsageError: a part of the plan is refused; nothing has been started or written.
        """
        assert plan.wanted  # and each of them well-formed
        recipe = type(workload.recipe()).from_dict(plan.recipe)
        space = build_space(recipe, plan.space)
        search = cls(plan=plan, workload=workload, recipe=recipe, space=space, folder=folder)
        if plan.search == "optuna":
            load_optuna()
            if plan.scheduler == "pbt":
                raise UsageError("--scheduler pbt changes points itself; take --search random")
        for index, point in enumerate(search.points()):
            try:
                recipe.override(*assignments(point))
            except UsageError as error:
                raise UsageError(f"trial {index} would be {dict(point)}, and {error}") from None
        return search

    def points(self) -> list[Point]:
        """Returns the points that are known beforehand: none where Optuna proposes them."""
        if self.plan.search == "optuna":
            return []
        if self.plan.search == "grid":
            return grid_points(self.space, self.plan.trials)
        return random_points(self.space, self.recipe.seed, self.plan.trials)

    @property
    def goals(self) -> tuple[Goal, ...]:
        """What is wanted."""
        return self.plan.wanted

    @property
    def metrics(self) -> tuple[str, ...]:
        """The goals' metrics."""
        return tuple(goal.metric for goal in self.goals)

    @property
    def run_folder(self) -> RunFolder:
        """The search's folder, which has a diary and a lock like a run's."""
        return RunFolder(self.folder)

    def trials(self) -> list[RunFolder]:
        """Returns the folders of the trials so far, in their order."""
        return trials_in(self.folder)


def trials_in(folder: Path) -> list[RunFolder]:
    """Returns the folders of a search's trials, in their order."""
    found = sorted(path for path in folder.glob("trial-*") if path.is_dir())
    return [RunFolder(path) for path in found if RunFolder(path).record.exists()]


def read_plan(folder: Path) -> Plan:
    """Reads the plan of a search.

    Raises:
        UsageError: ``search.json`` is missing, torn, or of another version.
    """
    record = read_object(folder / "search.json")
    try:
        return TypeAdapter(Plan).validate_python(record)
    except ValidationError as error:
        raise UsageError(
            f"expected the plan of a search in {folder / 'search.json'}, found "
            f"{sorted(record) or 'none'} with {error.error_count()} faults; "
            "start the search anew under another name"
        ) from None


def has_ended(trial: RunFolder) -> bool:
    """Whether a trial is not to be continued: it has finished, failed or was given up."""
    if trial.result.exists():
        return True
    turns = [event.get("event") for event in read_lines(trial.events.path)]
    turns = [turn for turn in turns if turn in _TURNS]
    return bool(turns) and turns[-1] in ("pruned", "failed")


def load_optuna() -> Any:  # noqa: ANN401 - the module, which may be absent
    """Imports Optuna.

    Raises:
        UsageError: it is not installed; says how.
    """
    try:
        import optuna
    except ModuleNotFoundError:
        raise UsageError(
            "--search optuna needs the package optuna, found none; "
            "install it with: pip install 'heliostat[search]', or take --search random"
        ) from None
    return optuna
