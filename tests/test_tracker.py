from __future__ import annotations

import json
import math
import os
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from matplotlib.figure import Figure
from wandb_server import WandbServer

from heliostat.errors import UsageError
from heliostat.tracker import FanOut, JsonlTracker, read_metrics, read_rows
from heliostat.views import (
    TensorBoardTracker,
    WandbTracker,
    open_trackers,
    public_config,
    wandb_mode,
)

LABELS = {
    "run_id": "t1-smoke-1f2e",
    "name": "t1-smoke",
    "group": "smoke",
    "job_type": "train",
    "config": {"lr": 1.0, "layout": {"learners": 2}},
}
ID = LABELS["run_id"]
KEY = "0123456789abcdef0123456789abcdef01234567"

names = st.text(min_size=1).filter(lambda name: name not in {"step", "time"})
metrics = st.dictionaries(names, st.floats(), max_size=4)


def figure() -> Figure:
    drawing = Figure(figsize=(1, 1))
    drawing.subplots().plot([0, 1])
    return drawing


def next_second() -> None:
    """Waits: event files and W&B's folders are named by the second."""
    time.sleep(1.01 - time.time() % 1)


def strict(line: bytes) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(line, parse_constant=refuse)


def same(left: float, right: float) -> bool:
    return left == right or (math.isnan(left) and math.isnan(right))


# ---------------------------------------------------------------------------- JSON lines


@given(st.lists(metrics, max_size=5))
@settings(deadline=None)
def test_metrics_come_back_as_they_were_logged(rows: list[dict[str, float]]):
    with tempfile.TemporaryDirectory() as folder:
        tracker = JsonlTracker(Path(folder))
        for step, row in enumerate(rows):
            tracker.log(row, step)
        found = read_metrics(Path(folder))
        tracker.finish()
    assert [row.pop("step") for row in found] == list(range(len(rows)))
    assert all(abs(time.time() - row.pop("time")) < 60 for row in found)
    assert [list(row) for row in found] == [list(row) for row in rows]
    for logged, read in zip(rows, found, strict=True):
        assert all(same(logged[name], read[name]) for name in logged)


def test_every_line_is_strict_json(tmp_path: Path):
    tracker = JsonlTracker(tmp_path)
    tracker.log({"a": math.nan, "b": math.inf, "c": -math.inf}, 0)
    tracker.log_table("t", ["x", "y"], [[math.nan, "NaN"], [np.float32(0.5), np.int64(3)]], 0)
    tracker.log_histogram("h", np.array([math.nan, 1.0]), 0)
    lines = [line for path in tmp_path.rglob("*.jsonl") for line in path.read_bytes().splitlines()]
    assert len([strict(line) for line in lines]) == 4
    tracker.finish()


def test_a_row_is_on_the_disk_when_log_returns(tmp_path: Path):
    tracker = JsonlTracker(tmp_path)
    tracker.log({"loss": 0.5}, 3)
    assert read_metrics(tmp_path)[0]["loss"] == 0.5
    tracker.finish()


@given(st.integers(0, 60), st.floats(0, 1))
@settings(max_examples=40, deadline=None)  # the disk may be busy
def test_a_torn_last_row_is_dropped_and_logging_goes_on(torn: int, share: float):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first = JsonlTracker(folder)
        for step in range(4):
            first.log({"loss": float(step)}, step)
        first.finish()
        path = folder / "metrics.jsonl"
        whole = path.read_bytes()
        kept = round(share * len(whole))
        path.write_bytes(whole[:kept] + b"\0" * torn)
        complete = whole[:kept].count(b"\n")
        assert len(read_metrics(folder)) == complete
        second = JsonlTracker(folder)
        second.log({"loss": 9.0}, 9)
        second.finish()
        steps = [row["step"] for row in read_metrics(folder)]
    assert steps == [*range(complete), 9]


def test_a_long_torn_row_is_cut(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "time": 0}\n{"' + b"x" * 200_000)
    tracker = JsonlTracker(tmp_path)
    tracker.log({}, 2)
    tracker.finish()
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]


