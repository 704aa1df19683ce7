"""Uploads what runs logged to W&B while they were offline, through ``wandb sync``."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from heliostat.errors import RunFailed
from heliostat.folder import RunFolder
from heliostat.privacy import scrub

_REACH_S = 10
_UPLOAD_S = 3600
_TORN = "ends with an incomplete record"


@dataclass(frozen=True, slots=True)
class Synced:
    """What became of the offline logs of one run; each attempt has one."""

    markers: Sequence[str]
    """One file for each log that was uploaded now, by its path in the run's folder."""
    before: int
    """How many an earlier sync had uploaded."""


def sync(folder: RunFolder) -> Synced:
    """Uploads the offline logs of a run, attempt after attempt; those that are uploaded stay so.

    Of a log that a kill has torn off, what is whole is uploaded. The run must not be running.

    Raises:
        RunFailed: W&B refused or cannot be reached; what is not uploaded can be tried again.
    """
    logs = sorted(folder.path.glob("wandb/offline-run-*/run-*.wandb"))
    before = [log for log in logs if _marker(log).exists()]
    while waiting := [log for log in logs if not _marker(log).exists()]:
        said = _unreachable() or _wandb_sync(folder, [log.parent for log in waiting])
        for log in waiting:
            if any(log.parent.name in line and _TORN in line for line in said.splitlines()):
                _marker(log).touch()  # as W&B marks whole ones
        left = [log for log in waiting if not _marker(log).exists()]
        if len(left) == len(waiting):
            raise RunFailed(
                f"{folder.name}: {len(left)} of {len(logs)} logs could not be uploaded to W&B: "
                f"{_telling(said)}; log in with `wandb login` or WANDB_API_KEY, check "
                "WANDB_BASE_URL, and sync again"
            )
    markers = [str(_marker(log).relative_to(folder.path)) for log in logs if log not in before]
    return Synced(markers, len(before))


def _unreachable() -> str | None:
    """Asks the server once: ``wandb sync`` would try for many minutes. None where it answers."""
    import wandb

    url = os.environ.get("WANDB_BASE_URL") or wandb.setup().settings.base_url
    try:
        urllib.request.urlopen(url, timeout=_REACH_S).close()
    except urllib.error.HTTPError:
        return None
    except (OSError, ValueError) as error:
        return f"nothing answers at {url} within {_REACH_S} s: {error}"
    return None


def _marker(log: Path) -> Path:
    return log.with_name(log.name + ".synced")


def _wandb_sync(folder: RunFolder, logs: Sequence[Path]) -> str:
    """Runs ``wandb sync`` and returns what it said."""
    command = [sys.executable, "-m", "wandb", "sync", "--yes", *map(str, logs)]
    staging = str(folder.path / "wandb" / "staging")
    environment = {"WANDB_DATA_DIR": staging, "WANDB_ERROR_REPORTING": "false", **os.environ}
    environment |= {"WANDB_MODE": "online", "WANDB_SILENT": "false", "WANDB_QUIET": "false"}
    try:
        done = subprocess.run(
            command,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_UPLOAD_S,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"no end within {_UPLOAD_S} s"
    return done.stdout


def _telling(said: str) -> str:
    """Returns the line that says most about a failure, without credentials."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() or "not " in line.lower()]
    return scrub((errors or lines or ["it did not say why"])[-1])
