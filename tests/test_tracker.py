from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from logged import FRAMES, LABELS, exercise, figure, next_second, tensorboard_events
from PIL import Image

from heliostat.errors import UsageError
from heliostat.rank import open_trackers
from heliostat.recipe import Tracking
from heliostat.tracker import JsonlTracker, read_metrics, read_rows
from heliostat.views import FanOut, TensorBoardView
from heliostat.wandb_view import wandb_mode

names = st.text(min_size=1).filter(lambda name: name not in {"step", "time"})
metrics = st.dictionaries(names, st.floats(), max_size=4)


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
        tracker.log_video("game", FRAMES, 5.0, step)
    (tmp_path / "events.jsonl").write_text('{"event": "began"}\n')
    (tmp_path / "figures" / "mine.png").write_bytes(b"")
    tracker.rewind(2)
    assert sorted(path.name for path in tmp_path.rglob("*.png")) == [
        "curve-1.png",
        "curve-2.png",
        "mine.png",
    ]
    assert sorted(path.name for path in tmp_path.rglob("*.gif")) == ["game-1.gif", "game-2.gif"]
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


def test_a_film_keeps_its_frames_and_their_pace(tmp_path: Path):
    shades = np.array([0, 120, 255], np.uint8)
    frames = np.broadcast_to(shades[:, None, None, None], (3, 8, 6, 3))
    path = JsonlTracker(tmp_path).log_video("eval/game", frames, 4.0, 7)
    assert path == tmp_path / "videos" / "eval" / "game-7.gif"
    with Image.open(path) as film:
        assert (film.size, film.n_frames, film.info["duration"]) == ((6, 8), 3, 250)
        found = []
        for number in range(3):
            film.seek(number)
            found.append(np.asarray(film.convert("RGB")))
    assert np.array_equal(np.stack(found), frames)


@pytest.mark.parametrize(
    "frames",
    [np.zeros((2, 8, 6), np.uint8), np.zeros((2, 8, 6, 3)), np.zeros((0, 8, 6, 3), np.uint8)],
)
def test_what_is_no_film_is_refused(tmp_path: Path, frames: np.ndarray):
    with pytest.raises(ValueError, match=r"expected frames uint8 \[T, H, W, 3\], found "):
        JsonlTracker(tmp_path).log_video("game", frames, 4.0, 7)
    assert not list(tmp_path.iterdir())


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

    def log_figure(self, name: str, figure: object, step: int) -> Path:
        self._note("log_figure")
        return Path("figure.png")

    def log_video(self, name: str, frames: np.ndarray, fps: float, step: int) -> Path:
        self._note("log_video")
        return Path("film.gif")

    def log_picture(self, name: str, path: Path, step: int) -> None:
        self._note("log_picture")

    def log_checkpoint(self, path: Path, step: int) -> None:
        self._note("log_checkpoint")

    def rewind(self, step: int) -> None:
        self._note("rewind")

    def finish(self, exit_code: int = 0) -> None:
        self._note("finish")

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call in self.failing:
            raise ConnectionError("no route")


EVERYTHING = ("rewind", "log", "log_table", "log_histogram", "log_picture", "log_picture")
EVERYTHING += ("log_checkpoint", "finish")


def test_a_view_that_fails_in_every_call_is_reported_once_and_harms_nothing(tmp_path: Path):
    warnings: list[str] = []
    sound, broken = Recorder(), Recorder(*EVERYTHING)
    exercise(FanOut(JsonlTracker(tmp_path), [broken, sound], warnings.append))
    assert len(read_metrics(tmp_path)) == 1
    assert sound.calls == broken.calls == list(EVERYTHING)
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
    tracker = open_trackers(tmp_path / "run", LABELS, Tracking())
    tracker.log({"loss": 0.5}, 0)
    tracker.finish()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


def test_the_recipes_mode_outranks_the_variable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    assert wandb_mode(Tracking()) == "online"
    assert wandb_mode(Tracking(wandb="disabled")) == "disabled"
    monkeypatch.delenv("WANDB_MODE")
    assert wandb_mode(Tracking()) == "offline"


def test_an_unknown_mode_is_the_users_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_MODE", "onlin")
    with pytest.raises(UsageError, match="offline, online, disabled, found 'onlin'"):
        open_trackers(tmp_path, LABELS, Tracking())


def test_the_modules_load_no_tracking_service():
    modules = "heliostat.tracker, heliostat.views, heliostat.wandb_view, heliostat.gauges"
    code = f"import sys, heliostat.progress, {modules}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    heavy = {"wandb", "tensorboardX", "matplotlib", "torch", "ray", "PIL", "rich"}
    assert not heavy & set(loaded.stdout.split())


# ---------------------------------------------------------------------------- TensorBoard


def test_tensorboard_gets_scalars_tables_histograms_and_pictures(tmp_path: Path):
    pictures = JsonlTracker(tmp_path)
    tracker = TensorBoardView(tmp_path)
    tracker.log({"train/loss": 0.5}, 3)
    tracker.log_table("answers", ["q", "a"], [["1+1", 2]], 3)
    tracker.log_histogram("lengths", np.array([1.0, 2.0, math.nan]), 3)
    tracker.log_histogram("nothing", np.array([]), 3)
    tracker.log_picture("curve", pictures.log_figure("curve", figure(), 3), 3)
    tracker.log_picture("game", pictures.log_video("game", FRAMES, 5.0, 3), 3)
    tracker.finish()
    events = tensorboard_events(tmp_path)
    values = {value.tag: (event.step, value) for event in events for value in event.summary.value}
    assert {step for step, _ in values.values()} == {3}
    assert values["train/loss"][1].simple_value == 0.5
    assert values["lengths"][1].histo.num == 2
    assert values["curve"][1].image.encoded_image_string.startswith(b"\x89PNG")
    film = values["game"][1].image
    assert (film.height, film.width) == (8, 6)
    assert film.encoded_image_string == (tmp_path / "videos" / "game-3.gif").read_bytes()
    text = next(value for tag, (_, value) in values.items() if tag.startswith("answers"))
    assert text.tensor.string_val[0].decode() == "| q | a |\n| --- | --- |\n| 1+1 | 2 |"


def test_tensorboard_hides_what_a_rewind_forgets(tmp_path: Path):
    tracker = TensorBoardView(tmp_path)
    tracker.log({"loss": 1.0}, 7)
    next_second()
    tracker.rewind(4)
    tracker.log({"loss": 2.0}, 5)
    tracker.finish()
    starts = [event.step for event in tensorboard_events(tmp_path) if event.session_log.status == 1]
    assert starts == [5]
