"""The process behind ``verifier.Verifier``: it imports a grader once and forks workers from it.

A worker that spends more than its time on one answer is killed, and another is forked at once: no
import is repeated. The process answers over one socket in JSON, and ends when its client does.

A grader is a function ``prepare(gold) -> judge | None``: None says that the gold answer cannot be
read, ``judge(answer)`` whether an answer equals it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import cache
from importlib import import_module
from multiprocessing.connection import Connection, wait

from algorithms.t1.verifier import Reason

Judge = Callable[[str], bool]
Prepare = Callable[[str], Judge | None]
Job = tuple[int, str, str]
"""Its number, the gold answer and the given one."""

_FORK = multiprocessing.get_context("fork")
_GIB = 2**30
_GOLD_READ = -1
"""What a worker sends between reading the gold answer and judging the given one."""


class _Worker:
    """One forked process, busy with at most one job."""

    def __init__(self, client: Connection, prepare: Prepare, limit_s: float) -> None:
        self.connection, theirs = _FORK.Pipe()
        self._limit_s = limit_s
        self._process = _FORK.Process(
            target=_work, args=(theirs, client, prepare, limit_s), daemon=True
        )
        self._process.start()
        theirs.close()
        self.job: Job | None = None
        self.gold_read = False
        self.deadline = 0.0

    def give(self, job: Job) -> None:
        self.job, self.gold_read = job, False
        self.deadline = time.monotonic() + self._limit_s
        self.connection.send(job[1:])

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()


class _Service:
    """Deals jobs out to workers; every job gets one reason."""

    def __init__(self, client: Connection, prepare: Prepare, limit_s: float, count: int) -> None:
        self._client = client
        self._make = lambda: _Worker(client, prepare, limit_s)
        self._workers = [self._make() for _ in range(count)]
        self._jobs: deque[Job] = deque()
        self._retried: set[int] = set()

    def serve(self) -> None:
        """Judges what the client sends, ``[job, gold, answer]`` each, until it hangs up.

        Sends back ``[job, reason]``. A job whose worker died is tried once more.
        """
        while True:
            for worker in self._workers:
                if worker.job is None and self._jobs:
                    worker.give(self._jobs.popleft())
            busy = [worker for worker in self._workers if worker.job is not None]
            first = min((worker.deadline for worker in busy), default=None)
            left = None if first is None else max(0.0, first - time.monotonic())
            ready = wait([self._client, *(worker.connection for worker in busy)], left)
            try:
                if self._client in ready:
                    self._jobs.append(tuple(json.loads(self._client.recv_bytes())))
                for worker in busy:
                    if worker.connection in ready:
                        self._hear(worker)
                    elif time.monotonic() >= worker.deadline:
                        reason = Reason.TIMEOUT if worker.gold_read else Reason.GOLD_UNPARSED
                        self._finish(worker, reason)
                        self._replace(worker)
            except (EOFError, OSError):  # of the client: a worker's own end is met in _hear
                break
        for worker in self._workers:
            worker.kill()

    def _hear(self, worker: _Worker) -> None:
        try:
            found: int = worker.connection.recv()
        except (EOFError, OSError):
            assert worker.job is not None, "only busy workers are heard"
            if worker.job[0] in self._retried:
                self._finish(worker, Reason.ERROR)
            else:
                self._retried.add(worker.job[0])
                self._jobs.appendleft(worker.job)
            self._replace(worker)
            return
        if found == _GOLD_READ:
            worker.gold_read = True
        else:
            self._finish(worker, Reason(found))

    def _finish(self, worker: _Worker, reason: Reason) -> None:
        assert worker.job is not None, "only busy workers finish"
        self._retried.discard(worker.job[0])
        self._client.send_bytes(json.dumps([worker.job[0], reason]).encode())
        worker.job = None

    def _replace(self, worker: _Worker) -> None:
        worker.kill()
        self._workers[self._workers.index(worker)] = self._make()


def _work(connection: Connection, client: Connection, prepare: Prepare, limit_s: float) -> None:
    """Judges jobs one after the other; ends when the host has ended."""
    client.close()  # else the client would not see that the host has died
    resource.setrlimit(resource.RLIMIT_AS, (2 * _GIB, 2 * _GIB))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    host = os.getppid()
    prepared = cache(prepare)
    while True:
        while not connection.poll(1.0):
            if os.getppid() != host:
                return
        gold, answer = connection.recv()
        signal.setitimer(signal.ITIMER_REAL, 2 * limit_s + 1)  # ends it should the host be gone
        judge = _read(prepared, gold)
        connection.send(_GOLD_READ)
        connection.send(int(Reason.GOLD_UNPARSED if judge is None else _judged(judge, answer)))
        signal.setitimer(signal.ITIMER_REAL, 0)


def _read(prepare: Prepare, gold: str) -> Judge | None:
    try:
        return prepare(gold)
    except Exception:  # noqa: BLE001 - a grader may raise anything over a text it cannot read
        return None


def _judged(judge: Judge, answer: str) -> Reason:
    try:
        return Reason.OK if judge(answer) else Reason.WRONG
    except (MemoryError, RecursionError, OverflowError):
        return Reason.TIMEOUT
    except Exception:  # noqa: BLE001 - what cannot be read is not the right answer
        return Reason.WRONG


def main(arguments: list[str]) -> None:
    """Runs the host: ``FD MODULE:FUNCTION SECONDS WORKERS``."""
    descriptor, path, limit_s, count = arguments
    client = Connection(int(descriptor))
    module, _, name = path.partition(":")
    try:
        prepare: Prepare = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        client.send_bytes(json.dumps(f"{type(error).__name__}: {error}").encode())
        return
    client.send_bytes(json.dumps("").encode())
    _Service(client, prepare, float(limit_s), int(count)).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
