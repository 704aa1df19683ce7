"""The run: all that a method's ``train`` receives, and the only door to the platform from it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from heliostat import checkpoint
from heliostat.checkpoint import State
from heliostat.errors import Stopped
from heliostat.folder import RunFolder
from heliostat.pool import LocalPool, Member, Pool
from heliostat.recipe import Recipe
from heliostat.seeding import derive
from heliostat.tracker import Tracker
from heliostat.workload import Workload, resolve

if TYPE_CHECKING:
    import torch
    from torch import nn

    from heliostat.learner import Learner, Optimizers, Publish

RecipeT = TypeVar("RecipeT", bound=Recipe)
RoleT = TypeVar("RoleT")
Value = TypeVar("Value")
ModuleT = TypeVar("ModuleT", bound="nn.Module")


@dataclass(frozen=True, slots=True)
class Assignment:
    """What the launcher hands to every learner rank."""

    workload: Workload
    recipe: Recipe
    folder: RunFolder
    attempt: int
    pools: Mapping[str, Pool[Any]]
    """Pools of Ray actors by name; the others are made in the rank's own process."""
    listen: Callable[[int, Mapping[str, float]], None] | None = None
    """Told each row that is logged, after the checkpoint of its step."""
    host: str = ""
    """Machine of the launching process."""


