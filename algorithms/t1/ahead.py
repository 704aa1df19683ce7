"""Answers sampled ahead of the learner, no token with weights over ``max_staleness`` updates old.

A batch is started at most ``max_staleness`` updates before it is needed. With ``partial_tokens`` a
call may pause: what is written is kept, with its log-probabilities and versions, and goes on under
newer weights at the next update; the last call before the batch is needed does not pause. So each
prompt's answers belong to one batch, whoever was slow, and a batch is late for no one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from algorithms.t1.objective import informative_groups
from algorithms.t1.roles import Ask, Samplers, is_aborted
from algorithms.t1.sampler import NEVER, Pause
from algorithms.t1.tasks import Row
from algorithms.t1.workload import T1Recipe
from heliostat import Pending, Run, Weights
from heliostat.actors.data import Stream
from heliostat.actors.environment import Episodes, Job
from heliostat.pool import Ready


@dataclass(frozen=True, slots=True)
class _Share:
    """The prompts of one job and what is written of their answers."""

    job: Job
    places: np.ndarray
    """Of the prompts in the stream's endless order, int64 [P]."""
    answers: Episodes | None = None

    @property
    def is_complete(self) -> bool:
        return self.answers is not None and not is_aborted(self.answers.fields)

    def state(self) -> dict[str, Any]:
        assert self.answers is not None, "a settled share has answers"
        return {**self.answers.state(), "places": self.places}

    @classmethod
    def of(cls, state: Mapping[str, Any], problems: Stream[Row]) -> _Share:
        """Rebuilds what ``state`` returned; reads the prompts again where they are still needed."""
        places = np.asarray(state["places"])
        share = cls(Job([], state["seed"]), places, Episodes.of(state))
        if share.is_complete:
            return share
        start = int(places.min())
        rows = problems.reread(start, int(places.max()) - start + 1)
        return replace(share, job=Job([rows[at - start] for at in places], state["seed"]))

    def split(self, count: int) -> list[_Share]:
        """Cuts the prompts into ``count`` parts of nearly equal size."""
        assert self.answers is not None, "a settled share has answers"
        rows: Sequence[Row] = self.job.task
        places = np.array_split(self.places, count)
        cuts = np.cumsum([0, *map(len, places)])
        return [
            replace(self, job=replace(self.job, task=rows[a:b]), places=part, answers=answers)
            for part, answers, a, b in zip(
                places, self.answers.split(count), cuts, cuts[1:], strict=False
            )
        ]


@dataclass(slots=True)
class _Batch:
    """This rank's prompts of one update."""

    shares: list[_Share]
    asked: list[int] = field(default_factory=list[int])
    """The shares that the call under way is about."""
    call: Pending[list[Episodes]] = field(default_factory=lambda: Ready(list[Episodes]()))
    may_pause: bool = True
    """Whether the call may leave answers that must go on."""

    def settle(self) -> None:
        """Waits for the call under way."""
        for place, answers in zip(self.asked, self.call.result(), strict=True):
            self.shares[place] = replace(self.shares[place], answers=answers)
        self.asked, self.call = [], Ready([])


class Ahead:
    """Batches under way, oldest first.

    With ``max_staleness`` 0 sampling and learning take turns; with 1 the samplers work on the next
    batch, with the weights before this update, while the learner works on this one.
    """

    def __init__(self, run: Run[T1Recipe], problems: Stream[Row]) -> None:
        self._run = run
        self._problems = problems
        self._started = 0
        self._batches: deque[_Batch] = deque()
        recipe = run.recipe
        self._pause = Pause(recipe.partial_tokens or None, recipe.sample_deadline_s or float("inf"))

    @property
    def problems(self) -> Stream[Row]:
        """Where the prompts come from."""
        return self._problems

    @property
    def num_ready(self) -> int:
        """Sampled batches that wait for this rank's learner; 0 tells that it will wait for them."""
        return sum(batch.call.done() for batch in self._batches)

    def next(self, weights: Weights, update: int) -> list[Episodes]:
        """Goes on with and starts what may be with these weights; returns the batch of ``update``.

        Its prompts are those of one step, and with ``dynamic_sampling`` those drawn in place of
        prompts whose answers all earned the same; these are in it too, for the metrics.
        """
        recipe = self._run.recipe
        for age, batch in enumerate(self._batches):
            if batch.may_pause:
                batch.settle()
                unfinished = [i for i, s in enumerate(batch.shares) if not s.is_complete]
                self._send(batch, unfinished, weights, pause=age > 0)
        while self._started < min(recipe.steps, update + recipe.max_staleness + 1):
            seed = ("answers", self._started)
            ahead = self._started > update
            self._batches.append(self._begin(recipe.prompts_per_step, seed, weights, ahead))
            self._started += 1
        batch = self._batches.popleft()
        batch.settle()
        self._top_up(batch, weights, update)
        return [share.answers for share in batch.shares if share.answers is not None]

    def _begin(
        self, count: int, seed: tuple[str | int, ...], weights: Weights, pause: bool
    ) -> _Batch:
        """Starts answering the next ``count`` prompts, this rank its share of them."""
        run, size = self._run, self._run.recipe.prompts_per_job
        first = self._problems.position
        rows = self._problems.next(count)[run.rank :: run.world]
        places = np.arange(first, first + count)[run.rank :: run.world]
        shares = [
            _Share(
                Job(rows[start : start + size], run.seed(*seed, run.rank, start)),
                places[start : start + size],
            )
            for start in range(0, len(rows), size)
        ]
        batch = _Batch(shares)
        self._send(batch, list(range(len(shares))), weights, pause)
        return batch

    def _send(self, batch: _Batch, which: list[int], weights: Weights, pause: bool) -> None:
        when = self._pause if pause else NEVER
        asks = [Ask(batch.shares[i].job, batch.shares[i].answers, when) for i in which]
        batch.asked = which
        batch.call = self._run.pool(Samplers).start(Samplers.answer, asks, weights)
        batch.may_pause = when != NEVER

    def _top_up(self, batch: _Batch, weights: Weights, update: int) -> None:
        """Draws further prompts for those that teach nothing, on all ranks alike.

        Ends where the batch is full, its rounds are used up, or the data set has been gone through
        once for this update; what is there is then trained on.
        """
        run, recipe = self._run, self._run.recipe
        drawn = recipe.prompts_per_step
        for number in range(recipe.dynamic_sampling):
            mixed = sum(_num_mixed(share.answers) for share in batch.shares)
            missing = recipe.prompts_per_step - round(run.sum(mixed))
            missing = min(missing, self._problems.size - drawn)
            if missing <= 0:
                return
            more = self._begin(missing, ("more answers", update, number), weights, pause=False)
            more.settle()
            batch.shares += more.shares
            drawn += missing

    def state(self) -> dict[str, Any]:
        """Waits for the calls under way and returns the batches, of all ranks, to be saved."""
        for batch in self._batches:
            batch.settle()
        mine = [[share.state() for share in batch.shares] for batch in self._batches]
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
            shares = [_Share.of(part, self._problems) for part in saved]
            if len(shares) < world:  # saved by fewer ranks: deal out prompts instead of parts
                shares = [piece for share in shares for piece in share.split(world)]
            self._batches.append(_Batch(shares[rank::world]))


def _num_mixed(answers: Episodes | None) -> int:
    """Counts prompts of which some answers earned more than others."""
    assert answers is not None, "a settled share has answers"
    return int(informative_groups(torch.from_numpy(answers["reward"][0])).sum())
