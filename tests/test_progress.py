from __future__ import annotations

import io
import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heliostat.progress import Progress
from heliostat.tracker import JsonlTracker


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def write(folder: Path, *rows: tuple[float, int, dict[str, float | str]]) -> None:
    """Appends rows (time, step, metrics), as a learner on another node would."""
    lines = [json.dumps({"step": step, "time": at, **metrics}) for at, step, metrics in rows]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("".join(line + "\n" for line in lines))


def lines(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def test_a_line_tells_steps_rate_time_left_and_metrics(tmp_path: Path):
    stream = io.StringIO()
    with Progress(tmp_path, 400, "t1-smoke", stream) as progress:
        progress.poll()
        write(tmp_path, (1000.0, 1, {}))
        progress.poll()
        rows = [(1000 + step / 3.2, step, {"train/loss": 0.52, "n": 7.0}) for step in range(2, 121)]
        write(tmp_path, *rows)
    assert lines(stream) == [
        "t1-smoke 1/400 steps",
        "t1-smoke 120/400 steps 3.2/s 1m28s left loss=0.52 n=7",
    ]


def test_plain_lines_keep_their_distance_and_the_last_state_is_told(tmp_path: Path):
    stream = io.StringIO()
    with Progress(tmp_path, 100, "run", stream) as progress:
        for step in range(1, 101):
            write(tmp_path, (float(step), step, {}))
            progress.poll()
    first, last = lines(stream)
    assert first == "run 1/100 steps"
    assert last == "run 100/100 steps 1/s 0s left"


def test_nothing_is_told_twice(tmp_path: Path):
    stream = io.StringIO()
    write(tmp_path, (0.0, 3, {"loss": 1.0}))
    with Progress(tmp_path, 10, "run", stream) as progress:
        progress.poll()
        progress.poll()
    assert lines(stream) == ["run 3/10 steps loss=1"]


def test_a_run_that_never_logged_shows_nothing(tmp_path: Path):
    stream, terminal = io.StringIO(), Terminal()
    for out in (stream, terminal):
        with Progress(tmp_path, 10, "run", out) as progress:
            progress.poll()
        assert progress.step is None
        assert out.getvalue() == ""


def test_asked_for_metrics_come_in_the_order_asked(tmp_path: Path):
    stream = io.StringIO()
    write(tmp_path, (0.0, 1, {"a": 1.0, "train/loss": 2.0, "eval/loss": 3.0, "b": 4.0}))
    with Progress(tmp_path, 9, "run", stream, keys=["eval/loss", "b", "train/loss", "absent"]):
        pass
    assert lines(stream) == ["run 1/9 steps eval/loss=3 b=4 train/loss=2"]


def test_metrics_stay_until_they_are_logged_again(tmp_path: Path):
    stream = io.StringIO()
    write(tmp_path, (0.0, 1, {"eval/return": 5.0}), (1.0, 2, {"loss": 0.5}))
    with Progress(tmp_path, 9, "run", stream):
        pass
    assert lines(stream) == ["run 2/9 steps return=5 loss=0.5"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [("NaN", "nan"), ("-Infinity", "-inf"), (123456.7, "123457"), (0.00012345, "0.000123")],
)
def test_numbers_are_short(tmp_path: Path, value: float | str, shown: str):
    stream = io.StringIO()
    write(tmp_path, (0.0, 1, {"x": value}))
    with Progress(tmp_path, 9, "run", stream):
        pass
    assert lines(stream) == [f"run 1/9 steps x={shown}"]


@pytest.mark.parametrize(
    ("rest_s", "shown"),
    [(45, "45s"), (87, "1m27s"), (7380, "2h03m"), (273_600, "3d04h"), (59.7, "1m00s")],
)
def test_time_left_is_readable(tmp_path: Path, rest_s: float, shown: str):
    stream = io.StringIO()
    with Progress(tmp_path, 3, "run", stream) as progress:
        write(tmp_path, (0.0, 0, {}))
        progress.poll()
        write(tmp_path, (1.0, 1, {}), (1.0 + rest_s, 2, {}))
    assert lines(stream)[-1].endswith(f"{shown} left")


def test_a_resumed_run_starts_where_it_is_and_measures_only_new_steps(tmp_path: Path):
    stream = io.StringIO()
    write(tmp_path, *[(float(step), step, {}) for step in range(100)])
    with Progress(tmp_path, 400, "run", stream) as progress:
        progress.poll()
        assert progress.step == 99
        later = 50_000.0
        write(tmp_path, *[(later + step / 2, step, {}) for step in range(100, 111)])
    assert lines(stream) == ["run 99/400 steps", "run 110/400 steps 2/s 2m25s left"]


def test_the_display_goes_back_with_a_rewind(tmp_path: Path):
    tracker = JsonlTracker(tmp_path)
    stream = io.StringIO()
    with Progress(tmp_path, 100, "run", stream) as progress:
        for step in range(20):
            tracker.log({"loss": float(step)}, step)
        progress.poll()
        assert progress.step == 19
        tracker.rewind(9)
        progress.poll()
        assert progress.step == 9
        tracker.log({"loss": 0.5}, 10)
        progress.poll()
        assert progress.step == 10
    assert lines(stream)[-1] == "run 10/100 steps loss=0.5"
    tracker.finish()


def test_a_rewind_to_nothing_starts_over(tmp_path: Path):
    tracker = JsonlTracker(tmp_path)
    progress = Progress(tmp_path, 100, "run", io.StringIO())
    tracker.log({}, 5)
    progress.poll()
    tracker.rewind(-1)
    progress.poll()
    assert progress.step is None
    tracker.log({}, 0)
    progress.poll()
    assert progress.step == 0
    tracker.finish()


def test_an_older_step_logged_late_moves_nothing_back(tmp_path: Path):
    stream = io.StringIO()
    write(tmp_path, (0.0, 7, {"loss": 1.0}), (1.0, 3, {"eval/return": 2.0}))
    with Progress(tmp_path, 9, "run", stream):
        pass
    assert lines(stream) == ["run 7/9 steps loss=1 return=2"]


@given(st.lists(st.integers(1, 40), max_size=20))
@settings(max_examples=30, deadline=None)
def test_rows_are_read_once_however_the_file_grows(tmp_path_factory, cuts: list[int]):
    folder = tmp_path_factory.mktemp("run")
    rows = [json.dumps({"step": step, "time": step, "loss": step}) for step in range(8)]
    data = "".join(row + "\n" for row in rows).encode()
    progress = Progress(folder, 8, "run", io.StringIO())
    written = 0
    with (folder / "metrics.jsonl").open("ab", buffering=0) as file:
        for cut in [*cuts, len(data)]:
            file.write(data[written : written + cut])
            written = min(len(data), written + cut)
            progress.poll()
            whole = data[:written].count(b"\n")
            assert progress.step == (whole - 1 if whole else None)
    assert progress.step == 7


def test_a_poll_of_a_long_file_reads_only_what_is_new(tmp_path: Path):
    write(tmp_path, *[(float(step), step, {"loss": 1.0, "x": 2.0}) for step in range(100_000)])
    progress = Progress(tmp_path, 200_000, "run", io.StringIO())
    start = time.process_time()
    progress.poll()
    whole_s = time.process_time() - start
    start = time.process_time()
    for step in range(100_000, 100_200):
        write(tmp_path, (float(step), step, {}))
        progress.poll()
    assert progress.step == 100_199
    assert (time.process_time() - start) / 200 < whole_s / 100


def test_a_terminal_shows_one_bar_with_the_same_facts(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    with Progress(tmp_path, 400, "t1-smoke", terminal) as progress:
        write(tmp_path, (0.0, 0, {}))
        progress.poll()
        write(tmp_path, (1.0, 1, {}), (60.0, 120, {"train/loss": 0.52, "odd[name]": 1.0}))
        progress.poll()
    shown = terminal.getvalue()
    assert "t1-smoke" in shown
    assert "120/400" in shown
    assert "2.02/s 2m19s left loss=0.52 odd[name]=1" in shown
    assert "━" in shown
    assert shown.count("120/400") <= 2  # drawn for the news, and once more at the end


def test_a_narrow_terminal_cuts_metrics_instead_of_wrapping(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    write(tmp_path, (0.0, 1, {f"train/metric{number}": 0.123 for number in range(3)}))
    with Progress(tmp_path, 4, "t1-smoke", terminal):
        pass
    bars = [line for line in terminal.getvalue().splitlines() if "1/4" in line]
    assert bars
    assert all("…" in line for line in bars)
