"""Runs without Ray: folders, resuming, stopping, and what is refused before anything starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toy_package.workload import WORKLOAD, ToyRecipe

from heliostat import checkpoint, launch
from heliostat.errors import RoleFailed, UsageError
from heliostat.folder import RunFolder
from heliostat.launch import Order
from heliostat.workload import Plot

SPEC = "toy_package.workload:WORKLOAD"


def order(folder: Path, **changes: Any) -> Order:
    recipe = replace(WORKLOAD.recipe(), **changes)
    return Order(workload=WORKLOAD, spec=SPEC, recipe=recipe, folder=RunFolder(folder))


def rows(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def timeless(folder: Path) -> list[dict[str, float]]:
    return [
        {key: value for key, value in row.items() if key != "time" and not key.startswith("perf/")}
        for row in rows(folder)
    ]


def test_a_run_leaves_its_folder_as_documented(tmp_path: Path) -> None:
    outcome = launch.create(order(tmp_path / "a"))
    assert outcome.metrics["score"] > -0.5
    names = {path.name for path in outcome.folder.iterdir()}
    assert names >= {"recipe.yaml", "environment.json", "metrics.jsonl", "checkpoints"}
    assert names >= {"events.jsonl", "result.json"}
    assert [row["step"] for row in rows(outcome.folder)] == list(range(1, 31))
    assert RunFolder(outcome.folder).events.read()[-1]["event"] == "finished"
    record = (outcome.folder / "environment.json").read_text()
    assert str(Path.home()) not in record


def test_equal_seeds_give_equal_numbers_and_others_do_not(tmp_path: Path) -> None:
    one = launch.create(order(tmp_path / "a"))
    same = launch.create(order(tmp_path / "b"))
    other = launch.create(order(tmp_path / "c", seed=1))
    assert one.metrics == same.metrics
    assert timeless(one.folder) == timeless(same.folder)
    assert one.metrics != other.metrics


def test_a_taken_name_is_refused_with_the_way_to_resume(tmp_path: Path) -> None:
    launch.create(order(tmp_path / "a", steps=1))
    with pytest.raises(UsageError, match=r"name 'a' is taken.*heliostat resume a --runs"):
        launch.create(order(tmp_path / "a", steps=1))


def test_a_stopped_run_resumes_to_the_same_numbers(tmp_path: Path) -> None:
    straight = launch.create(order(tmp_path / "straight"))
    broken = order(tmp_path / "broken")

    def stop_soon(step: int) -> None:
        if step == 17:
            broken.folder.stop.touch()

    with watched(stop_soon):
        stopped = launch.create(broken)
    assert stopped.stopped
    assert stopped.metrics == {}
    found = checkpoint.latest(broken.folder.checkpoints)
    assert found is not None
    assert 17 <= found[0] < 30
    resumed = launch.resume(broken)
    assert resumed.metrics == straight.metrics
    assert timeless(resumed.folder) == timeless(straight.folder)


def watched(watch: Any) -> Any:
    """Calls ``watch(step)`` after each environment call of the toy."""
    from toy_package.workload import Targets

    original = Targets.answer

    def answer(self: Targets, batch: Any, weights: Any) -> Any:
        watch(weights.version)
        return original(self, batch, weights)

    answer.__idempotent__ = True  # type: ignore[attr-defined]
    patch = pytest.MonkeyPatch()
    patch.setattr(Targets, "answer", answer)

    class Restore:
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None:
            patch.undo()

    return Restore()


def test_a_finished_run_is_not_resumed(tmp_path: Path) -> None:
    done = order(tmp_path / "a", steps=1)
    launch.create(done)
    with pytest.raises(UsageError, match="run 'a' has finished"):
        launch.resume(done)


def test_a_run_in_progress_is_not_started_twice(tmp_path: Path) -> None:
    mine = order(tmp_path / "a")
    refused: list[str] = []

    def again(step: int) -> None:
        if step == 3:
            with pytest.raises(UsageError, match="being run by another process") as caught:
                launch.resume(mine)
            refused.append(str(caught.value))

    with watched(again):
        launch.create(mine)
    assert refused


def test_the_methods_own_mistake_fails_the_run_at_once(tmp_path: Path) -> None:
    bad = order(tmp_path / "a")
    bad = replace(bad, workload=replace(WORKLOAD, train="toy_package.faulty:broken"))
    with pytest.raises(ValueError, match="the method's own mistake at seed 0"):
        launch.create(bad)
    events = [event["event"] for event in bad.folder.events.read()]
    assert events.count("attempt") == 1
    assert events[-1] == "failed"


def test_a_failing_role_fails_the_run_with_its_name(tmp_path: Path) -> None:
    def refuse(step: int) -> None:
        raise ArithmeticError(f"no target at step {step}")

    with watched(refuse), pytest.raises(RoleFailed, match=r"targets\[0\].*no target at step 0"):
        launch.create(order(tmp_path / "a"))


def test_the_folder_describes_its_method_to_whoever_reads_it(tmp_path: Path) -> None:
    wanted = order(tmp_path / "a", steps=1)
    plot = Plot(title="Loss", metrics=("train/fit",), level="score")
    launch.create(replace(wanted, workload=replace(WORKLOAD, plots=(plot,))))
    assert json.loads(wanted.folder.record.read_text())["method"] == {
        "name": "toy",
        "summary": WORKLOAD.summary,
        "paper": "none",
        "score": "train/fit",
        "total_steps": 1,
        "plots": [{"title": "Loss", "metrics": ["train/fit"], "level": "score"}],
    }


def test_resuming_checks_the_machine_before_anything(tmp_path: Path) -> None:
    class Picky(ToyRecipe):
        def check(self) -> None:
            raise UsageError("questions.jsonl: no such file")

    with pytest.raises(UsageError, match=r"questions\.jsonl"):
        launch.resume(replace(order(tmp_path / "a"), recipe=Picky(steps=1)))
    assert not (tmp_path / "a").exists()


def test_a_run_begins_from_a_checkpoint_of_another(tmp_path: Path) -> None:
    straight = launch.create(order(tmp_path / "a", keep_checkpoints=9))
    branch = replace(order(tmp_path / "b"), begin_from=(RunFolder(straight.folder), 10))
    assert launch.create(branch).metrics == straight.metrics
    assert [row["step"] for row in rows(tmp_path / "b")] == list(range(11, 31))
    missing = replace(order(tmp_path / "c"), begin_from=(RunFolder(straight.folder), 11))
    with pytest.raises(UsageError, match=r"checkpoint of step 11 in .*found steps \[10, 20, 30\]"):
        launch.create(missing)
    assert not (tmp_path / "c").exists()


def test_what_a_recipe_refuses_leaves_no_folder(tmp_path: Path) -> None:
    class Picky(ToyRecipe):
        def check(self) -> None:
            raise UsageError("questions.jsonl: no such file")

    picky = replace(order(tmp_path / "a"), recipe=Picky(steps=1))
    with pytest.raises(UsageError, match=r"questions\.jsonl"):
        launch.create(picky)
    assert not (tmp_path / "a").exists()
