"""Looking after runs from any terminal or machine: status, logs, stop, rm, compare.

Each works on the run's folder and, where it was submitted, on its job.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cluster.jobs import Job
from cluster.places import open_run, run_folder
from cluster.records import (
    as_count,
    as_number,
    as_text,
    printable,
    read_events,
    read_object,
    read_recipe,
)
from cluster.registry import RunSummary, align, is_locked, summarise
from cluster.submit import find_submission
from heliostat.errors import RunFailed, UsageError
from heliostat.folder import RunFolder
from heliostat.launch import forget
from heliostat.mirror import Mirror, is_url
from heliostat.recipe import leaves

_POLL_S = 0.5
_URL_POLL_S = 3.0
GOING_ON = ("queued", "running")


def status(place: str, name: str) -> dict[str, Any]:
    """Returns what is known of a run, from its folder and its job, ready for JSON."""
    return _look(open_run(place, name))


def _look(folder: RunFolder) -> dict[str, Any]:
    summary = summarise(folder)
    events = read_events(folder)
    submission = find_submission(folder)
    known, logged = True, folder.log.exists()
    try:
        job = submission.job() if submission else None
    except UsageError:
        job, known = None, False
    return {
        "run": folder.name,
        "workload": summary.workload,
        "status": _settled(summary, job, gone=submission is not None and known and job is None),
        "step": summary.step,
        "total_steps": summary.method.total_steps,
        "score": {summary.method.score or "score": summary.score},
        "restarts": summary.restarts,
        "address": submission.cluster.address if submission else None,
        "job": (job.state if job else None) if known else "unknown",
        "job_message": job.message if job and job.state == "FAILED" and not logged else None,
        "wandb_run_id": as_text(read_object(folder.record).get("id")),
        "last_event": events[-1] if events else None,
    }


def _at_work(found: Mapping[str, Any]) -> bool:
    return found["status"] in GOING_ON or found["job"] in ("PENDING", "RUNNING")


def _settled(summary: RunSummary, job: Job | None, *, gone: bool) -> str:
    """Corrects what the folder says by what became of the job.

    A sign of life counts for more than a cluster that does not know the job.
    """
    ended = job is not None and job.ended
    if (summary.status == "running" and ended) or (summary.status == "queued" and (ended or gone)):
        return "interrupted"
    between = summary.status in ("failed", "interrupted") and job is not None and not ended
    return "running" if between else summary.status  # its supervisor will try again


def stop(place: str, name: str, deadline_s: float) -> str:
    """Ends a run: asks it to save and leave, and makes it leave where it does not.

    Args:
        place: what ``--runs`` says.
        name: of the run.
        deadline_s: time to save, in seconds.

    Returns:
        How it ended, one line.

    Raises:
        RunFailed: it could not be ended from here; says what is left to do.
    """
    folder = open_run(place, name)
    before = _look(folder)
    if before["status"] == "finished" or not _at_work(before):
        return f"{name} is {before['status']} already"
    _ask_to_stop(folder)
    if _wait_for_end(place, name, deadline_s):
        step = status(place, name)["step"]
        return f"{name} saved its checkpoint and left" if step else f"{name} left before it began"
    submission = find_submission(folder)
    if submission:
        submission.cluster.stop(submission.job_id)
    else:
        _signal(folder, signal.SIGTERM)
    if _wait_for_end(place, name, 30.0):
        return f"{name} was ended; its newest checkpoint stands"
    if not submission:
        _signal(folder, signal.SIGKILL)
    elif (job := submission.job()) and job.state == "PENDING":
        submission.cluster.end_pending(submission.job_id)
    if _wait_for_end(place, name, 30.0):
        return f"{name} was killed; its newest checkpoint, if any, stands"
    raise RunFailed(f"{name} goes on although it was told to stop; see heliostat status {name}")


def _ask_to_stop(folder: RunFolder) -> None:
    if folder.url:
        Mirror(folder, "read").ask_to_stop()
    else:
        folder.stop.touch()


def _wait_for_end(place: str, name: str, seconds: float) -> bool:
    until = time.monotonic() + seconds
    pause = _URL_POLL_S if is_url(place) else _POLL_S
    while time.monotonic() < until:
        if not _at_work(status(place, name)):
            return True
        time.sleep(pause)
    return False


def _signal(folder: RunFolder, number: signal.Signals) -> None:
    """Signals the process that holds the run, where it is on this machine."""
    holder = read_object(folder.lock)
    pid = as_count(holder.get("pid"))
    here = holder.get("host") == os.uname().nodename and is_locked(folder)
    if pid is None or pid < 2 or not here:
        raise RunFailed(
            f"{folder.name} runs in a process of {holder.get('host', 'another machine')} and did "
            "not leave when asked; end it there"
        )
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def logs(place: str, name: str, *, follow: bool) -> Iterator[str]:
    """Yields what a submitted run wrote, as it comes where ``follow`` is set, until it ends."""
    written, ended = 0, not follow
    while True:
        folder = open_run(place, name)
        text = folder.log.read_bytes() if folder.log.is_file() else b""
        if len(text) > written:
            yield text[written:].decode(errors="replace")
            written = len(text)
        if ended:
            break
        ended = not _at_work(_look(folder))
        time.sleep(_URL_POLL_S if is_url(place) else _POLL_S)
    if not follow and not written:
        raise UsageError(
            f"{name} has no log; "
            + ("it has not begun" if folder.job.exists() else "it was run in a terminal, not sent")
        )


def remove(place: str, name: str) -> None:
    """Deletes a run's folder, and its job from the cluster where that still knows it.

    Raises:
        UsageError: it is going on.
    """
    folder = open_run(place, name)
    found = _look(folder)
    if _at_work(found):
        raise UsageError(f"{name} is {found['status']}; heliostat stop {name} ends it")
    submission = find_submission(folder)
    if submission and found["job"] not in (None, "unknown"):
        submission.cluster.delete(submission.job_id)
    forget(run_folder(place, name))
    if folder.url:
        forget(RunFolder(folder.path))


def compare(place: str, names: Sequence[str]) -> str:
    """Returns what tells runs apart: recipe values that differ, and metrics, side by side."""
    folders = [open_run(place, name) for name in names]
    summaries = [summarise(folder) for folder in folders]
    recipes = [dict(leaves(read_recipe(folder))) for folder in folders]
    finals = [read_object(folder.result) for folder in folders]
    keys = list(dict.fromkeys(key for recipe in recipes for key in recipe))
    rows = [["", *names]]
    rows.append(["workload", *(summary.workload for summary in summaries)])
    rows.append(["status", *(summary.status for summary in summaries)])
    rows.append(["step", *(str(summary.step) for summary in summaries)])
    for key in keys:
        values = [_cell(recipe.get(key)) for recipe in recipes]
        if len(set(values)) > 1:
            rows.append([key, *values])
    scores = {summary.method.score for summary in summaries} - {None}
    for metric in sorted(scores | {name for final in finals for name in final}, key=str):
        values = [
            as_number(final.get(metric)) if metric in final else _newest(summary, metric)
            for final, summary in zip(finals, summaries, strict=True)
        ]
        rows.append([str(metric), *("-" if value is None else f"{value:.6g}" for value in values)])
    return align([[printable(cell) for cell in row] for row in rows], ())


def _newest(summary: RunSummary, metric: str | None) -> float | None:
    return summary.score if metric == summary.method.score else None


def _cell(value: object) -> str:
    text = "-" if value is None else str(value)
    return text if len(text) <= 40 else text[:39] + "…"
