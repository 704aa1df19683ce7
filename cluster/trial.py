"""One trial of a search inside its Ray actor: an ordinary run that stops where Tune wants to judge.

The run trains in a thread of its own. Between two of Tune's calls it waits at the report that was
handed over, after that step's checkpoint, so that a decision meets it where it stands.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import yaml
from ray import tune

from cluster.records import read_object
from cluster.registry import summarise
from cluster.search_results import values
from cluster.shared_pools import SharedPool
from cluster.spaces import assignments
from heliostat import checkpoint, launch
from heliostat.errors import RunFailed, Stopped, UsageError
from heliostat.folder import RunFolder, replace_text
from heliostat.launch import Order
from heliostat.provenance import describe_method
from heliostat.recipe import Recipe
from heliostat.tracker import read_metrics
from heliostat.workload import Workload

_FOLLOW_EVERY_S = 0.5
_LEAVE_S = 9.0
"""Longest wait for a run that was told to leave; Tune kills the actor soon after."""
_COPIES = 5
"""Tries to copy a checkpoint that its owner may be replacing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """What every trial of a search is given."""

    workload: Workload
    spec: str
    recipe: Recipe
    """The recipe that points change, with the layout of a trial."""
    folder: Path
    """The search's folder; a trial's lies inside, under the trial's name."""
    metrics: tuple[str, ...]
    """Metrics of the search; the scheduler judges by the first."""
    every: int | None
    """Steps between two reports to the scheduler; None: it waits for the end."""
    pools: Mapping[str, SharedPool[Any]]
    nested: bool = False
    """Whether the learners are ranks of Ray Train, outside the trial's actor."""

    @property
    def stop(self) -> Path:
        """Exists while the search is asked to leave."""
        return self.folder / "stop"

    def order(self, name: str, recipe: Recipe) -> Order:
        """Returns how a trial is launched."""
        return Order(
            workload=self.workload,
            spec=self.spec,
            recipe=recipe,
            folder=RunFolder(self.folder / name),
            group=self.folder.name,
            job_type="trial",
        )


