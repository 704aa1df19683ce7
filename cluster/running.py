"""The commands that start a run, here or on a cluster: run, submit, resume."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml

from algorithms.catalog import CATALOG
from cluster.places import NAME, open_run, run_folder
from cluster.records import as_text, read_object, read_recipe
from cluster.registry import is_search
from heliostat.errors import UsageError
from heliostat.folder import RunFolder
from heliostat.mirror import is_url
from heliostat.recipe import Recipe
from heliostat.workload import Workload, load

if TYPE_CHECKING:
    from cluster.submit import Shipment, Submission
    from heliostat.launch import Order, Outcome

OK, FAILED = 0, 1


def run(options: Namespace) -> int:
    """Runs in this process."""
    from heliostat.launch import create

    return _finish(create(_new_order(options)), options)


def submit(options: Namespace) -> int:
    """Sends a run to a cluster, or to a Ray of its own on this machine."""
    import cluster.submit

    order = _new_order(options)
    return _submitted(cluster.submit.submit(order, _shipment(options)), options)


def resume(options: Namespace) -> int:
    """Continues a run where it was: in this process, or on its cluster."""
    from heliostat.launch import resume

    if options.supervised:
        _leave_with_supervisor()
    order = _old_order(options)
    if open_run(options.runs, options.name).job.exists() and not options.supervised:
        import cluster.submit

        return _submitted(cluster.submit.resubmit(order, _shipment(options)), options)
    return _finish(resume(order), options)


def find(spec: str, overrides: Sequence[str]) -> tuple[Workload, Recipe, str]:
    """Returns the workload, its recipe with the overrides applied, and the recipe's name.

    ``@FILE.yaml`` takes the recipe of a file, such as a search's best.yaml, in place of the named.
    """
    workload, name = load(spec, CATALOG)
    recipe = workload.recipe(name)
    for path in (text[1:] for text in overrides if text.startswith("@")):
        recipe = _read_recipe(type(recipe), Path(path))
    changes = [text for text in overrides if not text.startswith("@")]
    return workload, recipe.override(*changes).located(), name or next(iter(workload.recipes))


def _read_recipe(kind: type[Recipe], path: Path) -> Recipe:
    try:
        values: object = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"@{path}: cannot read the recipe: {error}") from None
    if not isinstance(values, dict):
        raise UsageError(f"@{path}: expected key: value lines of a recipe, found {values!r}")
    return kind.from_dict(cast("dict[str, Any]", values))


def check_name(name: str) -> str:
    """Returns a name that a user gave to a run or a search.

    Raises:
        UsageError: it cannot be a folder's name everywhere.
    """
    if not NAME.fullmatch(name):
        raise UsageError(
            f"--name: expected up to 100 letters, digits, '_', '-' and '.', found {name!r}"
        )
    return name


def say(text: str) -> None:
    """Writes a line of results."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _new_order(options: Namespace) -> Order:
    from heliostat.launch import Order

    changes = [*options.overrides, *options.flags]
    workload, recipe, recipe_name = find(options.workload, changes)
    moment = time.strftime("%Y%m%d-%H%M%S")
    name = check_name(options.name or f"{workload.name}-{recipe_name}-{moment}")
    return Order(
        workload=workload,
        spec=spec_of(options.workload),
        recipe=recipe,
        folder=run_folder(options.runs, name),
        begin_from=_origin(options) if options.origin else None,
        address=options.address,
        show_progress=True,
    )


def _old_order(options: Namespace) -> Order:
    from heliostat.launch import Order

    seen = open_run(options.runs, options.name)
    if is_search(seen):
        raise UsageError(
            f"{seen.name!r} is a search; go on with: heliostat search --resume {seen.name} "
            f"--runs {options.runs}"
        )
    workload, spec, recipe = started(seen)
    return Order(
        workload=workload,
        spec=spec,
        recipe=recipe.override(*options.flags),
        folder=run_folder(options.runs, options.name),
        address=options.address,
        supervised=options.supervised,
        show_progress=True,
    )