def test_a_broken_row_in_the_middle_is_named(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: expected one JSON object, .*nonsense"):
        read_metrics(tmp_path)


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(-1, 9), st.booleans())
@settings(max_examples=40, deadline=None)  # the disk may be busy
def test_rewind_keeps_exactly_the_rows_up_to_its_step(steps: list[int], to: int, torn: bool):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tracker = JsonlTracker(folder)
        for step in steps:
            tracker.log({"loss": 0.0}, step)
            tracker.log_table("eval/answers", ["text"], [["a"], ["b"]], step)
            tracker.log_histogram("lengths", np.arange(3), step)
        if torn and steps:
            with (folder / "metrics.jsonl").open("ab") as file:
                file.write(b'{"step": 0, "ti')
        tracker.rewind(to)
        tracker.log({"loss": 1.0}, 10)
        kept = [step for step in steps if step <= to]
        assert [row["step"] for row in read_metrics(folder)] == [*kept, 10]
        answers = [row["step"] for row in read_rows(folder / "tables" / "eval" / "answers.jsonl")]
        assert answers == [step for step in kept for _ in range(2)]
        assert [row["step"] for row in read_rows(folder / "histograms.jsonl")] == kept
        assert not list(folder.rglob("*.partial"))
        tracker.finish()


def test_rewind_removes_later_pictures_and_leaves_other_files_alone(tmp_path: Path):
    tracker = JsonlTracker(tmp_path)
    for step in (1, 2, 3):
        tracker.log_figure("eval/curve", figure(), step)
    (tmp_path / "events.jsonl").write_text('{"event": "began"}\n')
    (tmp_path / "figures" / "mine.png").write_bytes(b"")
    tracker.rewind(2)
    assert sorted(path.name for path in tmp_path.rglob("*.png")) == [
        "curve-1.png",
        "curve-2.png",
        "mine.png",
    ]
    assert (tmp_path / "figures/eval/curve-1.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "events.jsonl").read_text() == '{"event": "began"}\n'


def test_rewind_to_the_newest_step_leaves_the_file_itself(tmp_path: Path):
    tracker = JsonlTracker(tmp_path)
    tracker.log({"loss": 0.0}, 5)
    before = (tmp_path / "metrics.jsonl").stat().st_ino
    tracker.rewind(5)
    assert (tmp_path / "metrics.jsonl").stat().st_ino == before


@pytest.mark.parametrize("name", ["step", "time"])
def test_a_metric_cannot_shadow_the_columns_of_every_row(tmp_path: Path, name: str):
    with pytest.raises(ValueError, match=f"no metric may be called '{name}'"):
        JsonlTracker(tmp_path).log({name: 1.0}, 0)


def test_a_row_of_the_wrong_length_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"one cell for each of \['a', 'b'\], found \[1\]"):
        JsonlTracker(tmp_path).log_table("t", ["a", "b"], [[1]], 0)


@pytest.mark.parametrize("name", ["../up", "/abs", "a//b", "a/../b", "", ".hidden", "a b"])
def test_a_name_cannot_leave_the_folder(tmp_path: Path, name: str):
    with pytest.raises(ValueError, match="expected letters, digits"):
        JsonlTracker(tmp_path).log_table(name, ["a"], [[1]], 0)
    assert not list(tmp_path.rglob("*.jsonl"))


@given(
    hnp.arrays(st.sampled_from([np.float64, np.float32, np.int64]), hnp.array_shapes(min_side=0))
)
@settings(deadline=None)
def test_a_histogram_counts_every_finite_value_once(values: np.ndarray):
    with tempfile.TemporaryDirectory() as folder:
        tracker = JsonlTracker(Path(folder))
        tracker.log_histogram("h", values, 0)
        tracker.finish()
        (row,) = read_rows(Path(folder) / "histograms.jsonl")
    assert len(row["counts"]) == 64
    assert len(row["edges"]) == 65
    assert sum(row["counts"]) + row["not_finite"] == values.size
    assert row["not_finite"] == np.sum(~np.isfinite(values))
    assert all(low <= high for low, high in zip(row["edges"], row["edges"][1:], strict=False))


def test_logging_a_row_is_quick(tmp_path: Path):
    tracker = JsonlTracker(tmp_path)
    row = {f"train/{number}": float(number) for number in range(20)}
    start = time.process_time()
    for step in range(1000):
        tracker.log(row, step)
    assert time.process_time() - start < 1.0  # a millisecond a row; a twentieth is usual
    tracker.finish()


# ---------------------------------------------------------------------------- all together


