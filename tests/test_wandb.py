"""W&B: what the offline records hold, and what a server on the loopback interface receives."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from logged import FRAMES, LABELS, exercise, figure, next_second, tensorboard_events
from wandb_server import WandbServer

from cluster import cli
from cluster.wandb_sync import sync
from heliostat import checkpoint, wandb_view
from heliostat.folder import RunFolder
from heliostat.rank import open_trackers
from heliostat.recipe import Tracking
from heliostat.tracker import read_metrics
from heliostat.wandb_view import WandbView

ID = LABELS.run_id
KEY = "0123456789abcdef0123456789abcdef01234567"
OFFLINE, ONLINE = Tracking(wandb="offline"), Tracking(wandb="online")


@pytest.fixture
def wandb_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home of its own, no settings from outside, and no service left behind."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "XDG_"))]:
        monkeypatch.delenv(name)
    home = tmp_path / "home-of-the-user"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    yield home
    import wandb

    wandb.teardown()


@pytest.fixture
def server(wandb_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    with WandbServer() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        yield server


def logs(folder: Path) -> list[Path]:
    """W&B's own files of a run, oldest first; the folder's name holds the time."""
    return sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))


def records(log: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(log)]
    printed = subprocess.run(command, check=True, capture_output=True, cwd=log.parent).stdout
    return [json.loads(line) for line in printed.splitlines()]


def history(log: Path) -> list[dict[str, Any]]:
    return [r["history"]["item"] for r in records(log) if r["type"] == "history"]


def steps_of(rows: list[dict[str, Any]]) -> list[int]:
    return [row["step"] for row in rows]


def test_offline_rows_tables_histograms_and_figures_are_recorded(wandb_home: Path, tmp_path: Path):
    folder = tmp_path / "run"
    tracker = open_trackers(folder, LABELS, Tracking(wandb="offline", tensorboard=True))
    # A launcher trains in a thread of its own.
    thread = threading.Thread(target=exercise, args=(tracker,))
    thread.start()
    thread.join()
    assert len(read_metrics(folder)) == 1
    assert tensorboard_events(folder)
    (log,) = logs(folder)
    found = records(log)
    (run,) = [r["run"] for r in found if r["type"] == "run"]
    assert (run["run_id"], run["run_group"], run["job_type"]) == (ID, "smoke", "train")
    assert run["display_name"] == "t1-smoke"
    assert run["config"]["update"] | LABELS.config == run["config"]["update"]
    assert {"glob_name": "*", "step_metric": "step"}.items() <= next(
        r["metric"] for r in found if r["type"] == "metric" and "glob_name" in r["metric"]
    ).items()
    row, table, histogram, picture, film = history(log)
    assert (row["loss"], row["step"], row["attempt"]) == (0.5, 0, 1)
    assert table["t._type"] == "table-file"
    assert histogram["h._type"] == "histogram"
    assert sum(histogram["h.values"]) == 3
    assert picture["f._type"] == "image-file"
    assert film["v._type"] == "video-file"
    assert found[-1]["exit"]["exit_code"] == 0
    media = [path.suffix for path in log.parent.joinpath("files").rglob("*") if path.is_file()]
    assert sorted(media) == [".gif", ".json", ".png"]
    # What a table needs for a later upload lies with the run, not in somebody's home.
    assert list(folder.glob("wandb/staging/artifacts/staging/*"))


def test_a_resumed_run_keeps_its_id_its_rows_and_its_axis(
    wandb_home: Path, tmp_path: Path, server: WandbServer
):
    for steps in (range(5), range(3, 7), range(5, 9)):
        tracker = WandbView(tmp_path, LABELS, OFFLINE)
        tracker.rewind(steps[0] - 1)
        for step in steps:
            tracker.log({"loss": float(step)}, step)
        tracker.finish()
        next_second()
    first, second, third = (history(log) for log in logs(tmp_path))
    assert steps_of(first) == [0, 1, 2, 3, 4]
    assert steps_of(second) == [3, 4, 5, 6]
    assert steps_of(third) == [5, 6, 7, 8]
    assert [row["attempt"] for row in second] == [2] * 4
    command = [sys.executable, "-m", "wandb", "sync", "--yes"]
    folders = [str(log.parent) for log in logs(tmp_path)]
    subprocess.run([*command, *folders], check=True, capture_output=True, cwd=tmp_path)
    uploaded = server.runs[ID].history()
    assert list(server.runs) == [ID]
    assert steps_of(uploaded) == [0, 1, 2, 3, 4, 3, 4, 5, 6, 5, 6, 7, 8]
    assert [row["_step"] for row in uploaded] == sorted({row["_step"] for row in uploaded})


def test_online_rows_reach_the_server_over_a_resume(tmp_path: Path, server: WandbServer):
    for attempt, steps in enumerate([range(3), range(2, 5)], start=1):
        labels = replace(LABELS, config={"lr": float(attempt)})
        tracker = open_trackers(tmp_path, labels, ONLINE)
        for step in steps:
            tracker.log({"train/loss": float(step), "nan": math.nan, "inf": math.inf}, step)
        tracker.log_table("answers", ["q", "a"], [("1+1", 2), ["?", "none"]], steps[-1])
        tracker.log_histogram("lengths", np.arange(5.0), steps[-1])
        tracker.log_figure("curve", figure(), steps[-1])
        tracker.log_video("game", FRAMES, 5.0, steps[-1])
        tracker.finish(0 if attempt == 2 else 1)
        next_second()
    run = server.runs[ID]
    rows = run.history()
    assert steps_of([row for row in rows if "train/loss" in row]) == [0, 1, 2, 2, 3, 4]
    assert [row["attempt"] for row in rows] == [1] * 7 + [2] * 7
    assert [row["_step"] for row in rows] == sorted({row["_step"] for row in rows})
    assert all(math.isnan(row["nan"]) and row["inf"] == math.inf for row in rows if "nan" in row)
    types = [row[key]["_type"] for row in rows for key in row if isinstance(row[key], dict)]
    assert types == ["table-file", "histogram", "image-file", "video-file"] * 2
    assert json.loads(run.config)["lr"]["value"] == 2
    assert run.exit_code == 0
    tables = [body for name, body in run.files.items() if name.endswith(".table.json")]
    assert json.loads(tables[0])["data"] == [["1+1", 2], ["?", "none"]]
    assert any(body.startswith(b"\x89PNG") for body in run.files.values())


def test_without_an_answering_server_training_goes_on_offline_in_time(
    wandb_home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        monkeypatch.setenv("WANDB_MODE", "online")
        start = time.monotonic()
        tracker = open_trackers(tmp_path, LABELS, Tracking())
        assert time.monotonic() - start < 15
        tracker.log({"loss": 0.5}, 0)
        tracker.finish()
        assert time.monotonic() - start < 17
    assert "W&B is not reachable, logging offline instead" in caplog.text
    (log,) = logs(tmp_path)
    assert steps_of(history(log)) == [0]
    assert len(read_metrics(tmp_path)) == 1


def test_without_credentials_the_run_is_offline(
    wandb_home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    tracker = WandbView(tmp_path, LABELS, ONLINE)
    tracker.log({"loss": 0.5}, 0)
    tracker.finish()
    assert "No API key configured" in caplog.text
    (log,) = logs(tmp_path)
    assert steps_of(history(log)) == [0]


def test_a_server_that_dies_costs_a_failed_run_three_seconds(tmp_path: Path, server: WandbServer):
    tracker = WandbView(tmp_path, LABELS, ONLINE)
    server.__exit__()
    start = time.monotonic()
    tracker.log({"loss": 0.5}, 0)
    assert time.monotonic() - start < 0.5
    with pytest.raises(TimeoutError):
        tracker.finish(1)
    assert time.monotonic() - start < 4.5


def test_two_runs_of_one_process_stay_apart(wandb_home: Path, tmp_path: Path):
    trackers = {
        name: WandbView(tmp_path / name, replace(LABELS, run_id=name), OFFLINE)
        for name in ("left", "right")
    }
    for step in range(3):
        for name, tracker in trackers.items():
            tracker.log({name: float(step)}, step)
    for tracker in trackers.values():
        tracker.finish()
    for name in trackers:
        (log,) = logs(tmp_path / name)
        assert [row[name] for row in history(log)] == [0, 1, 2]


def test_a_killed_process_loses_at_most_its_last_second(wandb_home: Path, tmp_path: Path):
    code = f"""
