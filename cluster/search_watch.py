"""What the driver of a search does beside Tune: it tells of trials, and honours signals."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

from ray.tune import Callback, Stopper
from ray.tune.experiment import Trial as TuneTrial

from cluster.registry import summarise
from cluster.search_plan import Search, has_ended
from cluster.search_results import values
from heliostat.folder import RunFolder, replace_text

_GRACE_S = 7.0
"""Seconds that trials have to save when the search is asked to leave."""


class Diary(Callback):
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


class Leaving(Stopper):
    """Ends the search once all trials have saved, or their time to do so is over."""

    def __init__(self, search: Search, asked: list[float]) -> None:
        self._search = search
        self._asked = asked

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Stops no single trial."""
        del trial_id, result
        return False

    def stop_all(self) -> bool:
        """Whether to end now; a file ``stop`` in the search's folder asks as a signal does."""
        if not self._asked and self._search.run_folder.stop.exists():
            _ask(self._search, self._asked)
        if not self._asked:
            return False
        busy = any(summarise(trial).status == "running" for trial in self._search.trials())
        return not busy or time.monotonic() > self._asked[0] + _GRACE_S


def _ask(search: Search, asked: list[float]) -> None:
    """Makes all trials save and leave, and no other begin."""
    asked.append(time.monotonic())
    search.run_folder.stop.touch()
    for trial in search.trials():
        if not trial.stop.exists() and summarise(trial).status == "running":
            trial.stop.touch()


@contextmanager
def signals(search: Search) -> Generator[list[float]]:
    """Turns SIGINT and SIGTERM into a request that all trials save and leave.

    Yields:
        A list that holds the time of the first signal, once there was one.
    """
    asked: list[float] = []

    def ask(number: int, _: object) -> None:
        if asked:
            raise KeyboardInterrupt
        _ask(search, asked)
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
