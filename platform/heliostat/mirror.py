"""Run folders in an object store: a local folder that is kept in step with a URL.

Each file of a run has one writer. The launching process writes what says how the run is going; the
first learner rank, which may live on another machine, writes what it learned. A ``Mirror`` sends
what its own process wrote and fetches what the other one did, so that neither can undo the other.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast

import fsspec

from heliostat.errors import UsageError
from heliostat.folder import ALIVE_S, RunFolder, replace_text

Part = Literal["launch", "learn", "read"]
"""Whose files a process writes: the launcher's, the first rank's, or none."""

INTERVAL_S = 2.0
"""Shortest pause between two exchanges; long ones are made at most a tenth of the time."""
_LEARNED = ("metrics.jsonl", "histograms.jsonl", "result.json")
_LEARNED_FOLDERS = ("checkpoints", "tables", "figures", "wandb", "tensorboard", "videos")
_HEAVY = ("checkpoints", "wandb", "tensorboard")
_PRIVATE = (".lock", ".ray_train")
_CONTROL = ("attempt", "stop")
_MARKER = "COMPLETE"
logger = logging.getLogger("heliostat")


def is_url(place: str) -> bool:
    """Whether a place of run folders is an object store's URL and no local path."""
    return "://" in place and not place.startswith("file://")


def local_copy(url: str, use: str = "work") -> Path:
    """Returns the local folder that stands for a URL on this machine.

    Args:
        url: of a run, or of a place of runs.
        use: ``work`` for the processes of the run, another for those that only look at it.

    Raises:
        UsageError: the folder for such copies is another user's, or others may write to it.
    """
    own = Path(tempfile.gettempdir()) / f"heliostat-{os.getuid()}"
    base = Path(os.environ.get("HELIOSTAT_CACHE") or own)
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = base.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise UsageError(
            f"expected a folder that only this user may change at {base}, found another; "
            "name one with HELIOSTAT_CACHE"
        )
    return base / use / url.replace("://", "/").strip("/")


def open_store(url: str) -> tuple[Any, str]:
    """Returns fsspec's file system for a URL and the path in it.

    Raises:
        UsageError: no library is installed for the URL's protocol.
    """
    try:
        system, path = cast("tuple[Any, str]", fsspec.url_to_fs(url, use_listings_cache=False))
    except (ImportError, ValueError) as error:
        raise UsageError(
            f"--runs: expected a folder or a URL that fsspec can open, found {url!r}: {error}; "
            "install the protocol's library, such as s3fs for s3://"
        ) from error
    return system, path.rstrip("/")


