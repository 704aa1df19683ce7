"""The supervisor of a submitted run, over real processes that die, stall, start late or err."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.supervisor import supervise
from heliostat.folder import RunFolder
from heliostat.layout import Job

LIMITS = Job(max_restarts=2, first_pause_s=0.0, start_deadline_s=30, progress_deadline_s=30)
PRELUDE = """
import os, signal, sys, time
from pathlib import Path
from heliostat.folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
attempt = sum(event["event"] == "job-attempt" for event in folder.events.read())
folder.events.add("began", step=-1)
"""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "mine").mkdir()
    return RunFolder(tmp_path / "mine")


def supervised(folder: RunFolder, script: str, limits: Job = LIMITS) -> int:
    command = [sys.executable, "-c", PRELUDE + script, str(folder.path)]
    return supervise(folder, command, limits)


def verdicts(folder: RunFolder) -> list[str]:
    events = folder.events.read()
    return [event["verdict"] for event in events if event["event"] == "job-attempt-ended"]


def test_a_run_that_is_killed_is_started_again_until_it_finishes(folder: RunFolder) -> None:
    script = """
if attempt < 3:
    os.kill(os.getpid(), signal.SIGKILL)
folder.result.write_text("{}")
"""
    assert supervised(folder, script) == 0
    assert verdicts(folder) == ["died", "died", "finished"]


def test_the_budget_ends_a_run_that_always_dies(folder: RunFolder) -> None:
    assert supervised(folder, "os.kill(os.getpid(), signal.SIGKILL)") == 1
    assert verdicts(folder) == ["died"] * 3
    assert folder.events.read()[-1]["error"] == "BudgetSpent"


@pytest.mark.parametrize(
    ("script", "status", "verdict"),
    [
        ("sys.exit(2)", 2, "refused"),
        ("folder.events.add('failed', error='ValueError', retry=False); sys.exit(1)", 1, "failed"),
        ("folder.events.add('stopped'); sys.exit(1)", 1, "stopped"),
    ],
)
def test_the_users_mistakes_and_stops_are_not_tried_again(
    folder: RunFolder, script: str, status: int, verdict: str
) -> None:
    assert supervised(folder, script) == status
    assert verdicts(folder) == [verdict]


def test_a_failure_of_the_machinery_is_tried_again(folder: RunFolder) -> None:
    script = """
if attempt == 1:
    folder.events.add("failed", error="ActorLost", retry=True)
    sys.exit(1)
folder.result.write_text("{}")
"""
    assert supervised(folder, script) == 0
    assert verdicts(folder) == ["died", "finished"]


def test_a_run_that_logs_nothing_for_too_long_is_ended(folder: RunFolder) -> None:
    limits = Job(max_restarts=0, progress_deadline_s=1)
    assert supervised(folder, "time.sleep(60)", limits) == 1
    assert verdicts(folder) == ["stuck"]
    assert any("logged nothing for 1 s" in str(e.get("reason")) for e in folder.events.read())


def test_a_run_that_got_stuck_is_tried_again_though_it_heeds_signals(folder: RunFolder) -> None:
    script = """
if attempt == 1:
    from heliostat.launch import _signals
    with _signals(folder) as signals:
        signals.begun = True
        time.sleep(60)
folder.result.write_text("{}")
"""
    limits = Job(max_restarts=1, first_pause_s=0, progress_deadline_s=10)
    assert supervised(folder, script, limits) == 0
    assert verdicts(folder) == ["stuck", "finished"]


def test_what_a_dead_run_leaves_behind_does_not_hold_up_its_supervisor(folder: RunFolder) -> None:
    script = """
import subprocess
subprocess.Popen(["sleep", "300"])
os.kill(os.getpid(), signal.SIGKILL)
"""
    began = time.monotonic()
    assert supervised(folder, script, Job(max_restarts=0)) == 1
    assert time.monotonic() - began < 60
    assert verdicts(folder) == ["died"]


def test_a_run_that_goes_on_logging_is_left_alone(folder: RunFolder) -> None:
    script = """
for step in range(20):
    with folder.metrics.open("a") as file:
        file.write("row")
    time.sleep(0.25)
folder.result.write_text("{}")
"""
    assert supervised(folder, script, Job(max_restarts=0, progress_deadline_s=4)) == 0


def test_a_run_that_does_not_begin_in_time_is_ended(folder: RunFolder) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert supervise(folder, command, Job(max_restarts=0, start_deadline_s=1)) == 1
    assert verdicts(folder) == ["late"]


def asked_to_stop(folder: RunFolder, when: Callable[[], bool]) -> None:
    def wait() -> None:
        while not when():
            time.sleep(0.05)
        folder.stop.touch()

    threading.Thread(target=wait, daemon=True).start()


def test_a_stop_before_the_first_attempt_starts_nothing(folder: RunFolder) -> None:
    folder.stop.touch()
    assert supervised(folder, "folder.result.write_text('{}')") == 1
    assert not folder.result.exists()
    assert folder.events.read()[-1]["event"] == "stopped"


def test_a_stop_ends_the_pause_between_attempts(folder: RunFolder) -> None:
    asked_to_stop(folder, lambda: "died" in verdicts(folder))
    limits = Job(max_restarts=5, first_pause_s=60)
    began = time.monotonic()
    assert supervised(folder, "os.kill(os.getpid(), signal.SIGKILL)", limits) == 1
    assert time.monotonic() - began < 30
    assert verdicts(folder) == ["died"]


def test_a_run_that_does_not_heed_a_stop_is_made_to_leave(folder: RunFolder) -> None:
    asked_to_stop(folder, lambda: any(e["event"] == "began" for e in folder.events.read()))
    limits = Job(max_restarts=5, stop_s=1)
    assert supervised(folder, "time.sleep(60)", limits) == 1
    assert verdicts(folder) == ["died"]
    assert folder.events.read()[-1]["event"] == "stopped"


def test_what_the_run_writes_is_kept_in_its_log(folder: RunFolder) -> None:
    script = """
print("to standard output", flush=True)
print("to standard error", file=sys.stderr, flush=True)
folder.result.write_text("{}")
"""
    assert supervised(folder, script) == 0
    assert folder.log.read_text().splitlines() == ["to standard output", "to standard error"]