import os, signal, sys, time
from pathlib import Path
from cluster import cli
from cluster.wandb_sync import sync
from heliostat import checkpoint, wandb_view
from heliostat.recipe import Tracking
from heliostat.rank import open_trackers
from heliostat.views import RunLabels
tracker = open_trackers(Path(sys.argv[1]), {LABELS!r}, {OFFLINE!r})
for step in range(5):
    tracker.log({{"loss": 0.5}}, step)
time.sleep(2)
tracker.log({{"loss": 0.5}}, 5)
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    (log,) = logs(tmp_path)
    assert steps_of(history(log))[:5] == [0, 1, 2, 3, 4]
    assert len(read_metrics(tmp_path)) == 6


def test_neither_secrets_nor_paths_of_the_home_leave_the_process(
    wandb_home: Path, tmp_path: Path, server: WandbServer, monkeypatch: pytest.MonkeyPatch
):
    secret = "correct-horse-battery"
    monkeypatch.setenv("STORE_PASSWORD", secret)
    monkeypatch.setattr(sys, "argv", ["/private/folder/of/mine.py"])
    config = {
        "data": str(wandb_home / "data" / "shards"),
        "url": f"s3://bucket?auth={secret}",
        "hub": {"hf_token": "hf_abcdefghijklmnopqrstuvwxyz012345"},
    }
    for mode in ("offline", "online"):
        tracker = WandbView(tmp_path / mode, replace(LABELS, config=config), Tracking(wandb=mode))
        tracker.log({"loss": 0.5}, 0)
        tracker.log_table("t", ["a"], [[1]], 0)
        tracker.finish()
    assert server.runs[ID].history()
    written = [path.read_bytes() for path in tmp_path.glob("o*line/wandb/*run-*/*.wandb")]
    published = [
        path.read_bytes()
        for path in tmp_path.glob("o*line/wandb/*run-*/files/**/*")
        if path.is_file()
    ]
    assert len(written) == 2
    everything = b"\n".join([*written, *published, *server.received])
    hidden = [secret, "hf_abcdefghij", str(wandb_home), sys.argv[0], str(Path.cwd())]
    assert [text for text in hidden if text.encode() in everything] == []
    assert b"~/data/shards" in everything
    (log,) = logs(tmp_path / "offline")
    (run,) = [r["run"] for r in records(log) if r["type"] == "run"]
    assert "host" not in run
    upserts = [json.loads(body) for body in server.received if b"mutation UpsertBucket" in body]
    recorded = {
        key: value
        for upsert in upserts
        for key, value in upsert["variables"].items()
        if key in {"host", "program", "repo", "commit"} and value
    }
    assert recorded == {"program": "heliostat"}


