"""A private Ray for submissions from this machine: starts, waits for its jobs, and ends itself.

``heliostat submit`` without an address starts it as a process of its own, so that the job goes on
when the terminal closes. Its folder holds the token that other commands need, for this user only.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from heliostat.errors import HeliostatError, RunFailed
from heliostat.folder import replace_text

if TYPE_CHECKING:
    from cluster.jobs import Cluster

START_S = 90.0
_UNUSED_S = 120.0
_POLL_S = 1.0
_PREFIX = "heliostat-head-"
_LINGER = 4
"""Polls without a job before it ends."""
_SILENT_S = 300.0
_STARTED: list[subprocess.Popen[bytes]] = []
"""Heads outlive their starter; Python would warn of a process whose last reference goes."""


@dataclass(frozen=True, slots=True)
class Head:
    """A private Ray that was started."""

    folder: Path

    @property
    def token(self) -> str:
        """Raises FileNotFoundError once the head has ended."""
        return (self.folder / "token").read_text()

    @property
    def address(self) -> str:
        """Of its dashboard; raises FileNotFoundError until it is up and once it has ended."""
        return json.loads((self.folder / "head.json").read_text())["address"]

    def is_up(self) -> bool:
        """Whether it serves; one that is about to end its Ray has said so before."""
        try:
            return psutil.pid_exists(
                int(json.loads((self.folder / "head.json").read_text())["pid"])
            )
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def end(self) -> None:
        """Lets it end, whatever runs on it."""
        shutil.rmtree(self.folder, ignore_errors=True)


def own_head_token(folder: Path, address: str) -> str | None:
    """Returns the token of a private Ray, if it is one that this user started for ``address``."""
    ours = folder.parent == Path(tempfile.gettempdir()) and folder.name.startswith(_PREFIX)
    try:
        if not ours or folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return None
        return Head(folder).token if Head(folder).address == address else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def start_head() -> Head:
    """Starts a private Ray and waits until its Jobs endpoint is up.

    Raises:
        RunFailed: it did not start within ``START_S`` seconds; carries the end of its log.
    """
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    token = folder / "token"
    token.touch(0o600)
    token.write_text(secrets.token_hex(32))
    log = folder / "log.txt"
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RAY_ADDRESS", "RAY_AUTH_TOKEN")
    }
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "cluster.head", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=environment,
            start_new_session=True,
        )
    _STARTED.append(process)
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        if (folder / "head.json").exists():
            return Head(folder)
        time.sleep(0.1)
    process.terminate()  # it ends the Ray that it may have started
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(40)
    process.kill()
    process.wait()
    text = log.read_text()[-2000:]
    shutil.rmtree(folder, ignore_errors=True)
    raise RunFailed(f"a local Ray did not start within {START_S:g} s\n{text}")


@contextmanager
def private_ray(folder: Path) -> Generator[str]:
    """Runs a Ray with ports and a temporary folder of its own, next to whatever else runs here.

    Args:
        folder: for its files; a short path, since sockets lie below it.

    Yields:
        Its dashboard's address. Access needs the token of RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH.

    Raises:
        RunFailed: it did not start.
    """
    gcs, dashboard, agent = _free_ports(3)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    command += [f"--port={gcs}", f"--dashboard-port={dashboard}", f"--temp-dir={folder / 'ray'}"]
    command += [f"--dashboard-agent-listen-port={agent}", "--disable-usage-stats"]
    environment = {**os.environ, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}  # else it waits 30 s
    with (folder / "ray.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        )
    try:
        address = f"http://127.0.0.1:{dashboard}"
        until = time.monotonic() + START_S
        while not _answers(address):
            if process.poll() is not None or time.monotonic() > until:
                text = (folder / "ray.log").read_text()[-2000:]
                raise RunFailed(f"a local Ray did not start within {START_S:g} s\n{text}")
            time.sleep(0.2)
        yield address
    finally:
        process.terminate()  # with --block it takes all its processes along
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_ports(count: int) -> list[int]:
    """Returns ports that nobody listens on, outside the range of Ray's workers."""
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            found.append(port)
    return found


def _answers(address: str) -> bool:
    from cluster.jobs import Cluster

    try:
        Cluster(address).check()
        return bool(Cluster(address).nodes())
    except HeliostatError:
        return False


def main() -> int:
    """Serves until all jobs have ended, none came in two minutes, or its folder is gone."""
    from cluster.jobs import Cluster

    head = Head(Path(sys.argv[1]))
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(1))
    try:
        with private_ray(head.folder) as address:
            up = head.folder / "head.json"
            replace_text(up, json.dumps({"address": address, "pid": os.getpid()}))
            _serve(head, Cluster(address, head.token))
            up.unlink(missing_ok=True)  # before its Ray ends, which takes a while
    finally:
        head.end()
    return 0


def _serve(head: Head, cluster: Cluster) -> None:
    """Waits; a dashboard that is too busy to answer does not end the jobs it would tell of."""
    unused_from = answered = time.monotonic()
    ended = 0
    while head.folder.exists() and time.monotonic() < answered + _SILENT_S and ended < _LINGER:
        time.sleep(_POLL_S)
        try:
            waiting = cluster.unfinished()
        except HeliostatError:
            continue
        answered = time.monotonic()
        ended = ended + 1 if waiting == 0 else 0  # whoever follows the last job reads how it ended
        if waiting is None and answered > unused_from + _UNUSED_S:
            return


if __name__ == "__main__":
    sys.exit(main())
