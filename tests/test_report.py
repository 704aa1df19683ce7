"""A report shows what a run's files say, as text, and needs nothing outside itself."""

from __future__ import annotations

import base64
import io
import json
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from PIL import Image

from cluster.plots import SMOOTH_ABOVE, plot_lines, plot_phases, plot_time_line, smooth, spread
from cluster.report import write_report
from heliostat.folder import RunFolder
from heliostat.recipe import Recipe
from heliostat.tracker import JsonlTracker

HOSTILE = "\"'><script>alert(1)</script><img src=http://evil.example/x onerror=alert(1)>{{ 7 * 7 }}"

METHOD = {
    "name": "toy",
    "summary": "learns to count",
    "paper": "Counting, A. Author et al., 2025",
    "score": None,
    "total_steps": 4,
    "plots": [
        {
            "title": "Accuracy",
            "metrics": ["eval/greedy", "eval/sampled"],
            "level": "start_accuracy",
        },
        {"title": "Never", "metrics": ["train/nothing"], "level": None},
    ],
}
"""As a launch records it."""


class Page(HTMLParser):
    """Collects tags, attributes and text of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data):
        self.text += data

    def sources(self) -> list[str]:
        return [value for name, value in self.attributes if name in {"src", "srcset"}]


def write_json_lines(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_run(root: Path, name: str = "tidal-1", hostile: str = "") -> RunFolder:
    folder = RunFolder(root / name)
    folder.path.mkdir(parents=True)
    folder.recipe.write_text(Recipe(steps=4).to_yaml() + f"# {hostile}\n")
    record = {
        "id": "0123456789ab",
        "workload": f"toy{hostile}",
        "method": {
            **METHOD,
            "summary": METHOD["summary"] + hostile,
            "paper": METHOD["paper"] + hostile,
        },
        "fingerprint": "f" * 16,
        "created": 1e9,
        "code": "c0de" * 4,
        "versions": {"ray": "2.60.0", "torch": "2.13.0", f"lib{hostile}": hostile},
        f"key{hostile}": hostile,
    }
    folder.record.write_text(json.dumps(record))
    rows = [
        {
            "step": step,
            "time": 1e9 + 60 * step,
            "eval/greedy": step / 5,
            "eval/sampled": "NaN",
            "perf/sample_s": 1.0,
            "perf/learn_s": 0.5,
            "perf/samples_per_s": 900.0,
            "perf/step_s": 2.0,
            f"perf/{hostile}_s": 0.1,
        }
        for step in (1, 2, 3, 4)
    ]
    write_json_lines(folder.path / "metrics.jsonl", rows)
    answers = [
        {"step": 1, "answer": "right at first", "right": True},
        {"step": 2, "answer": "wrong at second", "right": False},
        {"step": 3, f"answer{hostile}": hostile, "right": True},
    ]
    write_json_lines(folder.path / "tables" / "answers.jsonl", answers)
    events = [
        {"time": 1e9, "event": "attempt", "number": 1},
        {"time": 1e9 + 10, "event": "saved", "step": 1, "path": "step-1"},
        {"time": 1e9 + 20, "event": "saved", "step": 2, "path": "step-2"},
        {"time": 1e9 + 90, "event": "learner-lost", "reason": hostile},
        {"time": 1e9 + 91, "event": "attempt", "number": 2},
        {"time": 1e9 + 3700, "event": f"finished{hostile}", f"key{hostile}": hostile},
    ]
    write_json_lines(folder.events.path, events)
    final = {"accuracy": 0.8125, "start_accuracy": 0.25, f"metric{hostile}": 1.0}
    folder.result.write_text(json.dumps(final))
    return folder


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return Page(write_report(make_run(tmp_path_factory.mktemp("runs"))))


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("runs"), "<script>name<", HOSTILE)
    write_json_lines(folder.path / "tables" / "<img onerror=x>.jsonl", [{"a": HOSTILE}])
    return Page(write_report(folder))


@pytest.mark.parametrize(
    "said",
    [
        "tidal-1",
        "finished",
        "learns to count",
        "Counting, A. Author et al., 2025",
        "0.8125",
        "4 of 4",
        "2001-09-09 01:46 UTC",
        "1:01:40",
        "right at first",
        "answers: wrong",
        "checkpoint_every: 100",
        "2.60.0",
        "c0dec0dec0dec0de",
        "learner-lost",
        "step 1 … 2, checkpoints 2",
        "Nothing logged yet for: Never.",
    ],
)
def test_the_page_says(page, said):
    assert said in page.text


def test_nothing_that_a_run_holds_becomes_markup(page, hostile_page):
    assert "script" not in hostile_page.tags
    assert set(hostile_page.tags) == set(page.tags)
    assert {name for name, _ in hostile_page.attributes} <= {name for name, _ in page.attributes}
    assert not [name for name, _ in hostile_page.attributes if name.startswith("on")]


def test_hostile_text_is_shown_as_it_is(hostile_page):
    # result, provenance (4), recipe, table cells and columns (3), events (4)
    assert hostile_page.text.count(HOSTILE) >= 13
    assert "<img onerror=x>" in hostile_page.text


def test_the_page_asks_for_nothing_from_outside(hostile_page):
    assert hostile_page.sources()
    assert all(source.startswith("data:image/png;base64,") for source in hostile_page.sources())
    assert not {"link", "iframe", "object", "form", "base", "a"} & set(hostile_page.tags)
    policy = next(v for _, v in hostile_page.attributes if v.startswith("default-src"))
    assert "default-src 'none'" in policy
    assert "script" not in policy


def test_pictures_are_whole_in_both_schemes_and_lie_beside_the_page(tmp_path):
    folder = make_run(tmp_path)
    page = Page(write_report(folder))
    titles = ["Accuracy", "Time of a step by phase", "Progress by the clock"]
    assert [value for name, value in page.attributes if name == "alt"] == titles
    sources = [base64.b64decode(source.partition(",")[2]) for source in page.sources()]
    for source in sources:
        Image.open(io.BytesIO(source)).verify()
    corners = [Image.open(io.BytesIO(s)).convert("L").getpixel((0, 0)) for s in sources]
    assert [corner > 128 for corner in corners] == [False, True] * 3  # source, then img
    files = sorted(path.name for path in (folder.path / "plots").iterdir())
    assert files == ["accuracy.png", "progress-by-the-clock.png", "time-of-a-step-by-phase.png"]


def test_the_newest_of_each_logged_figure_is_shown(tmp_path):
    folder = make_run(tmp_path)
    tracker = JsonlTracker(folder.path)
    for step, color in ((9, "red"), (10, "blue")):
        tracker.log_figure("episode", Figure(figsize=(1, 1), facecolor=color), step)
    tracker.log_figure("maps/one", Figure(figsize=(1, 1)), 3)
    figures = folder.path / "figures"
    (figures / "script-7.png").write_text("<script>alert(1)</script>")
    (figures / "linked-8.png").symlink_to(figures / "episode-9.png")
    (figures / "<b>bold-5.png").write_bytes((figures / "episode-9.png").read_bytes())
    page = Page(write_report(folder))
    shown = [value for name, value in page.attributes if name == "alt" and "after" in value]
    expected = ["<b>bold after step 5", "episode after step 10", "maps/one after step 3"]
    assert shown == expected
    blue = Image.open(io.BytesIO(base64.b64decode(page.sources()[-2].partition(",")[2])))
    assert blue.convert("RGB").getpixel((0, 0)) == (0, 0, 255)
    assert "b" not in page.tags


def test_samples_are_split_by_right_and_the_newest_come_first(tmp_path):
    folder = make_run(tmp_path)
    rows = [{"step": n, "answer": f"answer-{n}", "right": n % 2 == 0} for n in range(40)]
    write_json_lines(folder.path / "tables" / "answers.jsonl", rows)
    text = Page(write_report(folder)).text
    right, wrong = text[text.index("answers: right") :].split("answers: wrong")
    assert "of 20" in right
    assert right.index("answer-38") < right.index("answer-36")
    assert "answer-37" not in right
    assert wrong.index("answer-39") < wrong.index("answer-37")
    assert "answer-1\n" not in wrong


def test_a_table_without_that_column_stays_whole(tmp_path):
    folder = make_run(tmp_path)
    rows = [{"step": 1, "right": "left", "score": 0.123456}, {"step": 2, "other": None}]
    write_json_lines(folder.path / "tables" / "nested" / "turns.jsonl", rows)
    text = Page(write_report(folder)).text
    assert "nested/turns" in text
    assert "0.1235" in text
    assert "nested/turns: " not in text


def test_a_run_that_has_only_begun_has_a_report(tmp_path):
    folder = RunFolder(tmp_path / "young")
    folder.path.mkdir()
    folder.recipe.write_text(Recipe(steps=4).to_yaml())
    text = Page(write_report(folder)).text
    assert "interrupted" in text
    assert "Nothing logged yet." in text
    folder.record.write_text(json.dumps({"method": METHOD}))
    text = Page(write_report(folder)).text
    assert "learns to count" in text
    assert "Nothing logged yet for: Accuracy, Never." in text


NASTY = "\ud800 \x00 \x1b[2J $\\frac{ \u202e \n" + "x" * 400


@pytest.mark.parametrize(
    "value", [NASTY, 10**400, -1, 1e308, None, [], {"a": []}], ids=lambda value: ascii(value)[:9]
)
def test_no_value_of_a_foreign_run_stops_its_report(tmp_path, value):
    folder = make_run(tmp_path)
    plots = [
        {"title": value, "metrics": ["eval/greedy"]},
        {"title": "a", "metrics": [value, "eval/greedy"], "level": value},
        {"title": "b", "metrics": value},
        value,
    ]
    text = value if isinstance(value, str) else "plain"
    row = {"step": 1, "time": 1e9, "eval/greedy": value, text: 1.0, "perf/step_s": value}
    write_json_lines(
        folder.metrics, [row, {**row, "step": value}, {**row, "time": value}, {"step": 1}]
    )
    write_json_lines(folder.events.path, [{"event": value, "time": value}, {text: value}])
    write_json_lines(folder.path / "tables" / "t.jsonl", [{text: value, "right": value}])
    folder.result.write_text(json.dumps({text: value}))
    records = [{"method": {**METHOD, "plots": plots}}, {"method": value}, {"created": value}]
    records += [{"method": {**METHOD, part: value}} for part in METHOD]
    for record in records:
        folder.record.write_text(json.dumps(record))
        assert "tidal-1" in Page(write_report(folder)).text


def test_a_report_imports_no_module_that_a_folder_names(tmp_path, monkeypatch):
    (tmp_path / "intruder.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    folder = make_run(tmp_path)
    folder.record.write_text(json.dumps({"workload": "intruder:WORKLOAD", "method": METHOD}))
    assert "intruder:WORKLOAD" in Page(write_report(folder)).text


def test_pictures_of_one_title_are_kept_apart(tmp_path):
    folder = make_run(tmp_path)
    plots = [{"title": title, "metrics": ["eval/greedy"]} for title in ("A b", "a-b", "/", "!")]
    folder.record.write_text(json.dumps({"method": {"plots": plots}}))
    write_report(folder)
    found = sorted(path.name for path in (folder.path / "plots").glob("*.png"))
    assert found[:4] == ["a-b-2.png", "a-b.png", "plot-2.png", "plot.png"]


def test_a_report_replaces_the_former(tmp_path):
    folder = make_run(tmp_path)
    first = write_report(folder).read_text()
    assert write_report(folder).read_text() == first
    assert not list(folder.path.glob("*.new"))


# ---------------------------------------------------------------------------- plots


def texts(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def test_lines_and_level_are_named_beside_the_axes():
    figure = plot_lines(
        {"ours": ([0, 1], [0.1, 0.9]), "theirs": ([0, 1], [0.1, 0.5])},
        "Accuracy",
        "step",
        "accuracy",
        level=("before", 0.3),
    )
    axes = figure.axes[0]
    assert texts(figure) == ["ours", "theirs", "before 0.3"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "accuracy")
    assert axes.get_title("left") == "Accuracy"
    assert any(list(line.get_ydata()) == [0.3, 0.3] for line in axes.lines)


def test_an_only_line_is_named_by_its_axis():
    assert texts(plot_lines({"loss": ([0, 1], [2, 1])}, "Loss", "step", "loss")) == []


@pytest.mark.parametrize(("points", "lines"), [(SMOOTH_ABOVE, 1), (SMOOTH_ABOVE + 1, 2)])
def test_only_long_lines_are_smoothed_over_their_points(points, lines):
    noise = np.random.default_rng(0).normal(size=points)
    axes = plot_lines({"a": (range(points), noise)}, "", "", "").axes[0]
    assert len(axes.lines) == lines
    assert np.array_equal(axes.lines[0].get_ydata(), noise)


def test_points_that_are_not_finite_are_left_out():
    y = [1.0, float("nan"), float("inf"), 4.0]
    line = plot_lines({"a": (range(4), y)}, "", "", "").axes[0].lines[0]
    assert line.get_xydata().tolist() == [[0, 1], [3, 4]]


def test_a_line_without_a_finite_point_is_no_line():
    figure = plot_lines({"a": ([0], [float("nan")]), "b": ([], [])}, "", "", "")
    assert not figure.axes[0].lines


def test_unequal_lengths_are_refused_by_name():
    with pytest.raises(ValueError, match="line 'a', found 2 and 1"):
        plot_lines({"a": ([0, 1], [0])}, "", "", "")


def test_names_are_no_formulas():
    figure = plot_lines({"$\\x": ([0], [0]), "$": ([0], [1])}, "$\\frac$", "$", "$_{")
    figure.savefig(io.BytesIO())


def test_drawing_leaves_the_callers_style_alone():
    before = dict(mpl.rcParams)
    plot_lines({"a": ([0], [0])}, "", "", "", dark=True).savefig(io.BytesIO())
    assert dict(mpl.rcParams) == before


def test_phases_are_stacked_to_their_sum():
    figure = plot_phases([1, 2, 3], {"sample": [1.0, 1.0, 4.0], "learn": [0.5, 0.5, 0.5]})
    tops = [bar.get_y() + bar.get_height() for bar in figure.axes[0].patches]
    assert tops == [1.0, 1.0, 4.0, 1.5, 1.5, 4.5]
    assert texts(figure) == ["sample 2 s", "learn 0.5 s"]


def test_many_steps_are_grouped_and_keep_their_mean():
    seconds = np.random.default_rng(0).uniform(size=1200)
    bars = plot_phases(list(range(1200)), {"sample": list(seconds)}).axes[0].patches
    assert len(bars) == 24
    assert np.mean([bar.get_height() for bar in bars]) == pytest.approx(seconds.mean())


def test_kills_are_marked_under_the_clock_with_their_number():
    figure = plot_time_line([0, 1, 3], [0, 10, 30], {"host lost": [0.5, 2.0], "killed": [3.0]})
    assert texts(figure) == ["host lost (2)", "killed (1)"]
    ticks = figure.axes[0].lines[1:3]
    assert [list(line.get_xdata()) for line in ticks] == [[0.5, 2.0], [3.0]]
    assert all((line.get_ydata() < 0).all() for line in ticks)
    assert figure.axes[0].get_xlabel() == "hours since the run began"


def test_the_first_attempt_is_no_restart(tmp_path):
    text = Page(write_report(make_run(tmp_path))).text
    assert "restarts1" in text.replace("\n", "").replace(" ", "")


floats = st.floats(-1e6, 1e6)


@given(st.lists(floats, min_size=1, max_size=400))
def test_smoothing_stays_within_the_values_and_keeps_their_number(values):
    smoothed = smooth(np.array(values))
    slack = 1e-6 * max(1.0, *map(abs, values))
    assert smoothed.shape == (len(values),)
    assert min(values) - slack <= smoothed.min()
    assert smoothed.max() <= max(values) + slack


@given(st.integers(1, 500), floats)
def test_smoothing_leaves_a_constant_alone(size, value):
    assert smooth(np.full(size, value)) == pytest.approx(np.full(size, value), rel=1e-9, abs=1e-9)


def test_smoothing_averages_neighbours():
    # Three neighbours, twice, and two at either end: 0 3 3 3 0, then this.
    assert smooth(np.array([0.0, 0.0, 9.0, 0.0, 0.0])) == pytest.approx([1.5, 2, 3, 2, 1.5])


@given(st.lists(st.floats(0, 1), max_size=12))
def test_labels_keep_their_order_and_distance_and_stay_in_the_axes(heights):
    gap = 0.075
    placed = spread(heights, gap)
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    in_order = [placed[index] for index in order]
    assert all(b - a >= gap - 1e-9 for a, b in pairwise(in_order))
    assert all(-1e-9 <= place <= 1 + 1e-9 for place in placed)


def test_labels_that_are_apart_do_not_move():
    assert spread([0.9, 0.1, 0.5], 0.1) == pytest.approx([0.9, 0.1, 0.5])


def test_two_labels_of_one_height_part_to_both_sides():
    assert spread([0.5, 0.5], 0.1) == pytest.approx([0.45, 0.55])


def test_the_newest_film_of_each_name_is_shown_and_foreign_files_are_not(tmp_path: Path):
    folder = make_run(tmp_path)
    videos = JsonlTracker(folder.path)
    for step in (9, 10):
        videos.log_video("eval/game", np.full((2, 4, 4, 3), step, np.uint8), 5.0, step)
    newest = (folder.path / "videos" / "eval" / "game-10.gif").read_bytes()
    (folder.path / "videos" / "key-1.gif").symlink_to(folder.recipe)
    (folder.path / "videos" / "huge-1.gif").write_bytes(bytes(5 * 2**20))
    page = Page(write_report(folder))
    films = [source for source in page.sources() if source.startswith("data:image/gif")]
    assert films == ["data:image/gif;base64," + base64.b64encode(newest).decode()]
    assert "eval/game after step 10" in page.text
    assert "huge after step 1: too large for this page" in page.text
    assert "key after" not in page.text


def test_the_page_tells_no_credentials(tmp_path: Path):
    folder = make_run(tmp_path)
    folder.recipe.write_text("steps: 4\nurl: redis://:hunter2@host\nhub_token: abcdef\n")
    write_json_lines(
        folder.events.path, [{"time": 1e9, "event": "failed", "reason": "pwd=hunter2"}]
    )
    page = write_report(folder).read_text()
    assert "hunter2" not in page
    assert "abcdef" not in page
    assert "redis://***@host" in page
