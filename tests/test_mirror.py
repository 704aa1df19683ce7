"""Runs in an object store: the same folder, the same numbers, and nobody undoes another's work."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
from toy_package.workload import WORKLOAD

from cluster.places import open_run, publish, read_runs, run_folder
from cluster.registry import summaries
from heliostat import launch
from heliostat.errors import UsageError
from heliostat.folder import RunFolder
from heliostat.launch import Order
from heliostat.layout import Layout
from heliostat.mirror import Mirror, is_url, local_copy, mirrored
from heliostat.tracker import read_metrics


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("HELIOSTAT_CACHE", str(tmp_path / "cache"))
    yield "memory://tidal/runs"
    store = fsspec.filesystem("memory")
    if store.exists("/tidal"):
        store.rm("/tidal", recursive=True)


def order(folder: RunFolder, **changes: int) -> Order:
    recipe = replace(WORKLOAD.recipe(), layout=Layout.in_process(), **changes)
    spec = "toy_package.workload:WORKLOAD"
    return Order(workload=WORKLOAD, spec=spec, recipe=recipe, folder=folder)


def told(folder: Path) -> list[dict[str, float]]:
    return [
        {name: value for name, value in row.items() if name in ("step", "train/loss")}
        for row in read_metrics(folder)
    ]


def test_what_is_a_url() -> None:
    assert is_url("s3://bucket/runs")
    assert is_url("memory://runs")
    assert not is_url("runs")
    assert not is_url("/mnt/runs")


def test_a_run_in_a_store_leaves_what_a_local_one_leaves(place: str, tmp_path: Path) -> None:
    local = launch.create(order(RunFolder(tmp_path / "a")))
    remote = launch.create(order(run_folder(place, "a")))
    assert remote.metrics == local.metrics
    copy = open_run(place, "a", heavy=True)
    assert told(copy.path) == told(tmp_path / "a")
    assert sorted(path.name for path in copy.checkpoints.iterdir()) == sorted(
        path.name for path in RunFolder(tmp_path / "a").checkpoints.iterdir()
    )
    assert not copy.alive.exists()
    (summary,) = summaries(read_runs(place))
    assert (summary.name, summary.status, summary.step) == ("a", "finished", 30)


def test_a_stopped_run_resumes_on_another_machine_to_the_same_numbers(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = launch.create(order(RunFolder(tmp_path / "straight")))
    first = run_folder(place, "a")
    launch.prepare(order(first))
    Mirror(first, "read").ask_to_stop()
    stopped = launch.resume(replace(order(first), supervised=True))
    assert stopped.stopped
    assert 0 < len(told(first.path)) < 30
    monkeypatch.setenv("HELIOSTAT_CACHE", str(tmp_path / "elsewhere"))
    second = run_folder(place, "a")
    assert not second.path.exists()
    assert launch.resume(order(second)).metrics == straight.metrics
    assert told(open_run(place, "a").path) == told(tmp_path / "straight")


def test_a_name_that_the_store_has_is_taken(place: str, tmp_path: Path, monkeypatch) -> None:
    launch.prepare(order(run_folder(place, "a")))
    monkeypatch.setenv("HELIOSTAT_CACHE", str(tmp_path / "elsewhere"))
    with pytest.raises(UsageError, match=r"the name 'a' is taken by memory://tidal/runs/a"):
        launch.prepare(order(run_folder(place, "a")))


def test_a_run_that_another_machine_runs_is_refused_until_that_falls_silent(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_folder(place, "a")
    launch.prepare(order(folder))
    store = fsspec.filesystem("memory")
    alive = {"host": "elsewhere", "pid": 1, "time": time.time()}
    store.pipe_file("/tidal/runs/a/alive.json", json.dumps(alive).encode())
    (summary,) = summaries(read_runs(place))
    assert summary.status == "running"
    with pytest.raises(UsageError, match=r"is being run by elsewhere"):
        launch.resume(order(folder))
    alive["time"] = time.time() - 61
    store.pipe_file("/tidal/runs/a/alive.json", json.dumps(alive).encode())
    assert launch.resume(order(folder)).metrics


def test_two_machines_that_share_a_run_do_not_undo_each_other(place: str, tmp_path: Path) -> None:
    url = f"{place}/a"
    launcher, rank = RunFolder(tmp_path / "launcher", url), RunFolder(tmp_path / "rank", url)
    for folder in (launcher, rank):
        folder.path.mkdir()
    launcher.record.write_text("{}")
    launcher.attempt.write_text("1")
    Mirror(launcher, "launch").exchange()
    with (
        mirrored(launcher, "launch") as from_launcher,
        mirrored(rank, "learn", attempt=1) as from_rank,
    ):
        assert rank.attempt.read_text() == "1"
        launcher.events.add("attempt", number=1)
        rank.events.add("began", step=-1)
        for step in range(3):
            with rank.metrics.open("a") as file:
                file.write(f'{{"step": {step}}}\n')
            from_rank()
            from_launcher()
            assert launcher.metrics.read_text() == rank.metrics.read_text()
        (rank.checkpoints / "step-1").mkdir(parents=True)
        (rank.checkpoints / "step-1" / "COMPLETE").write_text("{}")
        Mirror(launcher, "read").ask_to_stop()
        from_rank()
        assert rank.stop.exists()
    seen = open_run(place, "a", heavy=True)
    assert [event["event"] for event in seen.events.read()] == ["attempt", "began"]
    told = [event["event"] for event in launcher.events.read()]
    assert told == ["attempt", "began"]  # its supervisor knows by this that the run has begun
    assert (seen.checkpoints / "step-1" / "COMPLETE").exists()
    assert seen.metrics.read_text() == rank.metrics.read_text()


def test_a_marker_is_the_last_file_of_a_checkpoint_to_be_sent(place: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a", f"{place}/a")
    step = folder.checkpoints / "step-1"
    step.mkdir(parents=True)
    for name in ("COMPLETE", "state.json", "state.safetensors"):
        (step / name).write_text(name)
    Mirror(folder, "launch").exchange()
    store = fsspec.filesystem("memory")
    found = store.find("/tidal/runs/a/checkpoints", detail=True)
    last = max(found, key=lambda name: found[name]["created"])
    assert last.endswith("COMPLETE")


def test_what_is_pruned_here_is_pruned_there(place: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a", f"{place}/a")
    folder.checkpoints.mkdir(parents=True)
    mirror = Mirror(folder, "launch")
    for name in ("one", "two"):
        (folder.checkpoints / name).write_text(name)
        mirror.exchange()
    (folder.checkpoints / "one").unlink()
    mirror.exchange()
    seen = open_run(place, "a", heavy=True)
    assert [path.name for path in seen.checkpoints.iterdir()] == ["two"]


def test_names_in_a_store_cannot_lead_out_of_the_run(place: str, tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    store.pipe_file("/tidal/runs/a/recipe.yaml", b"steps: 1")
    store.store["/tidal/runs/a/../../../evil"] = store.store["/tidal/runs/a/recipe.yaml"]
    folder = RunFolder(tmp_path / "x" / "y" / "a", f"{place}/a")
    folder.path.mkdir(parents=True)
    Mirror(folder, "read").pull()
    assert [path.name for path in folder.path.iterdir()] == ["recipe.yaml"]
    assert not (tmp_path / "evil").exists()


def test_a_page_made_from_a_copy_is_published(place: str) -> None:
    launch.prepare(order(run_folder(place, "a")))
    copy = open_run(place, "a")
    (copy.path / "report.html").write_text("page")
    publish(copy, "report.html", "plots")
    assert (open_run(place, "a").path / "report.html").read_text() == "page"


def test_a_removed_run_is_gone_from_store_and_machine(place: str) -> None:
    folder = run_folder(place, "a")
    launch.create(order(folder))
    launch.forget(folder)
    assert not folder.path.exists()
    with pytest.raises(UsageError, match=r"expected run 'a'"):
        open_run(place, "a")


def test_copies_are_kept_where_only_this_user_writes(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HELIOSTAT_CACHE", str(tmp_path / "open"))
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(UsageError, match=r"only this user may change at .*open"):
        local_copy("s3://bucket/runs")
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.setenv("HELIOSTAT_CACHE", str(tmp_path / "link"))
    with pytest.raises(UsageError, match=r"only this user may change at .*link"):
        local_copy("s3://bucket/runs")


def test_a_log_that_is_being_written_outlives_a_pull(place: str, tmp_path: Path) -> None:
    folder = run_folder(place, "a")
    launch.prepare(order(folder))
    with folder.log.open("a") as log:
        Mirror(folder, "launch").pull()
        log.write("said later")
    assert folder.log.read_text() == "said later"


def test_an_unknown_protocol_is_refused_with_the_remedy() -> None:
    with pytest.raises(UsageError, match=r"found 'tide://runs/a'.*install the protocol's library"):
        Mirror(RunFolder(Path("x"), "tide://runs/a"), "read")


def test_a_run_lives_in_an_s3_bucket(bucket: str, tmp_path: Path, monkeypatch) -> None:
    straight = launch.create(order(RunFolder(tmp_path / "straight")))
    folder = run_folder(bucket, "a")
    launch.prepare(order(folder))
    Mirror(folder, "read").ask_to_stop()
    assert launch.resume(replace(order(folder), supervised=True)).stopped
    monkeypatch.setenv("HELIOSTAT_CACHE", str(tmp_path / "elsewhere"))
    assert launch.resume(order(run_folder(bucket, "a"))).metrics == straight.metrics
    assert told(open_run(bucket, "a").path) == told(tmp_path / "straight")
    launch.forget(run_folder(bucket, "a"))
    assert summaries(read_runs(bucket)) == []