class Recorder:
    """Keeps what it is sent; ``failing`` calls raise."""

    def __init__(self, *failing: str) -> None:
        self.calls: list[str] = []
        self.failing = failing

    def log(self, metrics: Mapping[str, float | int], step: int) -> None:
        self._note("log")

    def log_table(
        self,
        name: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[str | float | int | bool]],
        step: int,
    ) -> None:
        self._note("log_table")

    def log_histogram(self, name: str, values: np.ndarray, step: int) -> None:
        self._note("log_histogram")

    def log_figure(self, name: str, figure: Figure, step: int) -> None:
        self._note("log_figure")

    def rewind(self, step: int) -> None:
        self._note("rewind")

    def finish(self, exit_code: int = 0) -> None:
        self._note("finish")

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call in self.failing:
            raise ConnectionError("no route")


EVERYTHING = ("log", "log_table", "log_histogram", "log_figure", "rewind", "finish")


def exercise(tracker: FanOut) -> None:
    tracker.rewind(-1)
    tracker.log({"loss": 0.5}, 0)
    tracker.log_table("t", ["a"], [[1]], 0)
    tracker.log_histogram("h", np.arange(3), 0)
    tracker.log_figure("f", figure(), 0)
    tracker.finish()


def test_a_view_that_fails_in_every_call_is_reported_once_and_harms_nothing(tmp_path: Path):
    warnings: list[str] = []
    sound, broken = Recorder(), Recorder(*EVERYTHING)
    exercise(FanOut(JsonlTracker(tmp_path), [broken, sound], warnings.append))
    assert len(read_metrics(tmp_path)) == 1
    assert sorted(sound.calls) == sorted(broken.calls) == sorted(EVERYTHING)
    (warning,) = warnings
    assert "Recorder.rewind failed" in warning
    assert "no route" in warning


def test_a_call_that_keeps_failing_is_given_up_while_the_others_go_on(tmp_path: Path):
    view = Recorder("log_table")
    tracker = FanOut(JsonlTracker(tmp_path), [view], lambda _: None)
    for step in range(10):
        tracker.log({"loss": 0.5}, step)
        tracker.log_table("t", ["a"], [[1]], step)
    assert view.calls.count("log_table") == 3
    assert view.calls.count("log") == 10


def test_a_failure_now_and_then_gives_nothing_up(tmp_path: Path):
    view = Recorder()
    tracker = FanOut(Recorder(), [view], lambda _: None)
    for step in range(12):
        view.failing = ("log",) if step % 2 else ()
        tracker.log({}, step)
    assert view.calls.count("log") == 12


def test_errors_of_the_primary_tracker_count_and_views_are_closed_even_so():
    view = Recorder()
    tracker = FanOut(Recorder(*EVERYTHING), [view], lambda _: None)
    with pytest.raises(ConnectionError):
        tracker.log({}, 0)
    with pytest.raises(ConnectionError):
        tracker.finish(1)
    assert view.calls == ["finish"]


def test_a_disk_that_refuses_rows_is_an_error(tmp_path: Path):
    tracker = FanOut(JsonlTracker(tmp_path), [])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
    try:
        with pytest.raises(
            OSError, match=r"metrics\.jsonl: wrote 20 of \d+ bytes; is the disk full"
        ):
            tracker.log({"loss": 1.0}, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    tracker.log({"loss": 1.0}, 1)
    tracker.finish()
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]


def test_disabled_views_leave_json_lines_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    tracker = open_trackers(tmp_path / "run", **LABELS)
    tracker.log({"loss": 0.5}, 0)
    tracker.finish()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


def test_the_callers_mode_outranks_the_variable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    assert wandb_mode() == "online"
    assert wandb_mode("disabled") == "disabled"
    monkeypatch.delenv("WANDB_MODE")
    assert wandb_mode() == "offline"


def test_an_unknown_mode_is_the_users_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_MODE", "onlin")
    with pytest.raises(UsageError, match="offline, online, disabled, found 'onlin'"):
        open_trackers(tmp_path, **LABELS)


def test_the_module_loads_no_tracking_service():
    code = "import sys, heliostat.tracker, heliostat.progress; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    heavy = {"wandb", "tensorboardX", "matplotlib", "torch", "ray", "PIL", "rich"}
    assert not heavy & set(loaded.stdout.split())


# ---------------------------------------------------------------------------- TensorBoard


def tensorboard_events(folder: Path) -> list[Any]:
    from tensorboardX.proto.event_pb2 import Event

    events = []
    for path in sorted(folder.rglob("events.*"), key=lambda path: path.stat().st_mtime_ns):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            events.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return events


