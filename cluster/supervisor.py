"""The entrypoint of a submitted run: starts it, watches it, and starts it again when it dies.

What the user got wrong is not tried again; what died through no fault of the method is, from the
newest checkpoint, within a budget. Each attempt is in the run's diary.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Literal, cast

import yaml

from cluster.places import open_run, run_folder
from heliostat.errors import HeliostatError
from heliostat.folder import RunFolder
from heliostat.layout import Job
from heliostat.mirror import Mirror

Verdict = Literal["finished", "stopped", "refused", "failed", "died", "late", "stuck"]
AGAIN = ("died", "late", "stuck")
"""Ends of an attempt that are made good by another."""

_FINISHED, _FAILED, _MISUSED = 0, 1, 2
_POLL_S = 0.5
_LEAVE_S = 15.0


def main() -> int:
    """Supervises one run until it has ended.

    Returns:
        0 the run finished, 1 it failed or was stopped, 2 the user's mistake.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--runs", required=True, help="folder or URL of run folders")
    options = parser.parse_args()
    folder = run_folder(options.runs, options.name)
    if folder.url:  # the run's own process fetches the rest
        seen = open_run(options.runs, options.name)
        shutil.copytree(seen.path, folder.path, dirs_exist_ok=True)

    def ask_to_stop(_number: int, _frame: object) -> None:
        folder.stop.touch()

    signal.signal(signal.SIGTERM, ask_to_stop)
    signal.signal(signal.SIGINT, ask_to_stop)
    command = [sys.executable, "-m", "cluster.cli", "resume", options.name]
    command += ["--runs", options.runs, "--supervised"]
    return supervise(folder, command, read_limits(folder))


def read_limits(folder: RunFolder) -> Job:
    """Returns the limits that the run's recipe sets on its job."""
    values = yaml.safe_load(folder.recipe.read_text())
    return Job(**values["layout"]["job"])


def supervise(folder: RunFolder, command: list[str], limits: Job) -> int:
    """Runs ``command`` until it ends for good, again after each death within the budget.

    Returns:
        The exit status of the last attempt; 1 where it was killed or had to be.
    """
    for attempt in range(limits.max_restarts + 1):
        if folder.stop.exists():
            folder.events.add("stopped", reason="a stop was asked for before this attempt")
            return _FAILED
        folder.events.add("job-attempt", number=attempt + 1, budget=limits.max_restarts + 1)
        _hand_over(folder)
        verdict, status = _attempt(folder, command, limits)
        folder.events.add("job-attempt-ended", number=attempt + 1, verdict=verdict, status=status)
        _hand_over(folder, whole=verdict in AGAIN)
        if verdict not in AGAIN:
            return status
        if attempt < limits.max_restarts:
            _pause(folder, min(limits.longest_pause_s, limits.first_pause_s * 2.0**attempt))
    folder.events.add("failed", error="BudgetSpent", reason="no attempt of the job got through")
    _hand_over(folder)
    return _FAILED


def _hand_over(folder: RunFolder, *, whole: bool = False) -> None:
    """Sends what the run's own process did not: the diary and log, or all after its death."""
    if folder.url and whole:
        Mirror(folder, "launch").exchange()
    if folder.url:
        Mirror(folder, "launch").hand_over("events.jsonl", "log.txt")


def _attempt(folder: RunFolder, command: list[str], limits: Job) -> tuple[Verdict, int]:
    began = time.time()
    pipe = subprocess.PIPE
    with (
        folder.log.open("ab") as log,
        subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, start_new_session=True
        ) as process,
    ):
        output = cast("IO[bytes]", process.stdout)
        copier = threading.Thread(target=_copy, args=(output, log), daemon=True)
        copier.start()
        late = _watch(process, folder, limits, began)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # what it left behind holds its output open
        copier.join(_LEAVE_S)
    status = process.returncode
    if late is not None:
        return late, _FAILED
    if folder.result.exists():  # whatever happened to the process afterwards
        return "finished", _FINISHED
    if status == _MISUSED:
        return "refused", _MISUSED
    if status < 0 or status not in (_FINISHED, _FAILED):
        return "died", _FAILED
    return _why_failed(folder, began), _FAILED


def _why_failed(folder: RunFolder, began: float) -> Verdict:
    """Reads from the diary whether a run that failed was stopped, at fault, or a victim."""
    ends = [
        event
        for event in folder.events.read()
        if event["time"] >= began and event["event"] in ("stopped", "failed")
    ]
    if not ends:
        return "died"
    if ends[-1]["event"] == "stopped":
        return "stopped"
    return "died" if ends[-1].get("retry") else "failed"


def _watch(
    process: subprocess.Popen[bytes], folder: RunFolder, limits: Job, began: float
) -> Literal["late", "stuck"] | None:
    """Waits for the process; ends it where it does not start, or goes no further, in time."""
    stop_asked: float | None = None
    while process.poll() is None:
        time.sleep(_POLL_S)
        begun = _last_beginning(folder, began)
        if folder.stop.exists():
            stop_asked = stop_asked or time.time()
            if begun is None or time.time() > stop_asked + limits.stop_s:
                _end(process)
        elif begun is None:
            if time.time() > began + limits.start_deadline_s:
                return _give_up(process, folder, "late", limits.start_deadline_s)
        elif time.time() > max(begun, _changed(folder.metrics)) + limits.progress_deadline_s:
            return _give_up(process, folder, "stuck", limits.progress_deadline_s)
    return None


def _last_beginning(folder: RunFolder, since: float) -> float | None:
    """Returns when the learner last began in this attempt, in Unix seconds."""
    times = [
        event["time"]
        for event in folder.events.read()
        if event["event"] in ("began", "restored") and event["time"] >= since
    ]
    return times[-1] if times else None


def _give_up(
    process: subprocess.Popen[bytes],
    folder: RunFolder,
    verdict: Literal["late", "stuck"],
    seconds: float,
) -> Literal["late", "stuck"]:
    what = "did not begin" if verdict == "late" else "logged nothing"
    folder.events.add(verdict, reason=f"the run {what} for {seconds:g} s and was ended")
    process.kill()  # asked to leave, it would take that for a stop and not be tried again
    process.wait()
    return verdict


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_LEAVE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _pause(folder: RunFolder, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and not folder.stop.exists():
        time.sleep(min(_POLL_S, seconds))


def _changed(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0


def _copy(source: IO[bytes], log: IO[bytes]) -> None:
    """Sends what the run says to the job's own output and to the run's log."""
    for line in source:
        log.write(line)
        log.flush()
        sys.stdout.buffer.write(line)
        sys.stdout.flush()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except HeliostatError as error:
        sys.stderr.write(f"heliostat: {error}\n")
        sys.exit(_MISUSED)