class Trial(tune.Trainable):
    """Tune's actor: runs trials one after another, each until it ends or is given up."""

    def setup(self, config: dict[str, Any], bench: Bench | None = None) -> None:
        """Takes what all trials share; the first ``step`` begins the run."""
        del config
        assert bench is not None
        for noisy in ("ray.tune", "ray.train"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        self._bench = bench
        self._home = os.environ.get("TUNE_ORIG_WORKING_DIR", os.getcwd())  # noqa: PTH109
        self._forget()

    def _forget(self) -> None:
        self._attempt: Attempt | None = None
        self._origin: dict[str, Any] | None = None

    def step(self) -> dict[str, Any]:
        """Trains until the next report, or to the end."""
        if self._attempt is None:
            os.chdir(self._home)  # Tune moved to a folder of its own
            if self._bench.stop.exists():
                return {"step": 0, "done": True, "ended": True}
            point = cast("dict[str, Any]", self.config)["point"]
            self._attempt = Attempt(self._bench, self._run, point, self._origin)
        return self._attempt.next_report()

    @property
    def _run(self) -> RunFolder:
        name = str(self.trial_name)  # pyright: ignore[reportUnknownArgumentType]
        return RunFolder(self._bench.folder / name)

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Saves where the run's newest checkpoint is; its content stays in the run's folder."""
        run = self._run
        pointer = {"run": run.name, "step": newest_step(run), "id": uuid.uuid4().hex}
        Path(checkpoint_dir, "pointer.json").write_text(json.dumps(pointer))

    def load_checkpoint(self, checkpoint: str | dict[str, Any] | None) -> None:
        """Takes what a trial saved: this one before a pause, or another to be cloned."""
        self._origin = json.loads(Path(str(checkpoint), "pointer.json").read_text())

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Leaves the trial that was given up and makes ready for the next."""
        del new_config
        self.cleanup()
        self._forget()
        return True

    def cleanup(self) -> None:
        """Makes the run leave and waits for it."""
        if self._attempt is not None:
            self._attempt.leave()


def newest_step(folder: RunFolder) -> int | None:
    """Returns the step of the newest checkpoint; it may prove damaged when it is read."""
    return max(checkpoint.steps(folder.checkpoints), default=None)


class Attempt:
    """A run in its thread, from a beginning or resumption to its end or pause."""

    def __init__(
        self,
        bench: Bench,
        folder: RunFolder,
        point: Mapping[str, Any],
        origin: Mapping[str, Any] | None,
    ) -> None:
        self._bench = bench
        self._folder = folder
        self._point = {key: value for key, value in point.items() if key != "trial"}
        self._origin = origin if origin and origin["run"] != folder.name else None
        self._reports: queue.Queue[dict[str, Any]] = queue.Queue()
        self._next = threading.Semaphore(0)
        self._leaving = False
        self._latest: dict[str, float] = {}
        self._due: int | None = None
        self._thread = threading.Thread(target=self._work, name=folder.name, daemon=True)

    def next_report(self) -> dict[str, Any]:
        """Lets the run go on and returns its next report; the last one says ``done``."""
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._next.release()
        report = self._reports.get()
        if report.get("done"):
            self._thread.join()
        return report

    def leave(self) -> None:
        """Makes the run leave where it stands, and waits until it has."""
        self._leaving = True
        self._next.release()
        if self._thread.ident is None:
            return
        nested = self._bench.nested
        if nested and self._thread.is_alive() and not self._folder.stop.exists():
            self._folder.stop.touch()
        self._thread.join(None if nested else _LEAVE_S)

    def _work(self) -> None:
        try:
            self._launch()
        except Exception as error:  # noqa: BLE001 - a trial that fails must not end the search
            events = [event["event"] for event in self._folder.events.read()]
            if not events or events[-1] != "failed":
                self._folder.events.add(
                    "failed", error=type(error).__name__, reason=str(error)[:2000]
                )
        found = values(self._folder, self._bench.metrics)
        judged = {name: found.get(name, float("nan")) for name in self._bench.metrics}
        step = summarise(self._folder).step if self._bench.metrics[0] in found else 0
        self._reports.put({"step": step, **judged, "done": True, "ended": True})

    def _launch(self) -> None:
        self._await_former()
        if self._folder.result.exists():
            return  # it had finished before the search was interrupted
        recipe = self._recipe()
        pools = {
            name: pool.view(recipe, self._folder.events) for name, pool in self._bench.pools.items()
        }
        order = replace(
            self._bench.order(self._folder.name, recipe), shared=pools, listen=self._listen
        )
        follower: threading.Thread | None = None
        if self._bench.nested:
            follower = threading.Thread(target=self._follow, daemon=True)
            follower.start()
        try:
            outcome = launch.resume(order)
            if not outcome.stopped:
                require_metrics(outcome.folder, self._bench.metrics)
        finally:
            self._leaving = True
            for pool in pools.values():
                pool.leave()

    def _await_former(self) -> None:
        """Waits for a process that was killed to let go of the run."""
        deadline = time.monotonic() + self._bench.recipe.layout.start_deadline_s
        while summarise(self._folder).status == "running" and time.monotonic() < deadline:
            time.sleep(0.2)

    def _recipe(self) -> Recipe:
        """Returns the run's recipe; of a clone, that of the point, with the other's state."""
        kind = type(self._bench.recipe)
        own = kind.from_dict(yaml.safe_load(self._folder.recipe.read_text()))
        if self._origin is None:
            return own
        recipe = own.override(*assignments(self._point))
        done = [event.get("pointer") for event in self._folder.events.read()]
        if recipe == own and self._origin["id"] in done:
            return own  # cloned before its process died
        clone(self._bench, self._folder, recipe, self._origin)
        return recipe

    def _listen(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hands a due report over and waits; called by the run after that step's checkpoint."""
        wanted = [name for name in self._bench.metrics if name in metrics]
        self._latest |= {name: float(metrics[name]) for name in wanted}
        every = self._bench.every
        if every is None or self._bench.metrics[0] not in metrics:
            return
        if self._due is None:
            self._due = max(every, -(-step // every) * every)
        if not self._due <= step < self._bench.recipe.total_steps:  # the end is told at the end
            return
        self._due = (step // every + 1) * every
        if not self._leaving:
            self._reports.put({"step": step, **self._latest})
            self._next.acquire()
        if self._leaving:
            raise Stopped(f"given up or paused by the search after step {step}")

    def _follow(self) -> None:
        """Listens to ranks of other processes, by what they have written."""
        seen = newest_step(self._folder) or 0
        while not self._leaving:
            time.sleep(_FOLLOW_EVERY_S)
            for row in read_metrics(self._folder.path):
                if row["step"] > seen:
                    seen = int(row["step"])
                    try:
                        self._listen(seen, row)
                    except Stopped:
                        if not self._folder.stop.exists():
                            self._folder.stop.touch()
                        return


def require_metrics(folder: Path, metrics: tuple[str, ...]) -> None:
    """Refuses a run that has finished without one of the metrics.

    Raises:
        RunFailed: names it, and the metrics that there are.
    """
    missing = sorted(set(metrics) - values(RunFolder(folder), metrics).keys())
    if missing:
        rows = read_metrics(folder)
        there = {name for row in rows for name in row} | read_object(folder / "result.json").keys()
        raise RunFailed(
            f"expected the metrics {', '.join(metrics)}, found no {missing[0]!r} among "
            f"{', '.join(sorted(there - {'step', 'time'}))}; give one of these with --metric"
        )


def clone(bench: Bench, folder: RunFolder, recipe: Recipe, origin: Mapping[str, Any]) -> None:
    """Makes a run go on from another's checkpoint with a recipe of its own.

    Raises:
        UsageError: the other run has no whole checkpoint.
    """
    other = RunFolder(bench.folder / origin["run"])
    own = yaml.safe_load(folder.recipe.read_text())
    step: int | None = origin["step"]
    for left in reversed(range(_COPIES)):
        try:
            path = checkpoint.fork(other.checkpoints, step, folder.checkpoints)
            break
        except (UsageError, OSError):  # its owner has gone on and pruned it: take a newer one
            if not left:
                raise
            step = None
            time.sleep(0.2)
    else:
        raise AssertionError("the last try raises")
    replace_text(folder.recipe, recipe.to_yaml())
    record = read_object(folder.record)
    record["fingerprint"] = recipe.fingerprint()
    record["method"] = describe_method(bench.workload, recipe)
    replace_text(folder.record, json.dumps(record, indent=2))
    now = yaml.safe_load(recipe.to_yaml())
    changed = {key: now[key] for key in now if key != "layout" and now[key] != own.get(key)}
    details = {"from": other.name, "step": int(path.name[5:]), "changed": json.dumps(changed)}
    folder.events.add("cloned", **details, pointer=origin["id"])
