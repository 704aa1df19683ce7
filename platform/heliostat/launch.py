"""Launch: the only place that creates and kills processes, and that makes good their deaths."""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heliostat.errors import ActorLost, DeadlineExceeded, RunFailed, Stopped, UsageError
from heliostat.folder import RunFolder, replace_text
from heliostat.mirror import Mirror, host_name, mirrored
from heliostat.pool import Pool
from heliostat.provenance import code_hash, describe_environment
from heliostat.rank import Death, train_rank
from heliostat.recipe import Recipe
from heliostat.run import Assignment
from heliostat.wandb_view import wandb_mode
from heliostat.workload import Workload, pool_hosts, resolve

if TYPE_CHECKING:
    from heliostat.progress import Progress

STOP_GRACE_S = 7.0
"""Seconds that a stopping run has to save; with Ray's own shutdown it leaves within ten."""
_STOPPING = (signal.SIGINT, signal.SIGTERM)
logger = logging.getLogger("heliostat")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    folder: Path
    metrics: Mapping[str, float]
    """Final metrics; empty where the run was stopped."""
    stopped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to launch and where."""

    workload: Workload
    spec: str
    """How the user named the workload, so that ``resume`` finds it again."""
    recipe: Recipe
    folder: RunFolder
    begin_from: tuple[RunFolder, int | None] | None = None
    """Another run and step (None: its newest checkpoint) that a new run branches off from."""
    address: str | None = None
    group: str = ""
    """Runs that belong together, such as the trials of a search; empty takes the workload."""
    job_type: str = "train"
    """The kind of work, for trackers."""
    shared: Mapping[str, Pool[Any]] = field(default_factory=dict[str, Pool[Any]])
    """Pools by name that others started and will end; the run uses them and starts the rest."""
    supervised: bool = False
    """Whether a supervisor restarts the run: then a stop that was asked for earlier stands."""
    listen: Callable[[int, Mapping[str, float]], None] | None = None
    """Told each row of metrics with its step, on the learner's side and before the next step."""
    show_progress: bool = False


def create(order: Order) -> Outcome:
    """Starts a new run in a new folder.

    Raises:
        UsageError: as ``prepare``, or the layout does not fit the cluster.
        RunFailed: the method raised, or deaths went past the retry budget.
    """
    prepare(order)
    with locked(order.folder), mirrored(order.folder, "launch") as exchange:
        try:
            return _run(order, exchange)
        except BaseException:
            if not order.folder.attempt.exists():  # nothing has run: the name is free again
                forget(order.folder)
            raise


def prepare(order: Order) -> None:
    """Makes the folder of a run that ``resume`` will begin, here or elsewhere.

    Raises:
        UsageError: the recipe is refused, the name is taken, or there is no checkpoint to begin
            from.
    """
    _check(order.recipe)
    folder = order.folder
    try:
        if folder.url and not Mirror(folder, "read").is_new():
            raise FileExistsError
        if folder.url:
            shutil.rmtree(folder.path, ignore_errors=True)  # a copy of a run that is no more
        folder.path.mkdir(parents=True)
    except FileExistsError:
        raise UsageError(
            f"the name {folder.name!r} is taken by {folder.url or folder.path}; choose another "
            f"with --name, or {_how_to_resume(folder)}"
        ) from None
    except OSError as error:
        raise UsageError(f"cannot make the run folder {folder.path}: {error.strerror}") from error
    try:
        _write_first_files(order)
        if folder.url:
            Mirror(folder, "launch").exchange()
    except BaseException:
        shutil.rmtree(folder.path)
        raise


def forget(folder: RunFolder) -> None:
    """Deletes a run's folder, here and in its object store."""
    if folder.url:
        Mirror(folder, "read").delete()
    shutil.rmtree(folder.path, ignore_errors=True)


def _write_first_files(order: Order) -> None:
    """Writes what a run folder holds before its first step."""
    folder = order.folder
    folder.recipe.write_text(order.recipe.to_yaml())
    record = describe_environment(order.workload, order.spec, order.recipe)
    record |= {"group": order.group or order.spec, "job_type": order.job_type}
    if order.begin_from is not None:
        from heliostat.checkpoint import fork

        other, step = order.begin_from
        path = fork(other.checkpoints, step, folder.checkpoints)
        record["from"] = [other.name, path.name]
    replace_text(folder.record, json.dumps(record, indent=2))


