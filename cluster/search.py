"""A search: many trials of one recipe, hosted by Ray Tune, each an ordinary run of its own.

A search is a function of its folder. ``search.json`` says what is wanted; every trial's folder is
made before Tune hears of the trial. Going on after an interruption therefore reads these folders
alone: Tune's own snapshots (some seconds old, pickled, without the scheduler's state) are not used.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, cast

import ray
import yaml
from ray import tune
from ray.tune import Callback, CheckpointConfig, Stopper, TuneConfig, Tuner
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.search import Searcher

from cluster import judges
from cluster.judges import OptunaSearcher
from cluster.registry import summarise
from cluster.search_plan import Search, has_ended
from cluster.search_results import values
from cluster.shared_pools import SharedPool, shared_pools
from cluster.spaces import Point, assignments, point_of
from cluster.trial import Bench, Trial
from heliostat import launch
from heliostat.errors import UsageError
from heliostat.folder import RunFolder, replace_text
from heliostat.ray_session import Nodes, check_layout, ray_session
from heliostat.recipe import Hosts, Layout
from heliostat.tracker import read_metrics
from heliostat.workload import pool_hosts

logger = logging.getLogger("heliostat")
logging.getLogger("ray.tune.analysis").setLevel(logging.ERROR)  # it misses files we do not use

_GRACE_S = 7.0
"""Seconds that trials have to save when the search is asked to leave."""
_DRIVER_CPUS = 0.01
"""Reserved by the actor of a trial whose learners are elsewhere: Tune wants some."""
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
    with folder.lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"search {folder.name!r} is being run by another process") from None
        folder.stop.unlink(missing_ok=True)
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        layout, hosts = _layouts(search)
        with ray_session(address, lambda nodes: _check(search, layout, hosts, nodes)):
            concurrent, cpus = _concurrency(search, layout, hosts)
            folder.events.add("attempt", concurrent=concurrent)
            with (
                shared_pools(search.workload, search.recipe, folder.events, concurrent) as pools,
                _signals(search) as asked,
            ):
                _run(search, layout, pools, concurrent, cpus, asked)
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


def _layouts(search: Search) -> tuple[Layout, dict[str, Hosts]]:
    """Returns a trial's layout, and the hosts that all share.

    A single learner on CPUs runs inside the trial's own actor, which gives the same numbers as a
    rank of Ray Train and saves its process.
    """
    layout = search.recipe.layout
    if layout.learners <= 1 and not layout.learner_gpus:
        layout = replace(layout, learners=0, min_learners=None)
    return layout, pool_hosts(search.workload, search.recipe.layout)


def _check(search: Search, layout: Layout, hosts: Mapping[str, Hosts], nodes: Nodes) -> None:
    """Refuses what the nodes can never hold: the pools beside one trial, or beside all wanted."""
    one = layout if layout.learners else replace(layout, learners=1)
    check_layout(one, hosts, nodes)
    wanted, total = search.plan.concurrent, sum(node.get("CPU", 0) for node in nodes)
    free = total - _pool_cpus(hosts)
    if wanted and wanted * _trial_cpus(layout) > free:
        raise UsageError(
            f"--concurrent {wanted} needs {wanted * _trial_cpus(layout):g} CPUs for learners, "
            f"found {free:g} of {total:g} beside the pools; ask for fewer, or lower "
            f"layout.learner_cpus from {layout.learner_cpus:g}"
        )


def _pool_cpus(hosts: Mapping[str, Hosts]) -> float:
    return sum(asked.hosts * asked.cpus for asked in hosts.values())


def _trial_cpus(layout: Layout) -> float:
    return max(1, layout.learners) * layout.learner_cpus


def _concurrency(search: Search, layout: Layout, hosts: Mapping[str, Hosts]) -> tuple[int, float]:
    """Returns how many trials run at a time, and the CPUs that Tune reserves for each.

    Population-based training needs all trials alive at once and takes turns by pausing them, so
    that there the reservation alone limits how many run.
    """
    total = cast("dict[str, float]", ray.cluster_resources())
    free = total.get("CPU", 1.0) - _pool_cpus(hosts)
    each = _trial_cpus(layout)
    fits = int(free / each + 1e-9) if each else os.cpu_count() or 1
    if layout.learners and layout.learner_gpus:
        used = sum(asked.hosts * asked.gpus for asked in hosts.values())
        gpus = total.get("GPU", 0.0) - used
        fits = min(fits, int(gpus / (layout.learners * layout.learner_gpus) + 1e-9))
    concurrent = max(1, min(search.plan.concurrent or fits, search.plan.trials))
    if layout.learners:
        return concurrent, _DRIVER_CPUS  # Ray Train reserves for its ranks
    if search.plan.scheduler == "pbt":
        return concurrent, max(each, math.floor(free / concurrent * 100) / 100)
    return concurrent, each


def _run(
    search: Search,
    layout: Layout,
    pools: Mapping[str, SharedPool[Any]],
    concurrent: int,
    cpus: float,
    asked: list[float],
) -> None:
    """Hands the trials to Tune until all have ended or the search is asked to leave."""
    plan, recipe = search.plan, replace(search.recipe, layout=layout)
    every = judges.judged_every(plan.scheduler, recipe.total_steps)
    if plan.scheduler == "pbt" and every:  # a clone takes the state of the step it was judged at
        recipe = replace(recipe, checkpoint_every=min(every, recipe.checkpoint_every))
    bench = Bench(
        workload=search.workload,
        spec=plan.workload,
        recipe=recipe,
        folder=search.folder,
        metrics=search.metrics,
        every=every,
        pools=pools,
    )
    _prepare(bench, search.points())
    ended = [trial for trial in search.trials() if has_ended(trial)]
    waiting = [trial for trial in search.trials() if not has_ended(trial)]
    left = len(waiting) + (plan.trials - len(search.trials()) if plan.search == "optuna" else 0)
    if not left:
        return
    scheduler = judges.make_scheduler(
        plan.scheduler, search.goals[0], search.space, recipe.total_steps
    )
    for trial in ended:
        rows = cast("list[dict[str, float]]", read_metrics(trial.path))
        judges.recall(scheduler, search.goals[0], trial.name, rows)
    known = [_point(search, trial) for trial in waiting]
    names = [trial.name for trial in waiting]
    searcher: Searcher | None = None
    if plan.search == "optuna":
        searcher = _optuna(search, bench, ended, list(zip(names, known, strict=True)))
    limit = None if plan.scheduler == "pbt" else concurrent
    tuner = Tuner(
        tune.with_resources(tune.with_parameters(Trial, bench=bench), {"cpu": cpus, "gpu": 0}),
        param_space={} if searcher else judges.space_for_tune(known, names),
        tune_config=TuneConfig(
            scheduler=scheduler,
            search_alg=searcher,
            num_samples=left if searcher else 1,
            max_concurrent_trials=limit,
            reuse_actors=True,
            trial_name_creator=_name,
            trial_dirname_creator=_name,
        ),
        run_config=tune.RunConfig(
            name=".tune",
            storage_path=str(search.folder),
            stop=_Leaving(bench, asked),
            callbacks=[_Diary(search)],
            checkpoint_config=CheckpointConfig(checkpoint_at_end=False),
            failure_config=tune.FailureConfig(max_failures=layout.max_restarts),
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


class _Diary(Callback):
    """Marks trials that the scheduler gave up, and says on standard error what ends."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self._total = search.plan.trials if search.plan.search == "optuna" else len(search.trials())

    def on_trial_complete(
        self,
        iteration: int,
        trials: list[TuneTrial],
        trial: TuneTrial,
        **info: Any,  # noqa: ANN401 - Tune passes none today
    ) -> None:
        """Called before a trial that was given up is told to leave."""
        del iteration, trials, info
        folder = RunFolder(self._search.folder / str(trial))
        last = cast("dict[str, Any]", trial.last_result or {})
        if not last.get("ended"):
            replace_text(folder.stop, "pruned")
            value = last.get(self._search.metrics[0])
            folder.events.add("pruned", step=last.get("step"), value=value)
        self._say(folder)

    def on_trial_error(
        self,
        iteration: int,
        trials: list[TuneTrial],
        trial: TuneTrial,
        **info: Any,  # noqa: ANN401 - Tune passes none today
    ) -> None:
        """Records the death of a trial's actor past its budget."""
        del iteration, trials, info
        folder = RunFolder(self._search.folder / str(trial))
        folder.events.add("failed", error="TrialLost", reason=str(trial.error_file))
        self._say(folder)

    def _say(self, folder: RunFolder) -> None:
        summary = summarise(folder)
        status = "pruned" if folder.pruned else summary.status  # it may not have left yet
        found = values(folder, self._search.metrics)
        scores = ", ".join(f"{name}={value:.4g}" for name, value in found.items())
        ended = sum(has_ended(trial) for trial in self._search.trials())
        sys.stderr.write(
            f"{folder.name} {status} at step {summary.step}: {scores or 'no metric'}; "
            f"{ended}/{self._total} trials done\n"
        )


class _Leaving(Stopper):
    """Ends the search once all trials have saved, or their time to do so is over."""

    def __init__(self, bench: Bench, asked: list[float]) -> None:
        self._bench = bench
        self._asked = asked

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Stops no single trial."""
        del trial_id, result
        return False

    def stop_all(self) -> bool:
        """Whether to end now."""
        if not self._asked:
            return False
        folders = [RunFolder(path) for path in self._bench.folder.glob("trial-*")]
        busy = any(summarise(folder).status == "running" for folder in folders)
        return not busy or time.monotonic() > self._asked[0] + _GRACE_S


@contextmanager
def _signals(search: Search) -> Generator[list[float]]:
    """Turns SIGINT and SIGTERM into a request that all trials save and leave.

    Yields:
        A list that holds the time of the first signal, once there was one.
    """
    asked: list[float] = []

    def ask(number: int, _: object) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(time.monotonic())
        search.run_folder.stop.touch()
        for trial in search.trials():
            if not trial.stop.exists() and summarise(trial).status == "running":
                trial.stop.touch()
        search.run_folder.events.add("stop-asked", signal=signal.Signals(number).name)

    try:
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: nobody can ask this way
        yield asked
        return
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