class Run(Generic[RecipeT]):
    """One rank's view of a run."""

    def __init__(
        self,
        assignment: Assignment,
        tracker: Tracker,
        rank: int = 0,
        world: int = 1,
        device: torch.device | None = None,
    ) -> None:
        import torch

        self.recipe: RecipeT = cast("RecipeT", assignment.recipe)
        self.rank = rank
        """This process's place among the learners, from 0."""
        self.world = world
        """How many learners there are."""
        self.device = device or torch.device("cpu")
        self.tracker = tracker
        """For tables, figures, histograms and videos; metrics go through ``report``."""
        self.folder = assignment.folder
        self._workload = assignment.workload
        self._attempt = assignment.attempt
        self._listen = assignment.listen
        self._pools = dict(assignment.pools)
        self._names = {resolve(path): name for name, path in self._workload.roles.items()}
        self._phases: dict[str, float] = {}
        self._counts: dict[str, float] = {}
        self._score: float | None = None
        self._last_report = time.perf_counter()

    def pool(self, role: type[RoleT]) -> Pool[RoleT]:
        """Returns the pool of a role that the workload declares.

        Raises:
            KeyError: the workload declares no such role.
        """
        if role not in self._names:
            raise KeyError(
                f"{role.__module__}:{role.__qualname__} is no role of workload "
                f"{self._workload.name!r}; add it to Workload.roles {dict(self._workload.roles)}"
            )
        name = self._names[role]
        if name not in self._pools:
            hosts = self.recipe.layout.hosts_of(cast("Any", role).family)
            make = cast("Callable[[Any, Member], RoleT]", role)
            self._pools[name] = LocalPool(name, make, self.recipe, hosts.num_members)
        return self._pools[name]

    def learner(
        self,
        model: ModuleT,
        optimizers: Callable[[ModuleT], Optimizers],
        publish: Publish = dict,
    ) -> Learner[ModuleT]:
        """Returns the model prepared for this layout's ranks, device and precision.

        Args:
            model: taken over, and changed in place.
            optimizers: makes the optimisers of a model.
            publish: turns the model's state into the weights that actors load, such as by merging
                adapters.
        """
        from heliostat.learner import Learner as Kind

        layout = self.recipe.layout
        if self.world > 1 and layout.parallelism == "deepspeed":
            from heliostat.deepspeed_learner import DeepSpeedLearner as Kind
        return Kind(model, optimizers, layout, self.device, self.world, publish)

    def frozen(self, model: ModuleT) -> ModuleT:
        """Returns a copy that is not trained, made before ``learner`` takes the model over."""
        from heliostat.learner import frozen_copy

        return frozen_copy(model, self.recipe.layout, self.device, self.world)

    def seed(self, *path: str | int) -> int:
        """Returns the seed in [0, 2**63) of the run's stream ``path``, equal on every rank."""
        return derive(self.recipe.seed, *path)

    def sum(self, value: float) -> float:
        """Adds a number over all ranks; every rank gets the total."""
        return self._reduce(value, "SUM")

    def largest(self, value: float) -> float:
        """Returns the largest of the ranks' numbers to every rank."""
        return self._reduce(value, "MAX")

    def gather(self, value: Value) -> list[Value]:
        """Returns every rank's value to every rank, in the order of ranks."""
        if self.world == 1:
            return [value]
        from torch import distributed

        values: list[Any] = [None] * self.world
        distributed.all_gather_object(values, value)
        return values

    def _reduce(self, value: float, operation: str) -> float:
        if self.world == 1:
            return value
        import torch
        from torch import distributed

        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        distributed.all_reduce(total, getattr(distributed.ReduceOp, operation))
        return float(total)

    def restore(self) -> State | None:
        """Returns the newest whole checkpoint's state, or None where the run is new.

        What was logged after that checkpoint is forgotten, since it will be logged again.
        """
        found = checkpoint.latest(self.folder.checkpoints)
        step, state = found or (-1, None)
        if found:
            self._score = checkpoint.score_of(self.folder.checkpoints, step)
        if self.rank == 0:
            self.tracker.rewind(step)
            event = "restored" if found else "began"
            self.folder.events.add(event, step=step, process=os.getpid(), world=self.world)
        return state

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after ``step``: every ``checkpoint_every`` and at the end."""
        return step % self.recipe.checkpoint_every == 0 or step == self.recipe.total_steps

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Times a part of a step; the next report carries it as ``perf/<name>_s``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self._phases[name] = self._phases.get(name, 0.0) + spent

    def count(self, name: str, amount: float) -> None:
        """Counts this rank's part of a step's work; every rank must, in the same order.

        The next report carries the sum over ranks as ``perf/<name>_per_s``.
        """
        self._counts[name] = self._counts.get(name, 0.0) + self.sum(amount)

    def report(
        self,
        step: int,
        metrics: Mapping[str, float],
        state: Callable[[], State],
        last: bool = False,
    ) -> None:
        """Logs the step's metrics; saves ``state()`` where due or where a stop was asked for.

        Every rank calls it after every step, so that ``state`` may gather over ranks.

        Args:
            step: steps done so far, over all phases.
            metrics: floats by name, such as ``train/loss``; rank 0's are logged.
            state: makes the tree that ``restore`` will return; called only when needed.
            last: whether the method ends here, before the recipe's last step; saves too.

        Raises:
            Stopped: the state was saved and the run must end here.
        """
        stop = self._must_stop()
        if self.rank == 0:
            now = time.perf_counter()
            took = now - self._last_report
            timed = {f"perf/{name}_s": spent for name, spent in self._phases.items()}
            timed |= {f"perf/{name}_per_s": done / took for name, done in self._counts.items()}
            timed["perf/step_s"] = took
            self._last_report = now
            self.tracker.log({**metrics, **timed}, step)
        self._phases.clear()
        self._counts.clear()
        self._keep_score(metrics)
        if stop or last or self.due(step):
            self._save(step, state())
        self._tell(step, metrics)
        if stop:
            raise Stopped(f"stopped after step {step}, whose checkpoint is saved")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs metrics of an earlier step, such as scores that evaluation actors sent late."""
        self._keep_score(metrics)
        if self.rank == 0:
            self.tracker.log(metrics, step)
        self._tell(step, metrics)

    def _tell(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._listen is not None and self.rank == 0:
            self._listen(step, metrics)

    def _keep_score(self, metrics: Mapping[str, float]) -> None:
        if self._workload.score is not None:
            self._score = metrics.get(self._workload.score, self._score)

    def _save(self, step: int, state: State) -> None:
        if self.rank == 0:
            path = checkpoint.save(self.folder.checkpoints, step, state, self._score)
            checkpoint.prune(self.folder.checkpoints, self.recipe.keep_checkpoints, step)
            self.folder.events.add("saved", step=step, path=path.name)
            self.tracker.log_checkpoint(path, step)

    def _must_stop(self) -> bool:
        """Rank 0 looks at the run folder and tells the other ranks what it saw."""
        stop = False
        if self.rank == 0:
            if int(self.folder.attempt.read_text()) != self._attempt:
                raise Stopped(f"attempt {self._attempt} was replaced by a newer one")
            stop = self.folder.stop.exists()
        return self.largest(stop) > 0