def test_tensorboard_gets_scalars_tables_histograms_and_pictures(tmp_path: Path):
    tracker = TensorBoardTracker(tmp_path)
    tracker.log({"train/loss": 0.5}, 3)
    tracker.log_table("answers", ["q", "a"], [["1+1", 2]], 3)
    tracker.log_histogram("lengths", np.array([1.0, 2.0, math.nan]), 3)
    tracker.log_histogram("nothing", np.array([]), 3)
    tracker.log_figure("curve", figure(), 3)
    tracker.finish()
    events = tensorboard_events(tmp_path)
    values = {value.tag: (event.step, value) for event in events for value in event.summary.value}
    assert {step for step, _ in values.values()} == {3}
    assert values["train/loss"][1].simple_value == 0.5
    assert values["lengths"][1].histo.num == 2
    assert values["curve"][1].image.encoded_image_string.startswith(b"\x89PNG")
    text = next(value for tag, (_, value) in values.items() if tag.startswith("answers"))
    assert text.tensor.string_val[0].decode() == "| q | a |\n| --- | --- |\n| 1+1 | 2 |"


def test_tensorboard_hides_what_a_rewind_forgets(tmp_path: Path):
    tracker = TensorBoardTracker(tmp_path)
    tracker.log({"loss": 1.0}, 7)
    next_second()
    tracker.rewind(4)
    tracker.log({"loss": 2.0}, 5)
    tracker.finish()
    starts = [event.step for event in tensorboard_events(tmp_path) if event.session_log.status == 1]
    assert starts == [5]


# ---------------------------------------------------------------------------- W&B


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
    tracker = open_trackers(folder, wandb="offline", tensorboard=True, **LABELS)
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
    assert run["config"]["update"] | LABELS["config"] == run["config"]["update"]
    assert {"glob_name": "*", "step_metric": "step"}.items() <= next(
        r["metric"] for r in found if r["type"] == "metric" and "glob_name" in r["metric"]
    ).items()
    row, table, histogram, picture = history(log)
    assert (row["loss"], row["step"], row["attempt"]) == (0.5, 0, 1)
    assert table["t._type"] == "table-file"
    assert histogram["h._type"] == "histogram"
    assert sum(histogram["h.values"]) == 3
    assert picture["f._type"] == "image-file"
    assert found[-1]["exit"]["exit_code"] == 0
    media = [path.suffix for path in log.parent.joinpath("files").rglob("*") if path.is_file()]
    assert sorted(media) == [".json", ".png"]
    # What a table needs for a later upload lies with the run, not in somebody's home.
    assert list(folder.glob("wandb/staging/artifacts/staging/*"))


def test_a_resumed_run_keeps_its_id_its_rows_and_its_axis(
    wandb_home: Path, tmp_path: Path, server: WandbServer
):
    for steps in (range(5), range(3, 7), range(5, 9)):
        tracker = WandbTracker(tmp_path, mode="offline", **LABELS)
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
        labels = {**LABELS, "config": {"lr": float(attempt)}}
        tracker = WandbTracker(tmp_path, mode="online", **labels)
        for step in steps:
            tracker.log({"train/loss": float(step), "nan": math.nan, "inf": math.inf}, step)
        tracker.log_table("answers", ["q", "a"], [("1+1", 2), ["?", "none"]], steps[-1])
        tracker.log_histogram("lengths", np.arange(5.0), steps[-1])
        tracker.log_figure("curve", figure(), steps[-1])
        tracker.finish(0 if attempt == 2 else 1)
        next_second()
    run = server.runs[ID]
    rows = run.history()
    assert steps_of([row for row in rows if "train/loss" in row]) == [0, 1, 2, 2, 3, 4]
    assert [row["attempt"] for row in rows] == [1] * 6 + [2] * 6
    assert [row["_step"] for row in rows] == sorted({row["_step"] for row in rows})
    assert all(math.isnan(row["nan"]) and row["inf"] == math.inf for row in rows if "nan" in row)
    types = [row[key]["_type"] for row in rows for key in row if isinstance(row[key], dict)]
    assert types == ["table-file", "histogram", "image-file"] * 2
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
        tracker = open_trackers(tmp_path, **LABELS)
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
    tracker = WandbTracker(tmp_path, mode="online", **LABELS)
    tracker.log({"loss": 0.5}, 0)
    tracker.finish()
    assert "No API key configured" in caplog.text
    (log,) = logs(tmp_path)
    assert steps_of(history(log)) == [0]


def test_a_server_that_dies_costs_a_failed_run_three_seconds(tmp_path: Path, server: WandbServer):
    tracker = WandbTracker(tmp_path, mode="online", **LABELS)
    server.__exit__()
    start = time.monotonic()
    tracker.log({"loss": 0.5}, 0)
    assert time.monotonic() - start < 0.5
    with pytest.raises(TimeoutError):
        tracker.finish(1)
    assert time.monotonic() - start < 4.5


