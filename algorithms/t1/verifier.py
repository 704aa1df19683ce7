"""The verifier: a typed outcome for every answer, within a time limit, whatever the answer is.

Numbers, words and equal texts are compared here, exactly. What needs computer algebra goes to
worker processes that are killed when an answer takes too long (``verifier_host``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from multiprocessing.connection import Connection, Pipe
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from algorithms.t1.answers import LONGEST_ANSWER, is_readable, same_value
from heliostat.errors import UsageError

Pair = tuple[str, str]
"""A gold answer and a given one."""

_START_S = 180.0
"""How long a host may take to import its grader, on a busy machine."""
_CACHED = 65_536
_IN_FLIGHT = 256
"""Jobs sent ahead of their outcomes; few enough that neither side ever waits to write."""


class Reason(IntEnum):
    """Why an answer got its score; fits an uint8."""

    OK = 0
    """Right: score 1."""
    WRONG = 1
    """An answer, but not the right one: score 0."""
    NO_ANSWER = 2
    """Ended without an answer, or did not end: score 0."""
    GOLD_UNPARSED = 3
    """The data set's own answer could not be read: no score, which is not the policy's fault."""
    TIMEOUT = 4
    """Judging it would cost more time or memory than is allowed: score 0."""
    ERROR = 5
    """The verifier failed: no score."""

    @property
    def score(self) -> int | None:
        """1, 0, or None where the answer must teach nothing."""
        if self in (Reason.GOLD_UNPARSED, Reason.ERROR):
            return None
        return int(self is Reason.OK)


def reason_shares(reasons: npt.NDArray[np.uint8]) -> dict[str, float]:
    """Returns the share of each reason, by its lower-case name; all of them, in order."""
    counts = np.bincount(reasons.reshape(-1), minlength=len(Reason))
    return {reason.name.lower(): counts[reason] / max(1, reasons.size) for reason in Reason}


@dataclass(frozen=True, slots=True)
class Grader:
    """How answers are compared where exact comparison cannot tell."""

    path: str = ""
    """``module:function`` of what a worker runs, see ``verifier_host``; empty: equal texts only."""
    extra: str = ""
    """The extra of the package that provides it."""
    exact: bool = True
    """Whether exact comparison comes first; a grader that scores by its own rules wants it not."""
    longest: int = LONGEST_ANSWER
    """Characters of the longest answer that is judged."""


GRADERS: Mapping[Literal["exact", "math", "gym"], Grader] = {
    "exact": Grader(),
    "math": Grader("algorithms.t1.math_grader:prepare", "math"),
    "gym": Grader("algorithms.t1.gym_grader:prepare", "reasoning", exact=False, longest=8192),
}


class Verifier:
    """Judges answers; equal pairs are judged once. Thread-safe; ``close`` ends its processes."""

    def __init__(self, grader: Grader, limit_s: float = 5.0, workers: int = 1) -> None:
        """Starts nothing: the worker processes come with the first answer that needs them.

        Args:
            grader: decides what exact comparison cannot.
            limit_s: seconds that one answer may take.
            workers: processes that judge at the same time.
        """
        self._grader = grader
        self._limit_s = limit_s
        self._workers = workers
        self._known: OrderedDict[Pair, Reason] = OrderedDict()
        self._host: _Host | None = None
        self._lock = threading.Lock()

    def __call__(self, pairs: Sequence[Pair]) -> list[Reason]:
        """Judges pairs of (gold, given), in order; every pair gets exactly one outcome.

        Raises:
            UsageError: the grader's package is not installed.
        """
        with self._lock:
            found = {pair: self._quick(pair) for pair in dict.fromkeys(pairs)}
            unknown = [pair for pair, reason in found.items() if reason is None]
            judged = dict(zip(unknown, self._ask(unknown), strict=True))
            for pair, reason in judged.items():
                if reason is not Reason.ERROR:
                    self._known[pair] = reason
            while len(self._known) > _CACHED:
                self._known.popitem(last=False)
        return [judged[pair] if (reason := found[pair]) is None else reason for pair in pairs]

    def close(self) -> None:
        """Ends the worker processes; the next answer that needs them starts them again."""
        with self._lock:
            if self._host is not None:
                self._host.close()
                self._host = None

    @property
    def process(self) -> int | None:
        """The process id of the host, None while there is none."""
        return None if self._host is None else self._host.pid

    def _quick(self, pair: Pair) -> Reason | None:
        """Judges without computer algebra, None where that cannot tell."""
        gold, given = pair
        if pair in self._known:
            self._known.move_to_end(pair)
            return self._known[pair]
        if len(given) > self._grader.longest:
            return Reason.TIMEOUT
        if not " ".join(given.split()).isprintable():
            return Reason.WRONG
        if self._grader.exact and (not self._grader.path or is_readable(gold)):
            equal = same_value(given, gold)
            if equal is not None or not self._grader.path:
                return Reason.OK if equal else Reason.WRONG
        return None

    def _ask(self, pairs: Sequence[Pair]) -> list[Reason]:
        """Has pairs judged by the host; one that fails is replaced once, then gives up on them."""
        outcomes: dict[int, Reason] = {}
        for _ in range(2):
            if len(outcomes) == len(pairs):
                break
            if self._host is None:
                self._host = _Host(self._grader, self._limit_s, self._workers)
            if not self._host.judge(pairs, outcomes):
                self._host.close()
                self._host = None
        return [outcomes.get(job, Reason.ERROR) for job in range(len(pairs))]


class _Host:
    """The client's end of one host process."""

    def __init__(self, grader: Grader, limit_s: float, workers: int) -> None:
        self._limit_s = limit_s
        self._workers = workers
        self._connection, theirs = Pipe()
        settings = (str(theirs.fileno()), grader.path, str(limit_s), str(workers))
        path = os.pathsep.join(part for part in sys.path if part)
        process = subprocess.Popen(
            [sys.executable, "-m", "algorithms.t1.verifier_host", *settings],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        self.pid = process.pid
        self.close = weakref.finalize(self, _end, process, self._connection)
        try:
            complaint = self._receive(_START_S)
        except (OSError, EOFError) as error:
            complaint = f"none: {type(error).__name__} while it started"
        if complaint:
            self.close()
            raise UsageError(
                f"expected the verifier's grader {grader.path!r}, found {complaint}; "
                f"pip install 'heliostat[{grader.extra}]', or take verifier=exact"
            )

    def judge(self, pairs: Sequence[Pair], outcomes: dict[int, Reason]) -> bool:
        """Adds the missing outcomes by job, the place in ``pairs``; False where the host failed."""
        missing = [job for job in range(len(pairs)) if job not in outcomes]
        rounds = -(-len(missing) // self._workers)
        deadline = time.monotonic() + (2 * rounds + 2) * (self._limit_s + 1)
        sent = done = 0
        try:
            while done < len(missing):
                while sent < min(len(missing), done + _IN_FLIGHT):
                    self._send([missing[sent], *pairs[missing[sent]]])
                    sent += 1
                job, reason = self._receive(deadline - time.monotonic())
                outcomes[job] = Reason(reason)
                done += 1
        except (OSError, EOFError):
            return False
        return True

    def _send(self, job: list[Any]) -> None:
        self._connection.send_bytes(json.dumps(job).encode())

    def _receive(self, limit_s: float) -> Any:  # noqa: ANN401 - JSON
        if not self._connection.poll(max(0.0, limit_s)):
            raise TimeoutError(f"expected an answer of the verifier within {limit_s:.0f} s")
        return json.loads(self._connection.recv_bytes())


def _end(process: subprocess.Popen[bytes], connection: Connection[Any, Any]) -> None:
    """Hangs up, which lets the host kill its workers and go; kills one that does not."""
    connection.close()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
