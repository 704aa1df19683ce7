"""``heliostat search``: reads its command line, runs the search, and says what came of it."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from algorithms.catalog import CATALOG
from cluster.registry import find_run, is_search
from cluster.running import FAILED, OK, check_name, refuse_code_in, say, spec_of
from heliostat.errors import UsageError
from heliostat.mirror import is_url
from heliostat.workload import Workload, load

if TYPE_CHECKING:
    from cluster.search_plan import Plan, Search


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describes the command line; heavy libraries are not loaded for it."""
    parser.add_argument(
        "workload", nargs="?", help="NAME[:RECIPE] or package.module:WORKLOAD[:RECIPE]"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="a fixed value, or a distribution such as lr=loguniform(1e-5,1e-3)",
    )
    parser.add_argument("--space", help="a space that the workload publishes, or FILE.yaml")
    parser.add_argument(
        "--scheduler", choices=("asha", "pbt", "median", "none"), help="who stops trials early"
    )
    parser.add_argument(
        "--search", choices=("random", "grid", "optuna"), help="who proposes points"
    )
    parser.add_argument("--trials", type=int, help="how many trials (8)")
    parser.add_argument("--concurrent", type=int, help="trials at a time; as many as fit")
    parser.add_argument(
        "--metric",
        action="append",
        metavar="NAME[:min|max]",
        help="what is wanted, several times for a Pareto front; the workload's score",
    )
    parser.add_argument("--name", help="the search's name; made from workload and time")
    parser.add_argument("--resume", metavar="NAME", help="go on with a search of one's own")
    parser.add_argument("--address", help="a Ray cluster; RAY_ADDRESS, else a local one")
    parser.add_argument("--json", action="store_true", help="end with one JSON line")


def search(options: argparse.Namespace) -> int:
    """Runs a search, or goes on with one.

    Returns:
        0 where it came to its end with a finished trial, 1 otherwise.

    Raises:
        UsageError: something that was asked for is refused.
    """
    from cluster import search as searching
    from cluster.search_plan import Search, read_plan

    if is_url(options.runs):
        raise UsageError(
            f"--runs: a search keeps its trials in a folder that all nodes see, found "
            f"{options.runs}; give a path"
        )
    runs = Path(options.runs).resolve()
    if options.resume:
        folder = _known(options, runs)
        plan = read_plan(folder)
        refuse_code_in(runs, plan.workload)
        workload, _ = load(plan.workload, CATALOG)
        found = Search.of(plan, workload, folder)
        done = searching.resume(found, options.address)
    else:
        plan, workload = _plan(options)
        name = options.name or f"{workload.name}-search-{time.strftime('%Y%m%d-%H%M%S')}"
        found = Search.of(plan, workload, runs / check_name(name))
        done = searching.begin(found, options.address)
    return _tell(found, done, options.json)


def _known(options: argparse.Namespace, runs: Path) -> Path:
    settled = ("workload", "space", "scheduler", "search", "trials", "concurrent", "metric", "name")
    given = [name for name in settled if getattr(options, name)] + list(options.overrides)
    if given:
        raise UsageError(f"--resume goes on as the search was begun; leave out {given[0]}")
    folder = find_run(runs, options.resume)
    if not is_search(folder):
        raise UsageError(
            f"{folder.name!r} is a run, not a search; continue it with: heliostat resume "
            f"{folder.name} --runs {runs}"
        )
    return folder.path


def _plan(options: argparse.Namespace) -> tuple[Plan, Workload]:
    from cluster.search_plan import Plan
    from cluster.spaces import is_distribution, read_space

    if not options.workload:
        raise UsageError("expected a workload to search over, or --resume NAME; found neither")
    for flag in ("trials", "concurrent"):
        if getattr(options, flag) is not None and getattr(options, flag) < 1:
            raise UsageError(f"--{flag}: expected at least 1, found {getattr(options, flag)}")
    workload, recipe_name = load(options.workload, CATALOG)
    parted = [assignment.partition("=") for assignment in options.overrides]
    drawn = {key: text for key, _, text in parted if is_distribution(text)}
    fixed = ["".join(parts) for parts in parted if not is_distribution(parts[2])]
    recipe = workload.recipe(recipe_name).override(*fixed)
    space = read_space(workload, options.space)
    keys = {assignment.partition("=")[0] for assignment in fixed}
    if options.space is None and drawn:
        space = {}  # the command line gives a space of its own
    space = {key: text for key, text in (space | drawn).items() if key not in keys}
    goals: Sequence[str] = options.metric or ([workload.score] if workload.score else [])
    if not goals:
        raise UsageError(f"workload {workload.name!r} names no score; give --metric NAME")
    plan = Plan(
        workload=spec_of(options.workload),
        recipe_name=recipe_name or next(iter(workload.recipes)),
        recipe=recipe.to_dict(),
        space=space,
        goals=tuple(goals),
        scheduler=options.scheduler or "none",
        search=options.search or "random",
        trials=options.trials or 8,
        concurrent=options.concurrent,
    )
    return plan, workload


def _tell(search: Search, done: bool, as_json: bool) -> int:
    from cluster.search_results import format_results, read_results, write_best

    results = read_results(search.folder, search.plan)
    best = write_best(search, results)
    folder = search.folder
    if as_json:
        trials = [
            {"trial": result.name, "status": result.status, "scores": dict(result.scores)}
            for result in results
        ]
        found = json.loads((folder / "best.json").read_text()) if best else None
        record = {"search": folder.name, "folder": str(folder), "best": found, "trials": trials}
        say(json.dumps(record))
    else:
        say(format_results(search.plan, results))
        if best is not None:
            say(f"the best recipe: heliostat run {search.plan.workload} @{best}")
        say(f"plots: heliostat report {folder.name} --runs {folder.parent}")
    return OK if done and best is not None else FAILED
