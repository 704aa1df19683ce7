"""Who judges trials while they run, and who proposes the next: Tune's schedulers, and Optuna."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
from ray import tune
from ray.tune.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)
from ray.tune.search import Searcher

from cluster.search_plan import Goal, SchedulerName, load_optuna
from cluster.spaces import Distribution, Point, Space, Value
from heliostat.seeding import derive

_HALVING = 3
"""ASHA keeps one of this many trials at each rung."""
_ROUNDS = 8
"""Judgements over the length of a run, for the schedulers that judge at equal intervals."""


def judged_every(scheduler: SchedulerName, total_steps: int) -> int | None:
    """Returns the steps between two reports of a trial; None where nobody judges before the end."""
    return None if scheduler == "none" else _interval(scheduler, total_steps)


def _interval(scheduler: SchedulerName, total_steps: int) -> int:
    return max(1, total_steps // (_HALVING**2 if scheduler == "asha" else _ROUNDS))


def make_scheduler(
    name: SchedulerName, goal: Goal, space: Space, total_steps: int
) -> TrialScheduler:
    """Returns Tune's scheduler, judging by ``goal`` at the steps of ``judged_every``.

    ASHA judges after a ninth and after a third of the steps; no trial is cut near its end.
    """
    every = _interval(name, total_steps)
    common: dict[str, Any] = {"time_attr": "step", "metric": goal.metric, "mode": goal.mode}
    match name:
        case "asha":
            return ASHAScheduler(
                **common,
                grace_period=every,
                max_t=every * _HALVING**2 - 1,
                reduction_factor=_HALVING,
                stop_last_trials=False,
            )
        case "median":
            return MedianStoppingRule(
                **common,
                grace_period=every,
                min_time_slice=cast("int", math.inf),  # never pauses: that would lose steps
            )
        case "pbt":
            return PopulationBasedTraining(
                **common,
                perturbation_interval=every,
                hyperparam_mutations={"point": {key: _mutation(space[key]) for key in space}},
                custom_explore_fn=partial(_clipped, dict(space)),
                log_config=False,
                require_attrs=False,
            )
        case "none":
            return FIFOScheduler()


def _mutation(distribution: Distribution) -> list[Value] | Callable[[], Value]:
    """Returns what Tune resamples a key from; choices also move to a neighbour."""
    if distribution.name == "choice":
        return list(distribution.arguments)
    return partial(_draw, distribution)


def _draw(distribution: Distribution) -> Value:
    return distribution.at(float(np.random.default_rng().random()))


def _clipped(space: Space, config: dict[str, Any]) -> dict[str, Any]:
    """Brings values that were scaled past an end of their range back to it."""
    point = config["point"]
    inside = {key: space[key].clip(point[key]) for key in space}
    return {**config, "point": {**point, **inside}}


@dataclass(frozen=True, slots=True)
class _Past:
    """A trial of an earlier session, as far as schedulers look at one."""

    trial_id: str


def recall(
    scheduler: TrialScheduler, goal: Goal, name: str, rows: Sequence[Mapping[str, float]]
) -> None:
    """Tells a new scheduler what a trial that has ended had reported.

    Args:
        scheduler: as ``make_scheduler`` returns it.
        goal: what it judges by.
        name: the trial's.
        rows: with ``step``, ascending; those without the goal's metric are passed over.
    """
    past = cast("Any", _Past(name))
    told = [row for row in rows if goal.metric in row]
    nobody = cast("Any", None)
    if isinstance(scheduler, ASHAScheduler):
        scheduler.on_trial_add(nobody, past)
        for row in told:
            scheduler.on_trial_result(nobody, past, dict(row))
    elif isinstance(scheduler, MedianStoppingRule):
        for row in told:
            scheduler.on_trial_complete(nobody, past, dict(row))


class OptunaSearcher(Searcher):
    """Proposes points by Optuna's tree-structured Parzen estimator, for one metric or several.

    A proposal depends on the seed, its number and the trials that have ended by then, so that a
    search that was interrupted needs nothing but its run folders to go on.
    """

    def __init__(
        self,
        space: Space,
        goals: Sequence[Goal],
        seed: int,
        waiting: Sequence[tuple[str, Point]],
        propose: Callable[[int, Point], str],
        results: Callable[[str], Mapping[str, float]],
    ) -> None:
        """Makes an empty study.

        Args:
            space: what to search.
            goals: what is wanted of each metric.
            seed: of all proposals.
            waiting: names and points of trials to hand out first.
            propose: makes trial number i with a point ready and returns its name.
            results: returns the metrics of a trial that has ended; empty where it failed.

        Raises:
            UsageError: Optuna is not installed.
        """
        super().__init__()
        self._optuna = load_optuna()
        self._space = space
        self._goals = goals
        self._seed = seed
        self._waiting = list(waiting)
        self._propose = propose
        self._results = results
        self._distributions = {key: self._distribution(space[key]) for key in space}
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)
        self._study = self._optuna.create_study(directions=[f"{goal.mode}imize" for goal in goals])
        self._open: dict[str, tuple[str, Any]] = {}
        self._count = 0

    def recall(self, name: str, point: Point) -> None:
        """Tells the study of a trial that ended in an earlier session."""
        self._end(name, self._ask(point))

    def suggest(self, trial_id: str) -> dict[str, Any]:
        """Returns the next trial's configuration."""
        if self._waiting:
            name, point = self._waiting.pop(0)
            asked = self._ask(point)
        else:
            asked = self._ask(None)
            point = {key: self._value(key, asked.params[key]) for key in self._space}
            name = self._propose(self._count - 1, point)
        self._open[trial_id] = name, asked
        return {"point": {"trial": name, **point}}

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Tells the study what came of a trial."""
        del result, error
        self._end(*self._open.pop(trial_id))

    def save(self, checkpoint_path: str) -> None:
        """Saves nothing: the run folders hold it all."""

    def restore(self, checkpoint_path: str) -> None:
        """Restores nothing; ``recall`` does."""

    def _ask(self, point: Point | None) -> Any:  # noqa: ANN401 - Optuna may be absent
        seed = derive(self._seed, "optuna", self._count) % 2**32
        self._study.sampler = self._optuna.samplers.TPESampler(seed=seed)
        self._count += 1
        if point is not None:
            self._study.enqueue_trial({key: self._index(key, point[key]) for key in self._space})
        return self._study.ask(self._distributions)

    def _end(self, name: str, asked: Any) -> None:  # noqa: ANN401 - as above
        found = self._results(name)
        numbers = [found.get(goal.metric, math.nan) for goal in self._goals]
        if all(map(math.isfinite, numbers)):
            self._study.tell(asked, numbers)
        else:
            # with one goal Optuna learns from the pruned, as the worst, but not from the failed
            states = self._optuna.trial.TrialState
            self._study.tell(asked, state=states.PRUNED if len(self._goals) == 1 else states.FAIL)

    def _distribution(self, distribution: Distribution) -> Any:  # noqa: ANN401 - as above
        kinds = self._optuna.distributions
        if distribution.name == "choice":  # by place, since Optuna takes no lists
            return kinds.CategoricalDistribution(list(range(len(distribution.arguments))))
        low, high = distribution.low, distribution.high
        if distribution.name in ("randint", "lograndint"):
            log = distribution.name == "lograndint"
            return kinds.IntDistribution(int(low), int(high) - 1, log=log)
        if distribution.name == "quniform":
            step = distribution.quantum
            return kinds.FloatDistribution(low, low + (high - low) // step * step, step=step)
        return kinds.FloatDistribution(low, high, log=distribution.name == "loguniform")

    def _value(self, key: str, found: Any) -> Value:  # noqa: ANN401 - as above
        distribution = self._space[key]
        if distribution.name == "choice":
            return distribution.arguments[int(found)]
        return distribution.clip(found)

    def _index(self, key: str, value: Value) -> Value:
        distribution = self._space[key]
        if distribution.name == "choice":
            return distribution.arguments.index(value)
        return value


def space_for_tune(trials: Sequence[tuple[str, Point]]) -> dict[str, Any]:
    """Returns Tune's space: each of the named points once, in order."""
    listed = [{"trial": name, **point} for name, point in trials]
    return {"point": tune.grid_search(cast("list[Any]", listed))}
