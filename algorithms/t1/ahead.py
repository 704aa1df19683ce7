"""Answers sampled ahead of the learner, never with weights older than ``max_staleness`` updates."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from algorithms.t1.roles import Samplers
from algorithms.t1.tasks import Row
from algorithms.t1.workload import T1Recipe
from heliostat import Pending, Run, Weights
from heliostat.actors.data import Stream
from heliostat.actors.environment import Episodes, Job
from heliostat.pool import Ready


class Ahead:
    """Batches under way, oldest first.

    With ``max_staleness`` 0 sampling and learning take turns; with 1 the samplers work on the next
    batch, with the weights before this update, while the learner works on this one.
    """

    def __init__(self, run: Run[T1Recipe], problems: Stream[Row]) -> None:
        self._run = run
        self._problems = problems
        self._started = 0
        self._batches: deque[Pending[list[Episodes]]] = deque()

    @property
    def problems(self) -> Stream[Row]:
        """Where the prompts come from."""
        return self._problems

    @property
    def num_ready(self) -> int:
        """Sampled batches that wait for this rank's learner; 0 tells that it will wait for them."""
        return sum(batch.done() for batch in self._batches)

    def next(self, weights: Weights, update: int) -> list[Episodes]:
        """Starts what may be started with these weights, then waits for the batch of ``update``."""
        recipe = self._run.recipe
        while self._started < min(recipe.steps, update + recipe.max_staleness + 1):
            self._start(weights)
        return self._batches.popleft().result()

    def _start(self, weights: Weights) -> None:
        run, size = self._run, self._run.recipe.prompts_per_job
        rows = self._problems.next(run.recipe.prompts_per_step)[run.rank :: run.world]
        jobs = [
            Job(rows[start : start + size], run.seed("answers", self._started, run.rank, start))
            for start in range(0, len(rows), size)
        ]
        self._batches.append(run.pool(Samplers).start(Samplers.play, jobs, weights))
        self._started += 1

    def state(self) -> dict[str, Any]:
        """Waits for the batches under way and returns them, of all ranks, for the checkpoint."""
        mine = [[part.state() for part in batch.result()] for batch in self._batches]
        ranks = self._run.gather(mine)
        batches = [
            [part for parts in batch for part in parts] for batch in zip(*ranks, strict=True)
        ]
        return {"started": self._started, "batches": batches}

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes up saved batches, dealt out anew over the ranks there are."""
        self._started = state["started"]
        self._batches.clear()
        rank, world = self._run.rank, self._run.world
        for saved in state["batches"]:
            parts = [Episodes.of(part) for part in saved]
            if len(parts) < world:  # saved by fewer ranks: deal out prompts instead of parts
                parts = [piece for part in parts for piece in part.split(world)]
            self._batches.append(Ready(parts[rank::world]))
