"""The report of a search: one HTML file that needs nothing else, and its pictures beside it.

As with a run's report, the folder may come from elsewhere: no module that it names is imported,
and whatever its files say is text here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from cluster.pages import Draw, load_template, make_picture, save_pictures, write_file
from cluster.records import as_count, as_number, as_text, read_lines
from cluster.registry import summarise
from cluster.search_plan import Goal, Plan, read_plan
from cluster.search_plots import (
    Course,
    plot_courses,
    plot_front,
    plot_importance,
    plot_parallel,
)
from cluster.search_results import (
    TrialResult,
    best_of,
    importance,
    pareto_front,
    read_results,
    rows_of,
)
from heliostat.folder import RunFolder


def write_search_report(folder: RunFolder) -> Path:
    """Writes ``report.html`` and ``plots/*.png`` into the search's folder, whatever its status.

    Returns:
        The path of the page.

    Raises:
        UsageError: the folder holds no plan of a search.
    """
    plan = read_plan(folder.path)
    results = read_results(folder.path, plan)
    drawings = _drawings(folder.path, plan, results)
    pictures = [make_picture(title, draw) for title, draw in drawings]
    save_pictures(folder.path / "plots", pictures)
    head, *rows = rows_of(plan, results)
    best = folder.path / "best.yaml"
    readable = best.is_file() and not best.is_symlink()
    page = load_template("search_report.html.j2").render(
        name=folder.name,
        workload=plan.workload,
        status=summarise(folder).status,
        trials=len(results),
        plan=plan,
        head=head,
        rows=rows,
        star="the best trial" if len(plan.goals) == 1 else "the Pareto front",
        failures=[f"{result.name} failed: {result.error}" for result in results if result.error],
        pictures=pictures,
        best=best.read_text(errors="replace") if readable else "",
        clones=list(_clones(folder.path, results)),
    )
    path = folder.path / "report.html"
    write_file(path, page.encode("utf-8", errors="replace"))
    return path


def _drawings(
    folder: Path, plan: Plan, results: Sequence[TrialResult]
) -> Iterator[tuple[str, Draw]]:
    goals = plan.wanted
    goal = goals[0]
    courses = list(_courses(folder, goal, results))
    if any(course.series[0] for course in courses):
        yield "Trials", lambda dark: plot_courses(courses, goal.metric, dark)
    scored = [result for result in results if _finite(result, goal)]
    if scored:
        points = [result.point for result in scored]
        scores = [result.scores[goal.metric] for result in scored]
        yield (
            "Parallel coordinates",
            lambda dark: plot_parallel(points, scores, goal.metric, goal.mode == "max", dark),
        )
    if shares := importance(results, goal):
        yield "Importance", lambda dark: plot_importance(shares, goal.metric, dark)
    if len(goals) > 1:
        both = [result for result in scored if _finite(result, goals[1])]
        names = {result.name for result in pareto_front(results, goals)}
        pairs = [(r.scores[goal.metric], r.scores[goals[1].metric]) for r in both]
        front = [result.name in names for result in both]
        metrics = goal.metric, goals[1].metric
        yield "Pareto front", lambda dark: plot_front(pairs, front, metrics, dark)


def _courses(folder: Path, goal: Goal, results: Sequence[TrialResult]) -> Iterator[Course]:
    best = best_of(results, goal)
    for result in results:
        points = [
            (as_count(row.get("step")), as_number(row.get(goal.metric)))
            for row in read_lines(RunFolder(folder / result.name).metrics)
        ]
        placed = [(float(x), y) for x, y in points if x is not None and y is not None]
        yield Course(
            name=result.name,
            series=([x for x, _ in placed], [y for _, y in placed]),
            stopped=result.status in ("pruned", "failed"),
            best=best is not None and result.name == best.name,
        )


def _finite(result: TrialResult, goal: Goal) -> bool:
    return math.isfinite(result.scores.get(goal.metric, math.nan))


def _clones(folder: Path, results: Sequence[TrialResult]) -> Iterator[tuple[str, str, str, str]]:
    for result in results:
        for event in read_lines(RunFolder(folder / result.name).events.path):
            if event.get("event") == "cloned":
                source, changed = as_text(event.get("from")), as_text(event.get("changed"))
                yield result.name, source or "?", str(event.get("step")), changed or ""