def test_two_runs_of_one_process_stay_apart(wandb_home: Path, tmp_path: Path):
    trackers = {
        name: WandbTracker(tmp_path / name, mode="offline", **{**LABELS, "run_id": name})
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
from heliostat.views import open_trackers
tracker = open_trackers(Path(sys.argv[1]), wandb="offline", **{LABELS!r})
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
    config = {
        "data": str(wandb_home / "data" / "shards"),
        "url": f"s3://bucket?auth={secret}",
        "hub": {"hf_token": "hf_abcdefghijklmnopqrstuvwxyz012345"},
    }
    for mode in ("offline", "online"):
        tracker = WandbTracker(tmp_path / mode, mode=mode, **{**LABELS, "config": config})
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


# ---------------------------------------------------------------------------- privacy


@pytest.mark.parametrize(
    "name",
    [
        *("api_key", "apiKey", "WANDB_API_KEY", "hf_token", "HFToken", "password", "db.passwd"),
        *("client_secret", "secret_name", "aws_secret_access_key", "credentials", "auth"),
    ],
)
def test_values_under_secret_names_are_masked(name: str):
    assert public_config({"a": [{name: "plain"}]}, {}) == {"a": [{name: "***"}]}
    assert public_config({name: {"nested": 1}}, {}) == {name: "***"}


def test_numbers_and_names_that_only_look_secret_stay():
    config = {
        "max_tokens": 1024,
        "num_keys": 3,
        "tokenizer": "bytes",
        "key_dim": "wide",
        "token_level": "word",
        "use_token": True,
        "api_key": None,
        "monkey": "banana",
    }
    assert public_config(config, {}) == config


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("hf_abcdefghijklmnopqrstuvwx", "***"),
        ("use sk-proj-abcdefghijklmnop now", "use *** now"),
        ("ghp_abcdefghijklmnopqrstuvwxyz0123456789", "***"),
        ("AKIAIOSFODNN7EXAMPLE", "***"),
        ("redis://user:hunter2@host:6379/0", "redis://***@host:6379/0"),
        ("Authorization: Bearer abcdef123456", "Authorization: Bearer ***"),
        ("eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl", "***"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n", "***"),
        ("https://store/x?n=1&X-Amz-Signature=abc&m=2", "https://store/x?n=1***&m=2"),
        ("https://example.org/a:b", "https://example.org/a:b"),
        ("risk-averse-policy-with-long-name", "risk-averse-policy-with-long-name"),
    ],
)
def test_credentials_are_known_by_their_form(text: str, shown: str):
    assert public_config({"value": text}, {}) == {"value": shown}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/srv/ada/data", "~/data"),
        ("/srv/ada", "~"),
        ("--out=/srv/ada/x,/srv/ada/y", "--out=~/x,~/y"),
        ("/srv/adaptive", "/srv/adaptive"),
        ("/data/srv/ada", "/data/srv/ada"),
        ("/home/grace/runs", "~/runs"),
        ("file:///Users/grace/runs", "file://~/runs"),
        ("/root/.cache", "~/.cache"),
        ("/mnt/home/grace", "/mnt/home/grace"),
    ],
)
def test_home_folders_become_a_tilde(text: str, shown: str):
    assert public_config({"path": text}, {"HOME": "/srv/ada"}) == {"path": shown}
    assert public_config({"path": Path(text)}, {"HOME": "/srv/ada"}) == {
        "path": public_config({"path": str(Path(text))}, {"HOME": "/srv/ada"})["path"]
    }


@given(
    st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), min_size=8),
    st.recursive(
        st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5
    ),
)
@settings(deadline=None)
def test_a_secret_of_the_environment_occurs_nowhere(secret: str, rest: Any):
    config = {"x": f"before{secret}after", "list": [secret, {secret: 1}], "rest": rest}
    shown = str(public_config(config, {"DB_PASSWORD": secret}))
    assert repr(secret)[1:-1] not in re.sub(re.escape(repr(rest)), "", shown) or secret in "***"


def test_publishing_leaves_the_config_itself_alone():
    config = {"token": "abc", "list": [{"key": "x"}], "path": ("/root/a",)}
    before = json.dumps(config)
    assert public_config(config, {}) == {"token": "***", "list": [{"key": "***"}], "path": ["~/a"]}
    assert json.dumps(config) == before
