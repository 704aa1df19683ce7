"""Data actors: deterministic readers of a sharded data set.

The order of rows follows from (seed, epoch) alone, and the reading position lives with the
learner, in its checkpoint. So a resumed run repeats nothing and skips nothing, and the number of
readers changes no number.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from heliostat.errors import UsageError
from heliostat.layout import Family
from heliostat.pool import Member, Pending, Pool, idempotent
from heliostat.seeding import numpy_generator

Row = TypeVar("Row")

logger = logging.getLogger("heliostat")


def share(size: int, member: Member) -> range:
    """Returns the rows of a data set of ``size`` that a member reads: contiguous, in order."""
    return range(size * member.index // member.count, size * (member.index + 1) // member.count)


class Reader(Generic[Row]):
    """Holds one share of a data set; a method's reader makes the rows in its constructor."""

    family: ClassVar[Family] = "data"

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    @idempotent
    def size(self) -> int:
        """Returns the number of rows of this share."""
        return len(self._rows)

    @idempotent
    def read(self, indices: np.ndarray) -> list[Row]:
        """Returns the rows at ``indices`` (int64, within this share) in that order."""
        return [self._rows[index] for index in indices]


@dataclass(frozen=True, slots=True)
class _Ahead(Generic[Row]):
    """A batch that was asked for before it was needed."""

    count: int
    order: np.ndarray
    """Place of each row of the answer in the batch, int64 [count]."""
    pending: Pending[list[list[Row]]]

    def rows(self) -> list[Row]:
        """Waits for the rows and puts them into the order asked for."""
        rows = [row for part in self.pending.result() for row in part]
        return [rows[place] for place in self.order]


class Stream(Generic[Row]):
    """The learner's reading position in a pool of readers: endless epochs in shuffled order.

    Each row comes once an epoch; a batch may begin in one epoch and end in the next. The next
    batch is read while the learner works on this one.
    """

    def __init__(
        self, pool: Pool[Any], reader: type[Reader[Row]], seed: int, data: str = ""
    ) -> None:
        """Asks the readers for their sizes.

        Args:
            pool: the readers.
            reader: their class.
            seed: of the order of rows.
            data: tells data sets apart; a saved position in another one is not taken up.

        Raises:
            ValueError: the data set is empty.
        """
        self._pool: Pool[Reader[Row]] = pool
        self._reader = reader
        self._seed = seed
        self._data, self._changed = data, False
        sizes = self._pool.each(reader.size)
        self._ends = np.cumsum(sizes)
        self.size = int(self._ends[-1])
        """Rows in the whole data set."""
        if self.size == 0:
            raise ValueError(f"the data set behind pool {pool.name!r} has no rows; give it some")
        self.position = 0
        """Rows handed out so far; the next has this place in the endless order."""
        self._ahead: _Ahead[Row] | None = None

    def next(self, count: int) -> list[Row]:
        """Returns the next ``count`` rows and starts reading as many more."""
        ahead = self._ahead
        if ahead is None or ahead.count != count:
            ahead = self._start(self.position, count)
        self.position += count
        self._ahead = self._start(self.position, count)
        return ahead.rows()

    def reread(self, start: int, count: int) -> list[Row]:
        """Returns rows ``start … start + count`` of the endless order; the position stays.

        Raises:
            UsageError: the data set is another than the saved position's, so are its rows.
        """
        if self._changed:
            raise UsageError(
                f"the data of pool {self._pool.name!r} changed while answers to rows {start}…"
                f"{start + count} were under way; put the old data back, or begin a new run"
            )
        return self._start(start, count).rows()

    def state(self) -> dict[str, Any]:
        """Returns the position and what it is a position in, for the checkpoint."""
        return {"position": self.position, "fingerprint": self._data}

    def load(self, state: dict[str, Any]) -> None:
        """Goes back to a saved position; warns and begins anew where the data set has changed."""
        saved = state.get("fingerprint", self._data)
        self._changed = saved != self._data
        self.position = 0 if self._changed else state["position"]
        self._ahead = None
        if self._changed:
            found = (self._pool.name, saved, self._data, state["position"])
            logger.warning("pool %r: expected data %s, found %s; row %d -> 0", *found)

    def indices(self, start: int, count: int) -> np.ndarray:
        """Returns rows ``start … start + count`` of the endless order, int64 [count]."""
        wanted: list[np.ndarray] = []
        while count > 0:
            epoch, offset = divmod(start, self.size)
            order = numpy_generator(self._seed, "epoch", epoch).permutation(self.size)
            part = order[offset : offset + count]
            wanted.append(part)
            start += len(part)
            count -= len(part)
        return np.concatenate(wanted)

    def _start(self, start: int, count: int) -> _Ahead[Row]:
        indices = self.indices(start, count)
        owners = np.searchsorted(self._ends, indices, side="right")
        firsts = np.concatenate([[0], self._ends[:-1]])
        local = indices - firsts[owners]
        shares = [local[owners == member] for member in range(self._pool.num_members)]
        order = np.argsort(np.argsort(owners, kind="stable"), kind="stable")
        return _Ahead(count, order, self._pool.start(self._reader.read, shares))
