"""The contract of workloads: they launch, stop and resume, shown by running them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from heliostat import launch
from heliostat.errors import UsageError
from heliostat.folder import RunFolder
from heliostat.launch import Order, Outcome
from heliostat.layout import Layout
from heliostat.recipe import Recipe
from heliostat.testing.difference import difference
from heliostat.testing.law import ContractBroken, demand
from heliostat.tracker import read_metrics
from heliostat.workload import Workload, resolve


def check_workload(workload: Workload, recipe: Recipe, folder: Path) -> None:
    """Checks a workload by running it in this process: undisturbed, and stopped twice on its way.

    Args:
        workload: what a catalogue would name.
        recipe: small, of at least three steps; its layout is not used.
        folder: where the runs are written; a new one.

    Raises:
        ContractBroken: a law is broken.
        ValueError: the recipe is too short.
    """
    if recipe.total_steps < 3:
        raise ValueError(f"expected at least 3 steps to stop between, found {recipe.total_steps}")
    _check_paths(workload)
    _check_recipes(workload, recipe)
    recipe = replace(recipe, layout=Layout.in_process())

    def order(name: str) -> Order:
        place = RunFolder(folder / name)
        return Order(workload=workload, spec=workload.name, recipe=recipe, folder=place)

    straight = _launched(launch.create, order("straight"))
    _check_rows(workload, recipe, straight)
    disturbed = _disturbed(order("disturbed"))
    found = difference(_told(straight), _told(disturbed), "(rows, final metrics)")
    if found is None:
        return
    again = _launched(launch.create, order("again"))
    demand(
        difference(_told(straight), _told(again), "(rows, final metrics) of two equal runs"),
        "equal recipes give equal numbers",
        "something is drawn without a seed, or depends on time or on the order of a set",
    )
    demand(
        f"undisturbed and resumed differ in {found}",
        "a stopped run resumes to the numbers of an undisturbed one",
        "the state lacks something that goes on: the optimiser, a stream's position, a generator, "
        "a moving average, answers under way, the place between two phases",
    )


def _check_paths(workload: Workload) -> None:
    for path in (workload.train, *workload.roles.values()):
        try:
            found = resolve(path)
            broken = None if callable(found) else f"{path} is {found!r:.80}"
        except (UsageError, ImportError) as error:
            broken = f"{path}: {error}"
        demand(
            broken,
            "import paths lead to functions and classes",
            "a name was mistyped, or a library is missing",
        )
    for name, path in workload.roles.items():
        try:
            Layout().hosts_of(getattr(resolve(path), "family", "none"))
            broken = None
        except UsageError as error:
            broken = f"{name}, {path}: {error}"
        demand(broken, "every role has a family", "it is not set on the class")


def _check_recipes(workload: Workload, recipe: Recipe) -> None:
    default = type(workload.recipe())
    for name, given in {**workload.recipes, "the given recipe": recipe}.items():
        demand(
            None if type(given) is default else f"{name} is a {type(given).__name__}",
            f"every recipe of the workload is a {default.__name__}, as the default is",
            "classes were mixed; resume reads every recipe by the default's class",
        )
        try:
            read = default.from_dict(yaml.safe_load(given.to_yaml()))
            broken = None if read == given else difference(given, read, name)
        except (UsageError, yaml.YAMLError) as error:
            broken = f"{name}: {error}"
        demand(
            broken,
            "a recipe survives being written and read",
            "a default is out of its range, YAML has no type for it, or __post_init__ changes it",
        )
    keys = {key for space in workload.spaces.values() for key in space}
    odd = sorted(key for key in keys if not default.knows(key))
    demand(
        f"spaces name {odd}" if odd else None,
        "search spaces range over keys of the recipe",
        "a field of the recipe was renamed",
    )


def _launched(start: Callable[[Order], Outcome], order: Order) -> Outcome:
    try:
        return start(order)
    except Exception as error:
        raise ContractBroken(
            f"law: a short run in one process ends well\nfound: {type(error).__name__}: {error}\n"
            f"likely cause: see the traceback above, and {order.folder.path}"
        ) from error


@dataclass(frozen=True, slots=True)
class _Stopping(RunFolder):
    """A run's folder in which a stop is asked for once a step has been logged."""

    after: int = 0

    @property
    def stop(self) -> Path:
        """Exists from then on."""
        path = self.path / "stop"
        if any(row["step"] >= self.after for row in read_metrics(self.path)):
            path.touch()
        return path


def _disturbed(order: Order) -> Outcome:
    """Stops the run after a third and after two thirds of its steps, and lets it finish."""
    start = launch.create
    for part in (1, 2):
        after = part * order.recipe.total_steps // 3
        folder = _Stopping(order.folder.path, after=after)
        outcome = _launched(start, replace(order, folder=folder))
        demand(
            None if outcome.stopped else f"it finished, though asked to stop after step {after}",
            "a run that is asked to stop leaves at its next report",
            "train catches Stopped; let it pass",
        )
        start = launch.resume
    return _launched(start, order)


def _check_rows(workload: Workload, recipe: Recipe, outcome: Outcome) -> None:
    rows = read_metrics(outcome.folder)
    reported = [int(row["step"]) for row in rows if "perf/step_s" in row]
    demand(
        difference(list(range(1, recipe.total_steps + 1)), reported, "steps"),
        "a run reports once after each step, from 1 to recipe.total_steps",
        "a phase is missing in total_steps, or counts its steps from 0",
    )
    logged = {name for row in rows for name in row}
    named = {metric for plot in workload.plots for metric in plot.metrics}
    named |= {workload.score} if workload.score else set()
    levels = {plot.level for plot in workload.plots if plot.level}
    odd = sorted((named - logged) | (levels - outcome.metrics.keys()))
    demand(
        f"nothing is called {odd}; logged were {sorted(logged)}" if odd else None,
        "score and plots name metrics that the run logs, and levels name final ones",
        "a metric was renamed, or this recipe ends before it is logged: give another",
    )


def _told(outcome: Outcome) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Returns what a run says, times apart: its rows by step, and its final metrics."""
    rows = [
        {name: value for name, value in row.items() if name != "time" and name[:5] != "perf/"}
        for row in read_metrics(outcome.folder)
    ]
    rows.sort(key=lambda row: (row["step"], sorted(row)))
    return rows, dict(outcome.metrics)