def refuse_code_in(runs: Path, spec: str) -> None:
    """Refuses a workload whose code lies among the runs, as a folder from elsewhere could name it.

    Raises:
        UsageError: names the folder.
    """
    home = Path.cwd().joinpath(*spec.partition(":")[0].split("."))
    if spec not in CATALOG and runs.resolve() in home.resolve().parents:
        raise UsageError(f"{spec} is code inside {runs}; move it elsewhere")


def _origin(options: Namespace) -> tuple[RunFolder, int | None]:
    name, at, step = options.origin.partition("@")
    if at and not step.isdecimal():
        raise UsageError(f"--from: expected RUN or RUN@STEP, found {options.origin!r}")
    return open_run(options.runs, name, heavy=True), int(step) if at else None


def started(folder: RunFolder) -> tuple[Workload, str, Recipe]:
    """Returns the workload of a run, how the user named it, and the run's recipe.

    Raises:
        UsageError: one of the two files is missing or torn, or the code lies among the runs.
    """
    spec = as_text(read_object(folder.record).get("workload"))
    values = read_recipe(folder)
    if not spec or not values:
        raise UsageError(
            f"expected the workload's name in {folder.record} and a recipe in {folder.recipe}, "
            "found one of them missing or torn; start the run anew under another name"
        )
    refuse_code_in(folder.path.parent, spec)
    workload, _ = load(spec, CATALOG)
    return workload, spec, type(workload.recipe()).from_dict(values)


def _finish(outcome: Outcome, options: Namespace) -> int:
    folder = run_folder(options.runs, outcome.folder.name)
    if options.json:
        say(_json(folder, outcome.metrics))
    elif not outcome.stopped:
        for name, value in outcome.metrics.items():
            say(f"{name:<32}{value:>12.4f}")
        say(f"finished; plots and samples: heliostat report {folder.name} --runs {folder.home}")
    return FAILED if outcome.stopped else OK


def _shipment(options: Namespace) -> Shipment:
    from cluster.submit import Shipment

    place = options.runs if is_url(options.runs) else str(Path(options.runs).resolve())
    return Shipment(place=place, extra=options.ship, secrets=options.ship_secrets, say=_tell)


def _submitted(submission: Submission, options: Namespace) -> int:
    name, runs = submission.folder.name, options.runs
    _tell(f"{name} is at {submission.cluster.address}")
    _tell(f"look: heliostat logs -f {name} --runs {runs}; end: heliostat stop {name} --runs {runs}")
    if not options.follow:
        if options.json:
            say(_json(submission.folder, {}))
        return OK
    return follow(options.runs, name, as_json=options.json)


def follow(runs: str, name: str, *, as_json: bool = False) -> int:
    """Shows a submitted run's log until it ends; leaving it with Ctrl-C leaves the run alone."""
    from cluster.control import logs, status

    for text in logs(runs, name, follow=True):
        sys.stderr.write(text)
        sys.stderr.flush()
    found, folder = status(runs, name), open_run(runs, name)
    metrics = read_object(folder.result)
    if found["job_message"]:
        _tell(found["job_message"])
    if as_json:
        say(_json(folder, metrics))
    else:
        say(f"{name}: {found['status']}")
    return OK if found["status"] == "finished" else FAILED


def _json(folder: RunFolder, metrics: object) -> str:
    return json.dumps(
        {"run": folder.name, "folder": folder.url or str(folder.path), "metrics": metrics}
    )


def _tell(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _leave_with_supervisor() -> None:
    """Asks this process to save and leave when the supervisor, which holds its input, is gone."""
    import os
    import signal
    import threading

    def wait() -> None:
        while os.read(0, 1):  # the buffered stream would be locked when Python ends
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def spec_of(typed: str) -> str:
    """Drops the recipe's name from what the user typed."""
    head, _, rest = typed.partition(":")
    return head if head in CATALOG else f"{head}:{rest.partition(':')[0]}"