def _check(recipe: Recipe) -> None:
    """Refuses what can be refused before a folder is made."""
    recipe.check()
    recipe.layout.check()
    wandb_mode(recipe.tracker)


def resume(order: Order) -> Outcome:
    """Continues a run from its newest whole checkpoint, with the recipe it was started with.

    Raises:
        UsageError: the run has finished or is running now, or the machine lacks what its recipe
            needs.
        RunFailed: as ``create``.
    """
    _check(order.recipe)
    folder = order.folder
    if folder.url:
        folder.path.mkdir(parents=True, exist_ok=True)
    with locked(folder), mirrored(folder, "launch") as exchange:
        if folder.result.exists():
            raise UsageError(f"run {folder.name!r} has finished; see {folder.result}")
        record = json.loads(folder.record.read_text())
        if record.get("from") and not folder.checkpoints.exists():
            raise UsageError(f"run {folder.name!r} never got its first checkpoint; start it again")
        code = code_hash(order.workload, order.spec)
        if code != record.get("code"):
            logger.warning("the code has changed since the run began; its numbers may differ")
            folder.events.add("code-changed", code=code)
        if not order.supervised:
            folder.stop.unlink(missing_ok=True)
        return _run(order, exchange)


def _run(order: Order, exchange: Callable[[], None]) -> Outcome:
    folder = order.folder
    try:
        with (
            _signals(folder) as signals,
            _pools(order, signals) as pools,
            _progress(order) as display,
        ):
            signals.begun = True
            _supervise(order, pools, exchange, signals, display)
    except Stopped as stopped:
        if not folder.pruned:  # the search has said so
            folder.events.add("stopped", reason=str(stopped))
            if order.listen is None:  # whoever listens has asked for it
                logger.warning("%s; %s", stopped, _how_to_resume(folder))
        return Outcome(folder.path, {}, stopped=True)
    except BaseException as error:
        kind, retry = type(error), _is_worth_another_try(error)
        folder.events.add("failed", error=kind.__name__, reason=str(error)[:2000], retry=retry)
        raise
    folder.events.add("finished")
    return Outcome(folder.path, json.loads(folder.result.read_text()))


def _is_worth_another_try(error: BaseException) -> bool:
    """Whether the machinery failed and not the method or the user."""
    lost = isinstance(error, ActorLost | DeadlineExceeded | ConnectionError)
    return lost or type(error) is RunFailed or type(error).__module__.startswith("ray.exceptions")


def _supervise(
    order: Order,
    pools: Mapping[str, Pool[Any]],
    exchange: Callable[[], None],
    signals: _Signals,
    display: Progress | None,
) -> None:
    """Trains in a thread of its own, so that this one can show progress and honour signals."""
    failure: list[BaseException] = []

    def work() -> None:
        try:
            _train(order, pools, exchange)
        except BaseException as error:  # noqa: BLE001 - raised again by the waiting thread
            failure.append(error)

    worker = threading.Thread(target=work, name=f"run-{order.folder.name}", daemon=True)
    worker.start()
    while worker.is_alive():
        worker.join(0.2)
        if display is not None:
            display.poll()
        if time.monotonic() > signals.leave_by:
            raise RunFailed(
                f"{order.folder.name} did not save within {STOP_GRACE_S:g} s; its newest "
                f"checkpoint stands; {_how_to_resume(order.folder)}"
            )
    if failure:
        raise failure[0]


def _progress(order: Order) -> AbstractContextManager[Progress | None]:
    if not order.show_progress:
        return nullcontext()
    from heliostat.progress import Progress

    return Progress(order.folder.path, order.recipe.total_steps, order.folder.name)


def _how_to_resume(folder: RunFolder) -> str:
    return f"continue with: heliostat resume {folder.name} --runs {folder.home}"


@contextmanager
def locked(folder: RunFolder) -> Generator[None]:
    """Holds the run for this process; the system lets go of the lock when the process dies."""
    with folder.lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"run {folder.name!r} is being run by another process") from None
        file.truncate(0)
        file.write(json.dumps({"host": host_name(), "pid": os.getpid()}))
        file.flush()
        yield


