"""What came of a search, read from its run folders: ranking, front, importance, best recipe.

The folders may come from elsewhere: no module that they name is imported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cluster.records import as_number, as_text, read_lines, read_object, read_recipe
from cluster.registry import Status, align, summarise
from cluster.search_plan import Goal, Plan, Search, trials_in
from cluster.spaces import Point, Value, assignments, point_of
from heliostat.folder import RunFolder, replace_text

_REASON_CHARACTERS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialResult:
    """One trial at a glance."""

    name: str
    status: Status
    step: int
    point: Point
    """Its values of the keys of the space; of a clone, the newest."""
    scores: Mapping[str, float]
    """The newest value of each metric of the search that it has."""
    cloned: int
    """How often it went on from another trial's checkpoint."""
    error: str
    """Why it failed; empty where it did not."""


def read_results(folder: Path, plan: Plan) -> list[TrialResult]:
    """Returns all trials of a search so far, in their order."""
    return [_read(plan, trial) for trial in trials_in(folder)]


def _read(plan: Plan, trial: RunFolder) -> TrialResult:
    summary = summarise(trial)
    events = list(read_lines(trial.events.path))
    reasons = [as_text(event.get("reason")) for event in events if event.get("event") == "failed"]
    failed = summary.status == "failed"
    return TrialResult(
        name=trial.name,
        status=summary.status,
        step=summary.step,
        point=point_of(read_recipe(trial), list(plan.space)),
        scores=values(trial, tuple(goal.metric for goal in plan.wanted)),
        cloned=sum(event.get("event") == "cloned" for event in events),
        error=((reasons[-1] or "") if failed and reasons else "")[:_REASON_CHARACTERS],
    )


def values(folder: RunFolder, metrics: Sequence[str]) -> dict[str, float]:
    """Returns the newest value of each metric that a run has: a final one, or one it logged."""
    final = read_object(folder.result)
    rows = list(read_lines(folder.metrics))
    found: dict[str, float] = {}
    for name in metrics:
        logged = (as_number(row[name]) for row in reversed(rows) if name in row)
        number = as_number(final.get(name))
        number = next(logged, None) if number is None else number
        if number is not None:
            found[name] = number
    return found


def best_of(results: Sequence[TrialResult], goal: Goal) -> TrialResult | None:
    """Returns the finished trial that did best by one goal; None where none has finished."""
    done = [result for result in results if result.status == "finished"]
    done = [result for result in done if math.isfinite(result.scores.get(goal.metric, math.nan))]
    return max(done, key=lambda result: goal.gain(result.scores[goal.metric]), default=None)


def pareto_front(results: Sequence[TrialResult], goals: Sequence[Goal]) -> list[TrialResult]:
    """Returns the finished trials that none other beats or equals in all goals and beats in one."""
    gains: dict[str, list[float]] = {}
    for result in results:
        found = [result.scores.get(goal.metric, math.nan) for goal in goals]
        if result.status == "finished" and all(map(math.isfinite, found)):
            gains[result.name] = [
                goal.gain(score) for goal, score in zip(goals, found, strict=True)
            ]

    def beaten(mine: list[float], other: list[float]) -> bool:
        pairs = list(zip(mine, other, strict=True))
        return all(b >= a for a, b in pairs) and any(b > a for a, b in pairs)

    front = {
        name
        for name, mine in gains.items()
        if not any(beaten(mine, other) for other in gains.values())
    }
    return [result for result in results if result.name in front]


def importance(results: Sequence[TrialResult], goal: Goal) -> dict[str, float]:
    """Returns how closely each key goes with the goal over the finished trials, in [0, 1].

    For numbers it is the size of Spearman's rank correlation; for other choices the correlation
    ratio of the goal's ranks: the root of the share of their variance between the choices. Keys
    whose value never differs, and searches with fewer than three finished trials, have none.
    """
    done = [
        result for result in results if result.status == "finished" and goal.metric in result.scores
    ]
    if len(done) < 3:
        return {}
    from scipy import stats

    ranks = stats.rankdata([goal.gain(result.scores[goal.metric]) for result in done])
    found: dict[str, float] = {}
    for key in done[0].point:
        column = [result.point[key] for result in done]
        if len({json.dumps(value) for value in column}) > 1 and np.ptp(ranks) > 0:
            found[key] = _closeness(column, ranks)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _closeness(column: Sequence[Value], ranks: np.ndarray) -> float:
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in column):
        from scipy import stats

        numbers = stats.rankdata(np.array(column, np.float64))
        return float(abs(np.corrcoef(numbers, ranks)[0, 1]))
    names = np.array([json.dumps(value) for value in column])
    between = sum(
        (names == name).sum() * (ranks[names == name].mean() - ranks.mean()) ** 2
        for name in np.unique(names)
    )
    return float(np.sqrt(between / ((ranks - ranks.mean()) ** 2).sum()))


def write_best(search: Search, results: Sequence[TrialResult]) -> Path | None:
    """Writes the best trial's recipe as ``best.yaml``, with the layout that the search was given.

    Returns:
        Its path; None where no trial has finished.
    """
    goal = search.goals[0]
    best = best_of(results, goal)
    if best is None:
        return None
    path = search.folder / "best.yaml"
    recipe = search.recipe.override(*assignments(best.point))
    head = (
        f"# {best.name} of search {search.folder.name}: {goal.metric} {best.scores[goal.metric]}\n"
    )
    replace_text(path, head + recipe.to_yaml())
    record = {"trial": best.name, "score": best.scores[goal.metric]}
    replace_text(search.folder / "best.json", json.dumps(record))
    return path


def rows_of(plan: Plan, results: Sequence[TrialResult]) -> list[tuple[str, ...]]:
    """Returns the table of trials, the best by the first goal first; its head is the first row.

    A star marks the best trial, or where there are several goals the Pareto front.
    """
    goals = plan.wanted
    starred = [best_of(results, goals[0])] if len(goals) == 1 else pareto_front(results, goals)
    names = {result.name for result in starred if result is not None}

    def order(result: TrialResult) -> tuple[bool, float]:
        gain = goals[0].gain(result.scores.get(goals[0].metric, math.nan))
        return result.status != "finished", -gain

    rows = [("", "TRIAL", "STATUS", "STEP", *(goal.metric for goal in goals), *plan.space)]
    rows += [
        (
            "*" if result.name in names else "",
            result.name,
            result.status + (f", {result.cloned}x cloned" if result.cloned else ""),
            str(result.step),
            *(_figure(result.scores.get(metric)) for metric in (goal.metric for goal in goals)),
            *(_figure(result.point[key]) for key in plan.space),
        )
        for result in sorted(results, key=order)
    ]
    return rows


def format_results(plan: Plan, results: Sequence[TrialResult]) -> str:
    """Returns the table of trials as text, and under it why trials failed."""
    rows = rows_of(plan, results)
    lines = [align(rows, range(3, len(rows[0])))]
    lines += [f"{result.name} failed: {result.error}" for result in results if result.error]
    return "\n".join(lines)


def _figure(value: Value | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
