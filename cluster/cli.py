"""The ``heliostat`` command. Results go to standard output, everything else to standard error."""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml

from algorithms.catalog import CATALOG
from cluster.records import as_text, read_object
from heliostat.errors import HeliostatError, UsageError
from heliostat.folder import RunFolder
from heliostat.recipe import Recipe
from heliostat.workload import Workload, load, resolve

if TYPE_CHECKING:
    from heliostat.launch import Outcome

OK, FAILED, MISUSED = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        0 success, 1 the run failed or was stopped before its end, 2 the user's mistake.
    """
    options = parse(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    try:
        return options.command(options)
    except UsageError as error:
        _complain(error)
        return MISUSED
    except HeliostatError as error:
        _complain(error)
        return FAILED
    except KeyboardInterrupt:
        _complain("left at once; the newest checkpoint stands")
        return FAILED


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads a command line; changes to the recipe may stand before, between and after flags."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and ("overrides" not in options or any(text.startswith("-") for text in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides += rest
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="heliostat", description="Train with many Ray actors feeding one learner."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str, function: Callable[[argparse.Namespace], int], text: str
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(command=function)
        return added

    run = command("run", _run, "start a run")
    run.add_argument("workload", help="NAME[:RECIPE] or package.module:WORKLOAD[:RECIPE]")
    run.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the recipe")
    run.add_argument("--name", help="the run's name; made from workload and time where not given")
    run.add_argument(
        "--from", dest="origin", metavar="RUN[@STEP]", help="begin from a checkpoint of another run"
    )
    resume = command("resume", _resume, "continue a run from its newest checkpoint")
    resume.add_argument("name")
    for added in (run, resume):
        added.add_argument("--address", help="a Ray cluster; RAY_ADDRESS, else a local one")
        added.add_argument("--tensorboard", action="store_true", help="log to TensorBoard too")
        added.add_argument("--json", action="store_true", help="end with one JSON line")

    command("list", _list, "list workloads and their recipes")
    runs = command("runs", _runs, "list the runs of a folder")
    report = command("report", _report, "write a run's report.html and plots")
    report.add_argument("name")
    doctor = command("doctor", _doctor, "say what this machine lacks")
    doctor.add_argument("workload", nargs="?", help="check for this workload and recipe")
    doctor.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the recipe")
    for added in (run, resume, runs, report, doctor):
        added.add_argument("--runs", type=Path, default=Path("runs"), help="folder of run folders")
    return parser


def _run(options: argparse.Namespace) -> int:
    workload, recipe, recipe_name = _find(options.workload, options.overrides)
    moment = time.strftime("%Y%m%d-%H%M%S")
    name = options.name or f"{workload.name}-{recipe_name}-{moment}"
    if not re.fullmatch(r"\w[\w.-]{0,99}", name):
        raise UsageError(
            f"--name: expected up to 100 letters, digits, '_', '-' and '.', found {name!r}"
        )
    from heliostat.launch import Order, create

    order = Order(
        workload=workload,
        spec=_spec(options.workload),
        recipe=recipe,
        folder=RunFolder((options.runs / name).resolve()),
        begin_from=_origin(options) if options.origin else None,
        address=options.address,
        tensorboard=options.tensorboard,
        show_progress=True,
    )
    return _finish(create(order), workload, options)


def _origin(options: argparse.Namespace) -> tuple[RunFolder, int | None]:
    from cluster.registry import open_run

    name, at, step = options.origin.partition("@")
    if at and not step.isdecimal():
        raise UsageError(f"--from: expected RUN or RUN@STEP, found {options.origin!r}")
    return open_run(options.runs.resolve(), name), int(step) if at else None


def _resume(options: argparse.Namespace) -> int:
    from cluster.registry import open_run

    folder = open_run(options.runs.resolve(), options.name)
    spec, values = _started(folder)
    home = Path.cwd().joinpath(*spec.partition(":")[0].split("."))
    if spec not in CATALOG and options.runs.resolve() in home.resolve().parents:
        raise UsageError(f"run {folder.name!r} names code inside {options.runs}; move it elsewhere")
    workload, _ = load(spec, CATALOG)
    recipe = type(workload.recipe()).from_dict(values)
    from heliostat.launch import Order, resume

    order = Order(
        workload=workload,
        spec=spec,
        recipe=recipe,
        folder=folder,
        address=options.address,
        tensorboard=options.tensorboard,
        show_progress=True,
    )
    return _finish(resume(order), workload, options)


def _started(folder: RunFolder) -> tuple[str, dict[str, Any]]:
    """Returns how the user named the workload of a run, and the values of its recipe.

    Raises:
        UsageError: one of the two files is missing or torn.
    """
    spec = as_text(read_object(folder.record).get("workload"))
    try:
        values: object = yaml.safe_load(folder.recipe.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        values = None
    if not spec or not isinstance(values, dict):
        raise UsageError(
            f"expected the workload's name in {folder.record} and a recipe in {folder.recipe}, "
            "found one of them missing or torn; start the run anew under another name"
        )
    return spec, cast("dict[str, Any]", values)


def _finish(outcome: Outcome, workload: Workload, options: argparse.Namespace) -> int:
    if options.json:
        _say(
            json.dumps(
                {
                    "run": outcome.folder.name,
                    "folder": str(outcome.folder),
                    "metrics": dict(outcome.metrics),
                }
            )
        )
    elif not outcome.stopped:
        for name, value in outcome.metrics.items():
            _say(f"{name:<32}{value:>12.4f}")
        _say(
            f"{workload.name} finished; plots and samples: heliostat report "
            f"{outcome.folder.name} --runs {outcome.folder.parent}"
        )
    return FAILED if outcome.stopped else OK


def _list(_: argparse.Namespace) -> int:
    for name, path in CATALOG.items():
        workload = cast("Workload", resolve(path))
        _say(f"{name:<12}{workload.summary}")
        _say(f"{'':<12}recipes: {', '.join(workload.recipes)}; {workload.paper}")
    return OK


def _runs(options: argparse.Namespace) -> int:
    from cluster.registry import format_table, summaries

    _say(format_table(summaries(options.runs)))
    return OK


def _report(options: argparse.Namespace) -> int:
    from cluster.registry import open_run
    from cluster.report import write_report

    _say(str(write_report(open_run(options.runs.resolve(), options.name))))
    return OK


def _doctor(options: argparse.Namespace) -> int:
    from cluster.doctor import examine, format_findings

    workload = recipe = None
    if options.workload:
        workload, recipe, _ = _find(options.workload, options.overrides)
    findings = examine(workload, recipe, options.runs)
    _say(format_findings(findings))
    return FAILED if any(finding.level == "missing" for finding in findings) else OK


def _find(spec: str, overrides: Sequence[str]) -> tuple[Workload, Recipe, str]:
    """Returns the workload, its recipe with the overrides applied, and the recipe's name."""
    workload, name = load(spec, CATALOG)
    recipe = workload.recipe(name).override(*overrides)
    return workload, recipe, name or next(iter(workload.recipes))


def _spec(typed: str) -> str:
    """Drops the recipe's name from what the user typed."""
    head, _, rest = typed.partition(":")
    return head if head in CATALOG else f"{head}:{rest.partition(':')[0]}"


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _complain(error: object) -> None:
    sys.stderr.write(f"heliostat: {error}\n")


if __name__ == "__main__":
    sys.exit(main())