class Mirror:
    """Keeps ``folder.path`` and ``folder.url`` in step for one process of a run."""

    def __init__(self, folder: RunFolder, part: Part, attempt: int = 0) -> None:
        """Opens the store.

        Args:
            folder: with a URL.
            part: whose files this process writes.
            attempt: of a rank on another machine: its diary goes under a name of its own.
        """
        self._folder = folder
        self._part: Part = part
        self._kept = "events.jsonl" if part == "learn" else self._folder.log.name
        """Never fetched over: another process of this machine writes it."""
        self._diary = f"events-rank0-{attempt}.jsonl"
        self._store, self._root = open_store(folder.url)
        self._sent: dict[str, tuple[int, int]] = {}
        """Local size and time of change in nanoseconds of what is in the store too."""
        self._fetched: dict[str, object] = {}
        """What the store said of a file when it was fetched."""
        self._lock = threading.Lock()

    def pull(self, heavy: bool = True) -> None:
        """Makes the local folder what the store has.

        Args:
            heavy: with checkpoints and the views' own folders; without, these stay as they are.
        """
        with self._lock:
            listed = self._listed()
            for name, info in listed.items():
                if heavy or name.partition("/")[0] not in _HEAVY:
                    self._fetch(name, info)
            kept = (*_PRIVATE, self._folder.log.name, self._folder.stop.name)
            for name, path in list(self._local()):
                if heavy and name not in listed and name.partition("/")[0] not in kept:
                    path.unlink()

    def hand_over(self, *names: str) -> None:
        """Sends these files now, and fetches the request to stop if there is one."""
        with self._lock:
            for name in names:
                if (self._folder.path / name).exists():
                    self._put(name, self._folder.path / name)
            if self._store.exists(f"{self._root}/stop"):
                self._folder.stop.touch()

    def ask_to_stop(self, asked: bool = True) -> None:
        """Leaves the request to stop in the store, or takes it back."""
        if asked:
            self._store.pipe_file(f"{self._root}/stop", b"asked")
        elif self._store.exists(f"{self._root}/stop"):
            self._store.rm_file(f"{self._root}/stop")

    def exchange(self) -> None:
        """Sends what this process wrote since the last time, and fetches what others did."""
        with self._lock:
            self._receive()
            self._send()

    def is_new(self) -> bool:
        """Whether the store has nothing of the run."""
        return not self._store.exists(self._root)

    def delete(self) -> None:
        """Takes the run out of the store."""
        if self._store.exists(self._root):
            self._store.rm(self._root, recursive=True)

    def check_alone(self) -> None:
        """Refuses a run that another machine has sent signs of life of within a minute.

        Raises:
            UsageError: names the machine.
        """
        path = f"{self._root}/{self._folder.alive.name}"
        if not self._store.exists(path):
            return
        alive = json.loads(self._store.cat_file(path))
        age = time.time() - alive["time"]
        if alive["host"] != host_name() and age < ALIVE_S:
            raise UsageError(
                f"run {self._folder.name!r} is being run by {alive['host']}, which said so "
                f"{age:.0f} s ago; stop it first, or wait until it has been silent for a minute"
            )

    def say_alive(self) -> None:
        """Leaves a sign of life, which goes with the next exchange."""
        text = json.dumps({"host": host_name(), "pid": os.getpid(), "time": time.time()})
        replace_text(self._folder.alive, text)

    def _receive(self) -> None:
        try:
            found = self._store.ls(self._root, detail=True)
        except FileNotFoundError:  # nothing was sent yet
            return
        listed = {Path(info["name"]).name: info for info in found if info["type"] == "file"}
        diaries = tuple(name for name in listed if name.startswith("events-rank0-"))
        wanted = {"launch": (*_LEARNED, *diaries, "stop"), "learn": _CONTROL, "read": tuple(listed)}
        for name in wanted[self._part]:
            if name in listed and self._mark(name) == self._sent.get(name):
                self._fetch(name, listed[name])

    def _send(self) -> None:
        if self._part == "read":
            return
        present = {
            name: path for name, path in self._local() if self._mine(name) and path.is_file()
        }
        for name in sorted(present, key=lambda name: (name.endswith(_MARKER), name)):
            mark = self._mark(name)
            if mark is not None and mark != self._sent.get(name):
                self._put(name, present[name])
                self._sent[name] = mark
        for name in [name for name in self._sent if self._mine(name) and name not in present]:
            self._drop(name)

    def _put(self, name: str, path: Path) -> None:
        target = self._diary if self._part == "learn" and name == "events.jsonl" else name
        try:
            content = path.read_bytes()
        except FileNotFoundError:  # pruned since it was listed
            return
        self._store.pipe_file(f"{self._root}/{target}", content)
        self._fetched[name] = _stamp(self._store.info(f"{self._root}/{target}"))

    def _drop(self, name: str) -> None:
        del self._sent[name]
        if self._store.exists(f"{self._root}/{name}"):
            self._store.rm_file(f"{self._root}/{name}")

    def _fetch(self, name: str, info: Mapping[str, Any]) -> None:
        path, stamp = self._folder.path / name, _stamp(info)
        if self._fetched.get(name) == stamp or not _is_below(path, self._folder.path):
            return
        if name == self._kept and path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.new")
        partial.write_bytes(self._store.cat_file(f"{self._root}/{name}"))
        partial.replace(path)
        self._fetched[name] = stamp
        self._sent[name] = cast("tuple[int, int]", self._mark(name))

    def _listed(self) -> dict[str, Mapping[str, Any]]:
        if not self._store.exists(self._root):
            return {}
        found = cast("dict[str, Any]", self._store.find(self._root, detail=True))
        start = len(self._root) + 1
        return {path[start:]: info for path, info in found.items()}

    def _local(self) -> Generator[tuple[str, Path]]:
        base = self._folder.path
        for folder, _, names in os.walk(base):
            for name in names:
                path = Path(folder) / name
                yield path.relative_to(base).as_posix(), path

    def _mine(self, name: str) -> bool:
        """Whether this process sends a file; a launcher on the rank's machine sends both parts."""
        top, _, rest = name.partition("/")
        if top in _PRIVATE or any(
            part.startswith(".partial-") or part.endswith((".new", ".partial"))
            for part in (top, *rest.split("/"))
        ):
            return False
        if self._part == "learn":
            return top in (*_LEARNED, *_LEARNED_FOLDERS, "events.jsonl")
        return self._part == "launch" and not top.startswith("events-rank0-")

    def _mark(self, name: str) -> tuple[int, int] | None:
        try:
            found = (self._folder.path / name).stat()
        except FileNotFoundError:
            return None
        return found.st_size, found.st_mtime_ns


@contextmanager
def mirrored(folder: RunFolder, part: Part, attempt: int = 0) -> Generator[Callable[[], None]]:
    """Keeps a run's folder in step with its URL for a while; without a URL does nothing.

    Yields:
        A function that exchanges at once and raises where that fails, as does the exchange at the
        end; the regular ones between are tried again.

    Raises:
        UsageError: another machine runs the run.
    """
    if not folder.url:
        yield lambda: None
        return
    mirror = Mirror(folder, part, attempt)
    if part == "launch":
        mirror.check_alone()
    mirror.pull()

    def exchange() -> None:
        if part == "launch":
            mirror.say_alive()
        mirror.exchange()

    exchange()
    done = threading.Event()
    thread = threading.Thread(target=_repeat, args=(exchange, done), daemon=True)
    thread.start()
    try:
        yield exchange
    finally:
        done.set()
        thread.join()
        folder.alive.unlink(missing_ok=True)
        mirror.exchange()


def _repeat(exchange: Callable[[], None], done: threading.Event) -> None:
    pause, reported = INTERVAL_S, False
    while not done.wait(pause):
        start = time.monotonic()
        try:
            exchange()
        except Exception as error:  # noqa: BLE001 - each store fails in its own ways
            if not reported:
                logger.warning("the run's folder could not be sent; it will be again: %r", error)
            reported = True
        pause = max(INTERVAL_S, 10 * (time.monotonic() - start))


def _stamp(info: Mapping[str, Any]) -> list[object]:
    """Returns what tells two contents of a stored file apart."""
    keys = ("ETag", "etag", "mtime", "created", "LastModified")
    return [info.get("size"), next((info[key] for key in keys if key in info), None)]


def host_name() -> str:
    """Returns the name that tells this machine from the cluster's others."""
    return socket.gethostname()


def _is_below(path: Path, folder: Path) -> bool:
    """Whether a name from the store stays inside the run's folder."""
    return folder.resolve() in path.resolve().parents