def test_the_summary_holds_the_last_and_the_best_of_the_rows_that_stand(
    tmp_path: Path, server: WandbServer
):
    attempts = [[(1, 0.2), (2, 0.9), (3, 0.4)], [(2, 0.3), (3, 0.5), (4, 0.1)]]
    for attempt in attempts:
        tracker = open_trackers(tmp_path, LABELS, ONLINE)
        tracker.rewind(attempt[0][0] - 1)  # the second attempt takes the 0.9 of step 2 back
        for step, score in attempt:
            tracker.log({"eval/score": score, "train/loss": 1.0 / step}, step)
        tracker.finish()
        next_second()
    summary = json.loads(server.runs[ID].summary)
    assert (summary["eval/score"], summary["best/eval/score"]) == (0.1, 0.5)
    assert (summary["train/loss"], summary["step"]) == (0.25, 4)


# ---------------------------------------------------------------------------- checkpoints


def save_three(folder: Path, tracking: Tracking) -> list[dict[str, Any]]:
    """Saves checkpoints of scores 0.5, 0.9 and 0.1, and returns the artifacts in W&B's log."""
    tracker = open_trackers(folder, LABELS, tracking)
    for step, score in [(1, 0.5), (2, 0.9), (3, 0.1)]:
        path = checkpoint.save(folder / "checkpoints", step, {"step": step}, score)
        tracker.log_checkpoint(path, step)
    tracker.finish()
    (log,) = logs(folder)
    return [r["artifact"] for r in records(log) if r["type"] == "artifact"]


