"""A private Ray for submissions from this machine: starts, waits for its jobs, and ends itself.

``heliostat submit`` without an address starts it as a process of its own, so that the job goes on
when the terminal closes. Its folder holds the token that other commands need, for this user only.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from heliostat.errors import RunFailed
from heliostat.folder import replace_text

if TYPE_CHECKING:
    from cluster.jobs import Cluster

START_S = 90.0
_UNUSED_S = 120.0
_POLL_S = 1.0
_LINGER_S = 3.0


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

    def end(self) -> None:
        """Lets it end, whatever runs on it."""
        shutil.rmtree(self.folder, ignore_errors=True)


def start_head() -> Head:
    """Starts a private Ray and waits until its Jobs endpoint is up.

    Raises:
        RunFailed: it did not start within ``START_S`` seconds; carries the end of its log.
    """
    folder = Path(tempfile.mkdtemp(prefix="heliostat-head-"))
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
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        if (folder / "head.json").exists():
            return Head(folder)
        time.sleep(0.1)
    process.kill()
    text = log.read_text()[-2000:]
    shutil.rmtree(folder, ignore_errors=True)
    raise RunFailed(f"a local Ray did not start within {START_S:g} s\n{text}")


def main() -> int:
    """Serves until all jobs have ended, none came in two minutes, or its folder is gone."""
    from cluster.jobs import Cluster
    from heliostat.ray_session import ray_session

    head = Head(Path(sys.argv[1]))
    try:
        with ray_session(None, lambda _: None) as dashboard:
            address = f"http://{dashboard}"
            replace_text(head.folder / "head.json", json.dumps({"address": address}))
            _serve(head, Cluster(address, head.token))
    finally:
        shutil.rmtree(head.folder, ignore_errors=True)
    return 0


def _serve(head: Head, cluster: Cluster) -> None:
    unused_from = time.monotonic()
    while head.folder.exists():
        time.sleep(_POLL_S)
        waiting = cluster.unfinished()
        if waiting == 0:
            time.sleep(_LINGER_S)  # whoever follows the last job reads how it ended
            if cluster.unfinished() == 0:
                return
        if waiting is None and time.monotonic() > unused_from + _UNUSED_S:
            return


if __name__ == "__main__":
    sys.exit(main())
