"""A search: many trials of one recipe, hosted by Ray Tune, each an ordinary run of its own.

A search is a function of its folder. ``search.json`` says what is wanted; every trial's folder is
made before Tune hears of the trial. Going on after an interruption therefore reads these folders
alone: Tune's own snapshots (some seconds old, pickled, without the scheduler's state) are not used.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, cast

import yaml
from ray import tune
from ray.tune import CheckpointConfig, TuneConfig, Tuner
from ray.tune.experiment import Trial as TuneTrial

from cluster import judges
from cluster.judges import OptunaSearcher
from cluster.registry import summarise
from cluster.search_plan import Search, has_ended
from cluster.search_results import values
from cluster.search_room import Bundle, Room
from cluster.search_watch import Diary, Leaving, signals
from cluster.shared_pools import SharedPool, shared_pools
from cluster.spaces import Point, assignments, point_of
from cluster.trial import Bench, Trial
from heliostat import launch
from heliostat.errors import UsageError
from heliostat.folder import RunFolder, replace_text
from heliostat.ray_session import ray_session
from heliostat.tracker import read_metrics

logger = logging.getLogger("heliostat")

_QUIET = {
    "RAY_AIR_NEW_OUTPUT": "0",  # of the two engines, the one that can be silent
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # the run folders hold all that is logged
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # the search has a handler of its own
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a failed trial reports no metric
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000000",  # its snapshots are not used
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
}


def begin(search: Search, address: str | None = None) -> bool:
    """Starts a new search in a new folder and runs it to its end.

    Returns:
        Whether it came to its end; False where it was asked to leave.

    Raises:
        UsageError: the name is taken, or the layout does not fit the cluster.
    """
    folder = search.folder
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise UsageError(
            f"the name {folder.name!r} is taken by {folder}; choose another with --name, or go on "
            f"with that search: heliostat search --resume {folder.name} --runs {folder.parent}"
        ) from None
    try:
        trials = len(search.points()) or search.plan.trials  # a grid may have fewer
        record = asdict(search.plan) | {"trials": trials, "created": time.time()}
        replace_text(folder / "search.json", json.dumps(record, indent=2))
        return _held(search, address)
    except BaseException:
        if not search.run_folder.events.path.exists():  # nothing has run: the name is free again
            shutil.rmtree(folder)
        raise


def resume(search: Search, address: str | None = None) -> bool:
    """Goes on with a search: trials that ended stay as they are, the others are continued.

    Returns:
        As ``begin``.

    Raises:
        UsageError: the search is running, or the layout does not fit the cluster.
    """
    return _held(search, address)


def _held(search: Search, address: str | None) -> bool:
    """Runs the search under its lock."""
    folder = search.run_folder
    with launch.locked(folder):
        folder.stop.unlink(missing_ok=True)
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # the search speaks for itself
        room = Room.of(search)
        check = partial(room.check, search)
        with ray_session(address, check, dashboard=room.nested):
            concurrent, bundles = room.fit(search)
            folder.events.add("attempt", concurrent=concurrent)
            with (
                shared_pools(search.workload, search.recipe, folder.events, concurrent) as pools,
                signals(search) as asked,
            ):
                _run(search, _bench(search, room, pools), concurrent, bundles, asked)
        _report_end(search, stopped=bool(asked))
        return not asked


def _report_end(search: Search, stopped: bool) -> None:
    folder = search.run_folder
    shutil.rmtree(folder.path / ".tune", ignore_errors=True)
    if stopped:
        folder.events.add("stopped", reason="the search was asked to leave")
        logger.warning(
            "the search was interrupted; go on with: heliostat search --resume %s --runs %s",
            folder.name,
            folder.path.parent,
        )
    else:
        folder.events.add("finished")


def _bench(search: Search, room: Room, pools: Mapping[str, SharedPool[Any]]) -> Bench:
    plan, recipe = search.plan, replace(search.recipe, layout=room.layout)
    every = judges.judged_every(plan.scheduler, recipe.total_steps)
    if plan.scheduler == "pbt" and every:  # a clone takes the state of the step it was judged at
        recipe = replace(recipe, checkpoint_every=min(every, recipe.checkpoint_every))
    return Bench(
        workload=search.workload,
        spec=plan.workload,
        recipe=recipe,
        folder=search.folder,
        metrics=search.metrics,
        every=every,
        pools=pools,
        nested=room.nested,
    )


def _run(
    search: Search,
    bench: Bench,
    concurrent: int,
    bundles: Sequence[Bundle],
    asked: list[float],
) -> None:
    """Hands the trials to Tune until all have ended or the search is asked to leave."""
    plan, recipe = search.plan, bench.recipe
    _prepare(bench, search.points())
    trials = search.trials()
    ended = [trial for trial in trials if has_ended(trial)]
    waiting = [(trial.name, _point(search, trial)) for trial in trials if not has_ended(trial)]
    scheduler = judges.make_scheduler(
        plan.scheduler, search.goals[0], search.space, recipe.total_steps
    )
    for trial in ended:
        rows = cast("list[dict[str, float]]", read_metrics(trial.path))
        judges.recall(scheduler, search.goals[0], trial.name, rows)
    searcher = _optuna(search, bench, ended, waiting) if plan.search == "optuna" else None
    left = plan.trials - len(ended) if searcher else len(waiting)
    if not left:
        return
    tuner = Tuner(
        tune.with_resources(
            tune.with_parameters(Trial, bench=bench), tune.PlacementGroupFactory(list(bundles))
        ),
        param_space={} if searcher else judges.space_for_tune(waiting),
        tune_config=TuneConfig(
            scheduler=scheduler,
            search_alg=searcher,
            num_samples=left if searcher else 1,
            max_concurrent_trials=None if plan.scheduler == "pbt" else concurrent,
            reuse_actors=True,
            trial_name_creator=_name,
            trial_dirname_creator=_name,
        ),
        run_config=tune.RunConfig(
            name=".tune",
            storage_path=str(search.folder),
            stop=Leaving(search, asked),
            callbacks=[Diary(search)],
            checkpoint_config=CheckpointConfig(checkpoint_at_end=False),
            failure_config=tune.FailureConfig(max_failures=recipe.layout.max_restarts),
            verbose=0,
        ),
    )
    shutil.rmtree(search.folder / ".tune", ignore_errors=True)
    tuner.fit()


def _name(trial: TuneTrial) -> str:
    return cast("dict[str, Any]", trial.config)["point"]["trial"]


def _point(search: Search, trial: RunFolder) -> Point:
    """Returns the values that a trial has of the keys of the space."""
    return point_of(yaml.safe_load(trial.recipe.read_text()), list(search.space))


def _prepare(bench: Bench, points: Sequence[Point]) -> None:
    """Makes the folders of all trials that are known, but for those that are there."""
    for index, point in enumerate(points):
        _propose(bench, index, point)


def _propose(bench: Bench, index: int, point: Point) -> str:
    """Makes the folder of one trial and returns the trial's name."""
    name = f"trial-{index:03d}"
    order = bench.order(name, bench.recipe.override(*assignments(point)))
    if not order.folder.record.exists():
        shutil.rmtree(order.folder.path, ignore_errors=True)  # torn by a kill
        launch.prepare(order)
    return name


def _optuna(
    search: Search,
    bench: Bench,
    ended: Sequence[RunFolder],
    waiting: Sequence[tuple[str, Point]],
) -> OptunaSearcher:
    def results(name: str) -> dict[str, float]:
        folder = RunFolder(search.folder / name)
        return {} if summarise(folder).status == "failed" else values(folder, search.metrics)

    alone = replace(bench, pools={})  # handles of actors do not belong into Tune's snapshots
    searcher = OptunaSearcher(
        search.space,
        search.goals,
        search.recipe.seed,
        waiting,
        lambda index, point: _propose(alone, index, point),
        results,
    )
    for trial in ended:
        searcher.recall(trial.name, _point(search, trial))
    return searcher
