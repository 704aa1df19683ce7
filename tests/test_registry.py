"""The registry reads runs from their files alone, whatever state those are in."""

from __future__ import annotations

import fcntl
import json
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.records import Method
from cluster.registry import RunSummary, find_run, format_table, summaries, summarise
from heliostat.errors import UsageError
from heliostat.folder import RunFolder
from heliostat.provenance import describe_method
from heliostat.recipe import Recipe
from heliostat.workload import Plot, Workload

METHOD = {
    "name": "toy",
    "summary": "learns to count",
    "paper": "none",
    "score": "eval/score",
    "total_steps": 25,
    "plots": [{"title": "Score", "metrics": ["eval/score"], "level": None}],
}


def make_run(
    runs: Path,
    name: str,
    *events: str,
    workload: str = "x.y:Z",
    created: float = 1e9,
    method: object = METHOD,
) -> RunFolder:
    folder = RunFolder(runs / name)
    folder.path.mkdir(parents=True)
    recipe = Recipe(steps=20)
    folder.recipe.write_text(recipe.to_yaml())
    record = {
        "workload": workload,
        "method": method,
        "fingerprint": recipe.fingerprint(),
        "created": created,
    }
    folder.record.write_text(json.dumps(record))
    rows = [{"step": step, "time": created + step, "eval/score": step / 10} for step in (1, 2, 3)]
    write_rows(folder, rows)
    for event in events:
        folder.events.add(event)
    return folder


def write_rows(folder: RunFolder, rows: list[dict]):
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    folder.metrics.write_text(lines)


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ([], "interrupted"),
        (["attempt"], "interrupted"),
        (["attempt", "learner-lost", "attempt"], "interrupted"),
        (["attempt", "stop-asked", "saved", "stopped"], "stopped"),
        (["attempt", "stopped", "attempt"], "interrupted"),
        (["attempt", "stop-asked", "killed"], "interrupted"),
        (["attempt", "failed"], "failed"),
        (["attempt", "failed", "attempt", "stopped"], "stopped"),
    ],
)
def test_the_last_ending_decides_the_status(tmp_path, events, status):
    assert summarise(make_run(tmp_path, "a", *events)).status == status


def test_a_result_means_finished_and_gives_the_score(tmp_path):
    folder = make_run(tmp_path, "a", "attempt", "finished")
    folder.result.write_text(json.dumps({"eval/score": 0.75}))
    summary = summarise(folder)
    assert (summary.status, summary.score) == ("finished", 0.75)