@dataclass(slots=True)
class _Signals:
    """Turns SIGINT and SIGTERM into a request to save and leave; a second one leaves at once."""

    folder: RunFolder
    begun: bool = False
    """Whether there is something to save; before that a signal ends the start."""
    leave_by: float = math.inf
    """When to have left after the first, in seconds of ``time.monotonic``."""

    def install(self) -> None:
        """Takes the signals, again where Ray has taken them for itself."""
        if threading.current_thread() is threading.main_thread():
            for number in _STOPPING:
                signal.signal(number, self._ask)

    def _ask(self, number: int, _: object) -> None:
        if self.leave_by < math.inf:
            raise KeyboardInterrupt
        self.leave_by = time.monotonic() + STOP_GRACE_S
        self.folder.events.add("stop-asked", signal=signal.Signals(number).name)
        if not self.begun:
            raise Stopped("stopped before its first step of this attempt")
        self.folder.stop.touch()


@contextmanager
def _signals(folder: RunFolder) -> Generator[_Signals]:
    """Takes the signals for the length of a run, where this is the main thread.

    Raises:
        Stopped: a signal came before the run had begun.
    """
    before = {number: signal.getsignal(number) for number in _STOPPING}
    signals = _Signals(folder)
    signals.install()
    try:
        yield signals
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def _pools(order: Order, signals: _Signals) -> Generator[Mapping[str, Pool[Any]]]:
    """Connects to Ray where the layout needs it and starts its host actors; ends both."""
    layout = order.recipe.layout
    own = order.workload.brings_actors
    if not layout.uses_ray and not own:
        yield order.shared
        return
    from heliostat.ray_session import check_layout, ray_session

    hosts = pool_hosts(order.workload, layout)
    hosts = {name: hosts[name] for name in hosts if name not in order.shared}
    check = partial(check_layout, layout, hosts)
    with ray_session(order.address, check):
        signals.install()
        from heliostat.ray_pool import RayPool

        pools: dict[str, RayPool[Any]] = {}
        try:
            for name, asked in hosts.items():
                if asked.hosts and not own:
                    role, events = resolve(order.workload.roles[name]), order.folder.events
                    pools[name] = RayPool(name, role, order.recipe, asked, events)
            for pool in pools.values():
                pool.ready()
            yield {**order.shared, **pools}
        finally:
            for pool in pools.values():
                pool.close()


def _train(order: Order, pools: Mapping[str, Pool[Any]], exchange: Callable[[], None]) -> None:
    """Trains until done, again from the last checkpoint after each death within the budget.

    The attempt's number is a fence: a rank of an older attempt that outlives its controller
    finds a newer number at its next report and leaves without writing.
    """
    layout, folder = order.recipe.layout, order.folder
    ranks = layout.learners > 0 and not order.workload.brings_actors
    train = _train_on_ray if ranks else _train_here
    listen = None if ranks else order.listen  # Ray Train's ranks are told by no one
    first = int(folder.attempt.read_text()) + 1 if folder.attempt.exists() else 1
    for death in range(layout.max_restarts + 1):
        assignment = Assignment(
            order.workload,
            order.recipe,
            folder,
            first + death,
            pools,
            listen,
            host_name(),
        )
        replace_text(folder.attempt, str(assignment.attempt))
        folder.events.add("attempt", number=assignment.attempt)
        exchange()  # ranks on other machines look for the attempt's number
        try:
            train(assignment)
            exchange()
            return
        except Death as error:
            folder.events.add("learner-lost", reason=str(error)[:2000])
            if death == layout.max_restarts:
                raise RunFailed(
                    f"the learner died {death + 1} times, more than layout.max_restarts="
                    f"{layout.max_restarts} allows; {_how_to_resume(folder)}\n{error}"
                ) from error
            logger.warning("the learner died and starts again from its last checkpoint: %s", error)
        time.sleep(min(30.0, 2.0**death))


def _train_here(assignment: Assignment) -> None:
    import torch

    torch.set_num_threads(max(1, int(assignment.recipe.layout.learner_cpus)))
    try:
        train_rank(assignment, rank=0, world=1, device=None)
    except ActorLost as error:
        raise Death(str(error)) from error


def _train_on_ray(assignment: Assignment) -> None:
    from heliostat.ray_train import fit

    fit(assignment)