@pytest.mark.parametrize(
    ("kept", "aliases"),
    [
        ("none", []),
        ("last", [{"latest", "step-3"}]),
        ("best", [{"latest", "step-1", "best"}, {"latest", "step-2", "best"}]),
        (
            "all",
            [{"latest", "step-1", "best"}, {"latest", "step-2", "best"}, {"latest", "step-3"}],
        ),
    ],
)
def test_those_checkpoints_become_artifacts_that_were_asked_for(
    wandb_home: Path, tmp_path: Path, kept: Any, aliases: list[set[str]]
):
    found = save_three(tmp_path, replace(OFFLINE, artifacts=kept))
    assert [set(artifact["aliases"]) for artifact in found] == aliases
    assert {artifact["name"] for artifact in found} <= {f"checkpoint-{ID}"}


def test_a_large_checkpoint_is_referred_to_and_not_copied(
    wandb_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(wandb_view, "UPLOAD_BYTES", 0)
    (artifact,) = save_three(tmp_path, replace(OFFLINE, artifacts="last"))
    entries = artifact["manifest"]["contents"]
    path = tmp_path / "checkpoints" / "step-0000000003"
    assert {entry["ref"] for entry in entries} == {file.as_uri() for file in path.iterdir()}
    assert not list(tmp_path.glob("wandb/staging/**/*.safetensors"))


def test_checkpoints_reach_the_server(tmp_path: Path, server: WandbServer):
    tracker = open_trackers(tmp_path, LABELS, replace(ONLINE, artifacts="last"))
    path = checkpoint.save(tmp_path / "checkpoints", 7, {"step": 7}, 0.5)
    tracker.log_checkpoint(path, 7)
    tracker.finish()
    (artifact,) = server.artifacts
    assert artifact["input"]["artifactCollectionName"] == f"checkpoint-{ID}"
    assert {alias["alias"] for alias in artifact["input"]["aliases"]} == {"latest", "step-7"}


# ---------------------------------------------------------------------------- commands

TESTS = Path(__file__).parent
TOY = "toy_package.workload:WORKLOAD"


class Command:
    """``heliostat`` in a process of its own, as a user starts it."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cluster.cli", *arguments],
            cwd=TESTS,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ends(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, out, err


def steps_done(folder: Path) -> int:
    return max((int(row["step"]) for row in read_metrics(folder)), default=0)


def stop_after(step: int, folder: Path, command: Command) -> None:
    while steps_done(folder) < step:
        assert command.process.poll() is None, command.ends()
        time.sleep(0.05)
    command.process.send_signal(signal.SIGTERM)
    assert command.ends()[0] == 1


def run_id(folder: Path) -> str:
    return json.loads((folder / "environment.json").read_text())["id"]


def start(runs: Path, *overrides: str) -> Command:
    return Command("run", TOY, "--name", "a", "--runs", str(runs), "pause_s=0.02", *overrides)


def test_the_command_logs_online_and_its_resume_continues_the_same_run(
    tmp_path: Path, server: WandbServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WANDB_MODE", "online")
    folder = tmp_path / "a"
    stop_after(12, folder, start(tmp_path, "steps=40", "tracker.tags=[tidal,small]"))
    (run,) = server.runs.values()
    assert len(run.history()) < 40
    assert run.exit_code == 1
    code, _, err = Command("resume", "a", "--runs", str(tmp_path)).ends()
    assert code == 0, err
    assert list(server.runs) == [run_id(folder)]
    rows, kept = run.history(), read_metrics(folder)
    assert steps_of(rows) == list(range(1, 41))
    assert [row["train/fit"] for row in rows] == [row["train/fit"] for row in kept]
    assert sorted({row["attempt"] for row in rows}) == [1, 2]
    assert run.exit_code == 0
    summary = json.loads(run.summary)
    assert summary["train/fit"] == kept[-1]["train/fit"]
    assert summary["best/train/fit"] == max(row["train/fit"] for row in kept)
    assert json.loads(run.config)["layout"]["value"]["learners"] == 0
    assert run.labels["groupName"] == TOY
    assert (run.labels["jobType"], run.labels["displayName"]) == ("train", "a")
    assert sorted(run.labels["tags"]) == ["small", "tidal"]


def test_wandb_sync_uploads_every_attempt_once(tmp_path: Path, server: WandbServer):
    runs, sync = tmp_path / "runs", ("wandb-sync", "--runs", str(tmp_path / "runs"))
    stop_after(12, runs / "a", start(runs, "steps=20"))
    assert Command(*sync).ends()[:2] == (0, "a: 1 uploaded, 0 uploaded before\n")
    assert Command("resume", "a", "--runs", str(runs)).ends()[0] == 0
    assert Command(*sync, "a").ends()[:2] == (0, "a: 1 uploaded, 1 uploaded before\n")
    assert Command(*sync).ends()[:2] == (0, "a: 0 uploaded, 2 uploaded before\n")
    run = server.runs[run_id(runs / "a")]
    assert list(server.runs) == [run_id(runs / "a")]
    assert steps_of(run.history()) == list(range(1, 21))
    assert run.exit_code == 0


def test_wandb_sync_uploads_from_an_object_store_and_marks_it_there(
    tmp_path: Path,
    server: WandbServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(TESTS)
    monkeypatch.setenv("HELIOSTAT_CACHE", str(tmp_path / "cache"))
    place = f"memory://{tmp_path.name}/runs"
    assert cli.main(["run", TOY, "--name", "a", "--runs", place, "steps=3"]) == 0
    shutil.rmtree(tmp_path / "cache")
    for said in ("a: 1 uploaded, 0 uploaded before\n", "a: 0 uploaded, 1 uploaded before\n"):
        capsys.readouterr()
        assert cli.main(["wandb-sync", "--runs", place]) == 0
        assert capsys.readouterr().out == said
    (run,) = server.runs.values()
    assert steps_of(run.history()) == [1, 2, 3]


def test_wandb_sync_takes_what_is_whole_of_a_torn_log(tmp_path: Path, server: WandbServer):
    for steps in (range(5), range(3, 7)):
        tracker = WandbView(tmp_path, LABELS, OFFLINE)
        for step in steps:
            tracker.log({"loss": float(step)}, step)
        tracker.finish()
        next_second()
    first, _ = logs(tmp_path)
    first.write_bytes(first.read_bytes()[:-7])
    done = sync(RunFolder(tmp_path))
    assert (len(done.markers), done.before) == (2, 0)
    assert steps_of(server.runs[ID].history()) == [0, 1, 2, 3, 4, 3, 4, 5, 6]
    assert sync(RunFolder(tmp_path)).before == 2


def test_wandb_sync_leaves_a_run_that_goes_on(tmp_path: Path, server: WandbServer):
    run = start(tmp_path, "steps=100000")
    while steps_done(tmp_path / "a") < 1:
        assert run.process.poll() is None, run.ends()
        time.sleep(0.05)
    code, out, _ = Command("wandb-sync", "--runs", str(tmp_path)).ends()
    assert (code, out) == (0, "a: is running; sync it when it has ended\n")
    assert not server.runs
    run.process.kill()
    run.ends()


def test_wandb_sync_says_in_one_line_what_it_lacks(
    tmp_path: Path, server: WandbServer, monkeypatch: pytest.MonkeyPatch
):
    assert start(tmp_path, "steps=2").ends()[0] == 0
    sync = ("wandb-sync", "a", "--runs", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY")
    code, out, err = Command(*sync).ends()
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert "1 of 1 logs could not be uploaded to W&B" in err
    assert "log in with `wandb login`" in err
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    server.__exit__()
    code, out, err = Command(*sync).ends()
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert "check WANDB_BASE_URL" in err
    assert Command("wandb-sync", "b", "--runs", str(tmp_path)).ends()[0] == 2