def test_a_held_lock_means_running_and_looking_leaves_it_alone(tmp_path):
    folder = make_run(tmp_path, "a", "attempt")
    lock = folder.path / ".lock"
    with lock.open("w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert [summarise(folder).status for _ in range(2)] == ["running", "running"]
        with lock.open("w") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert summarise(folder).status == "interrupted"
    with lock.open("w") as next_holder:
        fcntl.flock(next_holder, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_progress_counts_all_phases_and_the_newest_row(tmp_path):
    summary = summarise(make_run(tmp_path, "a", "attempt"))
    assert (summary.step, summary.method.total_steps, summary.score) == (3, 25, 0.3)


@pytest.mark.parametrize("part", list(METHOD))
@pytest.mark.parametrize(
    "value",
    [None, True, -1, 10**400, [], [[]], {"a": {}}, "\ud800", "absent"],
    ids=lambda value: ascii(value)[:9],
)
def test_a_record_with_a_part_of_another_type_reads_blank_there(tmp_path, part, value):
    method = {**METHOD, part: value}
    if value == "absent":
        del method[part]
    found = summarise(make_run(tmp_path, "a", method=method))
    others = {name: METHOD[name] for name in ("name", "summary", "paper", "score", "total_steps")}
    others.pop(part, None)
    assert {name: getattr(found.method, name) for name in others} == others
    assert len(format_table([found]).splitlines()) == 2


@pytest.mark.parametrize("method", [None, [], 3, "toy", {"plots": [None, {"title": 3}, {}]}])
def test_a_record_without_its_method_is_a_run_all_the_same(tmp_path, method):
    found = summarise(make_run(tmp_path, "a", method=method))
    assert (found.method, found.score, found.step) == (Method(), None, 3)
    assert "3/?" in format_table([found])


def test_the_plots_of_a_record_are_read_as_they_were_published(tmp_path):
    plots = [
        Plot(title="Score", metrics=("eval/score", "eval/best"), level="start"),
        Plot(title="Loss", metrics=("train/loss",)),
    ]
    workload = Workload(
        name="toy",
        summary="",
        paper="",
        recipes={},
        train="",
        score="eval/score",
        plots=tuple(plots),
    )
    method = describe_method(workload, Recipe(steps=20))
    found = summarise(make_run(tmp_path, "a", method=method)).method
    assert found == Method(name="toy", score="eval/score", total_steps=20, plots=tuple(plots))


def test_the_newest_score_may_be_older_than_the_newest_step(tmp_path):
    folder = make_run(tmp_path, "a")
    write_rows(folder, [{"step": 1, "eval/score": 0.5}, {"step": 2, "train/loss": 1.0}])
    summary = summarise(folder)
    assert (summary.step, summary.score) == (2, 0.5)


def test_a_long_history_is_read_from_its_end(tmp_path):
    folder = make_run(tmp_path, "a")
    padding = "x" * 200
    write_rows(folder, [{"step": step, "eval/score": step, "p": padding} for step in range(20_000)])
    began = time.process_time()
    summary = summarise(folder)
    assert (summary.step, summary.score) == (19_999, 19_999)
    assert time.process_time() - began < 0.5


def test_a_score_that_is_no_number_is_shown_as_such(tmp_path):
    folder = make_run(tmp_path, "a")
    write_rows(folder, [{"step": 1, "eval/score": "NaN"}])
    assert format_table([summarise(folder)]).splitlines()[1].endswith("nan")


def test_restarts_are_the_attempts_after_the_first(tmp_path):
    folder = make_run(tmp_path, "a", "attempt", "learner-lost", "attempt", "stopped", "attempt")
    assert summarise(folder).restarts == 2


def test_runs_are_listed_by_age_and_foreign_folders_passed_over(tmp_path):
    make_run(tmp_path, "young", created=2e9)
    make_run(tmp_path, "old", created=1e9)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "events.jsonl").write_text("not ours")
    (tmp_path / "recipe.yaml").write_text("steps: 3")
    assert [summary.name for summary in summaries(tmp_path)] == ["old", "young"]


def test_a_missing_folder_of_runs_holds_none(tmp_path):
    assert summaries(tmp_path / "nowhere") == []
    assert format_table([]) == "no runs"


FILES = ("recipe.yaml", "environment.json", "metrics.jsonl", "events.jsonl", "result.json")


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(name=st.sampled_from(FILES), junk=st.binary(max_size=40), share=st.floats(0, 1))
def test_a_torn_or_foreign_file_never_hides_the_other_runs(tmp_path_factory, name, junk, share):
    runs = tmp_path_factory.mktemp("runs")
    make_run(runs, "whole", "attempt")
    torn = make_run(runs, "torn", "attempt")
    torn.result.write_text(json.dumps({"eval/score": 0.75}))
    content = (torn.path / name).read_bytes()
    (torn.path / name).write_bytes(content[: int(share * len(content))] + junk)
    found = {summary.name: summary for summary in summaries(runs)}
    assert found["whole"].score == 0.3
    assert len(format_table(list(found.values())).splitlines()) == 3


@pytest.mark.parametrize("value", ["null", "[1]", "3", '"text"', '{"created": 1e400}'])
def test_a_record_of_another_shape_leaves_blanks(tmp_path, value):
    folder = make_run(tmp_path, "a")
    folder.record.write_text(value)
    assert "?" in format_table([summarise(folder)]).splitlines()[1]


def test_listing_imports_no_module_that_a_folder_names(tmp_path, monkeypatch):
    (tmp_path / "intruder.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    make_run(tmp_path / "runs", "a", workload="intruder:WORKLOAD")
    assert summaries(tmp_path / "runs")[0].workload == "intruder:WORKLOAD"


def test_a_run_is_opened_by_name(tmp_path):
    make_run(tmp_path, "tidal-1")
    assert find_run(tmp_path, "tidal-1") == RunFolder(tmp_path / "tidal-1")


def test_an_unknown_name_is_refused_with_the_nearest(tmp_path):
    make_run(tmp_path, "tidal-1")
    make_run(tmp_path, "solar-2")
    with pytest.raises(UsageError, match=r"'tidal-l'.*did you mean 'tidal-1'\?"):
        find_run(tmp_path, "tidal-l")


def test_a_name_is_no_way_out_of_the_folder(tmp_path):
    make_run(tmp_path, "outside")
    make_run(tmp_path / "runs", "inside")
    with pytest.raises(UsageError, match="unknown run"):
        find_run(tmp_path / "runs", "../outside")


def test_no_runs_at_all_is_said_with_the_remedy(tmp_path):
    with pytest.raises(UsageError, match="no runs there; give their folder with --runs"):
        find_run(tmp_path, "a")


def summary_of(**changes) -> RunSummary:
    values = {
        "name": "a",
        "workload": "t1",
        "fingerprint": "0123456789abcdef",
        "status": "running",
        "step": 5,
        "created": 1e9,
        "restarts": 0,
        "score": 0.5,
        "method": Method(total_steps=20),
    }
    return RunSummary(**{**values, **changes})


def test_the_columns_of_the_table_are_aligned():
    text = format_table([summary_of(), summary_of(name="a-long-name", status="interrupted")])
    head, *rows = text.splitlines()
    for title in ("WORKLOAD", "RECIPE", "STATUS", "CREATED"):
        start = head.index(title)
        assert all(row[start - 1] == " " and row[start] != " " for row in rows)
    assert {len(line) for line in (head, *rows)} == {len(head)}


def test_control_characters_of_a_foreign_run_do_not_reach_the_terminal():
    text = format_table([summary_of(name="a\x1b[2J", workload="t\n1")])
    assert "\x1b" not in text
    assert len(text.splitlines()) == 2
