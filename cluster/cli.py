"""The ``heliostat`` command. Results go to standard output, everything else to standard error."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from algorithms.catalog import CATALOG
from cluster import running, search_command
from heliostat.errors import HeliostatError, UsageError
from heliostat.workload import Workload, resolve

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

    run = command("run", running.run, "start a run in this process")
    submit = command("submit", running.submit, "send a run to a cluster")
    resume = command("resume", running.resume, "continue a run from its newest checkpoint")
    resume.add_argument("name")
    resume.add_argument("--supervised", action="store_true", help=argparse.SUPPRESS)
    _add_start_options(run, submit, resume)
    search = command("search", search_command.search, "run many trials and find the best recipe")
    search_command.add_arguments(search)

    command("list", _list, "list workloads and their recipes")
    runs = command("runs", _runs, "list the runs of a folder")
    status = command("status", _status, "say how a run and its job are doing")
    logs = command("logs", _logs, "show what a submitted run wrote")
    logs.add_argument("-f", "--follow", action="store_true", help="until it ends")
    stop = command("stop", _stop, "let a run save and end it")
    stop.add_argument("--deadline", type=float, default=60.0, help="seconds it may take to save")
    report = command("report", _report, "write a run's report.html and plots")
    export = command("export", _export, "write a run's model for others to read")
    export.add_argument("--to", type=Path, required=True, help="a new or empty folder")
    export.add_argument("--step", type=int, help="of this checkpoint; by default of the newest")
    for added in (status, logs, stop, report, export):
        added.add_argument("name")
    status.add_argument("--json", action="store_true", help="one JSON object")
    remove = command("rm", _remove, "delete runs that have ended")
    compare = command("compare", _compare, "show what tells runs apart")
    for added in (remove, compare):
        added.add_argument("names", nargs="+", metavar="NAME")
    sync = command("wandb-sync", _wandb_sync, "upload to W&B what runs logged offline")
    sync.add_argument("names", nargs="*", metavar="NAME", help="runs; all there are by default")
    doctor = command("doctor", _doctor, "say what this machine lacks")
    doctor.add_argument("workload", nargs="?", help="check for this workload and recipe")
    doctor.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the recipe")
    about_runs = (run, submit, resume, runs, status, logs, stop, report, remove, compare)
    for added in (*about_runs, sync, export, search, doctor):
        added.add_argument("--runs", default="runs", help="folder or URL of run folders")
    return parser


def _add_start_options(
    run: argparse.ArgumentParser, submit: argparse.ArgumentParser, resume: argparse.ArgumentParser
) -> None:
    for added in (run, submit):
        added.add_argument("workload", help="NAME[:RECIPE] or package.module:WORKLOAD[:RECIPE]")
        added.add_argument(
            "overrides", nargs="*", metavar="key=value", help="change the recipe; or @FILE.yaml"
        )
        added.add_argument("--name", help="the run's name; made of workload and time if not given")
        added.add_argument(
            "--from", dest="origin", metavar="RUN[@STEP]", help="begin from another's checkpoint"
        )
    for added in (run, submit, resume):
        added.add_argument("--address", help="a Ray cluster; the environment's, else a local one")
        added.add_argument(
            "--tensorboard",
            dest="flags",
            action="append_const",
            const="tracker.tensorboard=true",
            default=[],
            help="log to TensorBoard too",
        )
        added.add_argument("--json", action="store_true", help="end with one JSON line")
    for added in (submit, resume):
        added.add_argument("--follow", action="store_true", help="show the log until it ends")
        added.add_argument(
            "--ship", type=Path, action="append", default=[], help="a further file or folder"
        )
        added.add_argument("--ship-secrets", action="store_true", help="ship .env files and keys")


def _list(_: argparse.Namespace) -> int:
    for name, path in CATALOG.items():
        workload = cast("Workload", resolve(path))
        running.say(f"{name:<12}{workload.summary}")
        running.say(f"{'':<12}recipes: {', '.join(workload.recipes)}; {workload.paper}")
    return OK


def _runs(options: argparse.Namespace) -> int:
    from cluster.places import read_runs
    from cluster.registry import format_table, summaries

    running.say(format_table(summaries(read_runs(options.runs))))
    return OK


def _status(options: argparse.Namespace) -> int:
    from cluster.control import status

    found = status(options.runs, options.name)
    if options.json:
        running.say(json.dumps(found))
    else:
        for name, value in found.items():
            running.say(f"{name:<16}{'-' if value is None else value}")
    return OK


def _logs(options: argparse.Namespace) -> int:
    from cluster.control import logs

    for text in logs(options.runs, options.name, follow=options.follow):
        sys.stdout.write(text)
        sys.stdout.flush()
    return OK


def _stop(options: argparse.Namespace) -> int:
    from cluster.control import stop

    running.say(stop(options.runs, options.name, options.deadline))
    return OK


def _remove(options: argparse.Namespace) -> int:
    from cluster.control import remove

    for name in options.names:
        remove(options.runs, name)
    return OK


def _compare(options: argparse.Namespace) -> int:
    from cluster.control import compare

    running.say(compare(options.runs, options.names))
    return OK


def _report(options: argparse.Namespace) -> int:
    from cluster.places import open_run, publish
    from cluster.registry import is_search
    from cluster.report import write_report
    from cluster.search_report import write_search_report

    folder = open_run(options.runs, options.name)
    page = write_search_report(folder) if is_search(folder) else write_report(folder)
    publish(folder, "report.html", "plots")
    running.say(str(page))
    return OK


def _export(options: argparse.Namespace) -> int:
    from cluster.export import export

    step = export(options.runs, options.name, options.step, options.to)
    running.say(f"{options.to}: the model of {options.name} after step {step}")
    return OK


def _wandb_sync(options: argparse.Namespace) -> int:
    from cluster.places import open_run, publish, read_runs
    from cluster.registry import summaries, summarise
    from cluster.wandb_sync import sync

    known = [summary.name for summary in summaries(read_runs(options.runs))]
    for name in options.names or known:
        folder = open_run(options.runs, name, heavy=True)
        if summarise(folder).status == "running":
            running.say(f"{name}: is running; sync it when it has ended")
            continue
        done = sync(folder)
        publish(folder, *done.markers)
        running.say(f"{name}: {len(done.markers)} uploaded, {done.before} uploaded before")
    return OK


def _doctor(options: argparse.Namespace) -> int:
    from cluster.doctor import examine, format_findings

    workload = recipe = None
    if options.workload:
        workload, recipe, _ = running.find(options.workload, options.overrides)
    findings = examine(workload, recipe, Path(options.runs))
    running.say(format_findings(findings))
    return FAILED if any(finding.level == "missing" for finding in findings) else OK


def _complain(error: object) -> None:
    sys.stderr.write(f"heliostat: {error}\n")


if __name__ == "__main__":
    sys.exit(main())
