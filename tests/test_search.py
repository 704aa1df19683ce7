"""Searches: spaces, ranking and turns without Ray; then real searches, few and short."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_package.workload import WORKLOAD, ToyRecipe

from cluster import judges, search, trial
from cluster.cli import main
from cluster.registry import summarise
from cluster.search_plan import Goal, Plan, Search, has_ended, read_plan
from cluster.search_results import (
    TrialResult,
    best_of,
    importance,
    pareto_front,
    read_results,
    write_best,
)
from cluster.search_room import Room
from cluster.shared_pools import Turns
from cluster.spaces import (
    Distribution,
    assignments,
    build_space,
    grid_points,
    point_of,
    random_point,
    random_points,
)
from heliostat import checkpoint, launch
from heliostat.errors import UsageError
from heliostat.folder import RunFolder
from heliostat.launch import Order
from heliostat.layout import Hosts, Layout

SPEC = "toy_package.workload:WORKLOAD"
POOLS = Layout(
    environment=Hosts(hosts=1, members=2, cpus=1),
    data=Hosts(hosts=1, cpus=0.5),
    evaluation=Hosts(hosts=1, cpus=0.5),
    start_deadline_s=90,
)


def draw(text: str) -> Distribution:
    return Distribution.parse("lr", text)


# ---------------------------------------------------------------------------- spaces


@pytest.mark.parametrize(
    "text",
    [
        "uniform(0, 1)",
        "loguniform(1e-5, 1e-3)",
        "quniform(-1.0, 1.0, 0.25)",
        "randint(2, 9)",
        "lograndint(1, 1000)",
        "choice(1, 2.5, 'a', None, True)",
        "choice([4, 16])",
    ],
)
def test_a_distribution_reads_back_what_it_writes(text: str) -> None:
    found = draw(text)
    assert Distribution.parse("lr", found.text) == found


@settings(deadline=None)
@given(st.floats(0, 1))
def test_values_stay_within_their_range_and_on_their_grid(share: float) -> None:
    assert 1e-5 <= float(draw("loguniform(1e-5, 1e-3)").at(share)) <= 1e-3  # type: ignore[arg-type]
    assert draw("randint(2, 4)").at(share) in (2, 3)
    assert draw("lograndint(1, 4)").at(share) in (1, 2, 3)
    assert draw("choice(5, 7)").at(share) in (5, 7)
    assert float(draw("quniform(0, 1, 0.25)").at(share)) in (0, 0.25, 0.5, 0.75, 1)  # type: ignore[arg-type]


def test_shares_of_a_logarithmic_range_are_decades() -> None:
    assert draw("loguniform(1e-4, 1)").at(0.5) == pytest.approx(1e-2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("__import__('os').getcwd()", "expected a distribution"),
        ("uniform(0, open('x'))", "expected a distribution"),
        ("uniform(1, 0)", "expected low < high, found 'uniform"),
        ("uniform(1, 1)", "expected low < high"),
        ("loguniform(0, 1)", "expected low > 0"),
        ("uniform(0)", "uniform of 2 numbers"),
        ("uniform(0, 1e999)", "uniform of 2 numbers"),
        ("randint(0.5, 2)", "randint of 2 whole numbers"),
        ("quniform(0, 1, 2)", "0 < q <= high - low"),
        ("choice()", "different choices"),
        ("choice(1, 1)", "different choices"),
        ("logunifrom(1, 2)", "did you mean 'loguniform'"),
        ("uniform(low=0, high=1)", "by place"),
        ("(" * 500, "expected a distribution"),
    ],
)
def test_an_impossible_distribution_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("(", r"\(").replace(")", r"\)")):
        draw(text)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"lrr": "uniform(0, 1)"}, "did you mean 'lr'"),
        ({"lr": "uniform(-1, 1)"}, "lr is to be drawn from .*greater than 0, found '-1.0'"),
        ({"batch": "choice(8, 'many')"}, "batch is to be drawn from .*found 'many'"),
        ({"batch": "uniform(1, 8.5)"}, "batch"),
        ({"layout.learners": "choice(1, 2)"}, "fix the layout with layout.learners="),
        ({}, "nothing to search over"),
    ],
)
def test_what_the_recipe_refuses_is_refused_before_anything_starts(
    space: dict[str, str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        build_space(WORKLOAD.recipe(), space)


def test_points_follow_from_the_seed_and_their_number_alone() -> None:
    space = build_space(WORKLOAD.recipe(), {"lr": "loguniform(1e-3, 1)", "batch": "randint(1, 9)"})
    points = random_points(space, 0, 5)
    assert random_points(space, 0, 3) == points[:3]
    assert random_point(space, 0, 4) == points[4]
    assert random_points(space, 1, 5) != points
    assert all(1e-3 <= float(point["lr"]) <= 1 for point in points)  # type: ignore[arg-type]


def test_a_grid_is_as_fine_as_the_trials_allow() -> None:
    space = build_space(WORKLOAD.recipe(), {"lr": "loguniform(1e-4, 1)", "batch": "choice(8, 16)"})
    points = grid_points(space, 7)
    assert [point["lr"] for point in points[::2]] == pytest.approx([1e-4, 1e-2, 1])
    assert {point["batch"] for point in points} == {8, 16}
    assert len(points) == 6
    with pytest.raises(UsageError, match=r"smallest grid has 4 points; raise --trials from 3"):
        grid_points(space, 3)
    assert len(grid_points(build_space(WORKLOAD.recipe(), {"batch": "choice(8, 16)"}), 50)) == 2


@settings(deadline=None)
@given(st.floats(1e-30, 1e30), st.integers(1, 100))
def test_a_point_becomes_the_recipe_that_it_names(lr: float, batch: int) -> None:
    point = {"lr": lr, "batch": batch}
    recipe = WORKLOAD.recipe().override(*assignments(point))
    assert point_of(recipe.to_dict(), ["lr", "batch"]) == point


# ---------------------------------------------------------------------------- results


def result(name: str, status: str = "finished", **scores: float) -> TrialResult:
    return TrialResult(
        name=name,
        status=status,  # type: ignore[arg-type]
        step=1,
        point={"lr": scores.get("a", 0.0), "kind": "x" if scores.get("a", 0) < 2 else "y"},
        scores=scores,
        cloned=0,
        error="",
    )


def test_the_best_is_a_finished_trial_with_a_finite_metric() -> None:
    results = [result("t", a=1.0), result("u", a=3.0), result("v", a=math.nan)]
    results += [result("w", "pruned", a=9.0), result("x")]
    assert best_of(results, Goal("a")) == results[1]
    assert best_of(results, Goal("a", "min")) == results[0]
    assert best_of(results[2:], Goal("a")) is None


def test_the_front_holds_what_nothing_beats() -> None:
    results = [result("t", a=1, b=5), result("u", a=2, b=5), result("v", a=3, b=9)]
    results += [result("w", a=1, b=9), result("x", a=9), result("y", "failed", a=9, b=0)]
    front = pareto_front(results, [Goal("a"), Goal("b", "min")])
    assert [one.name for one in front] == ["u", "v"]


def test_importance_is_the_rank_correlation() -> None:
    results = [result(str(i), a=float(i), b=float(i) ** 3) for i in range(5)]
    found = importance(results, Goal("b"))
    assert found["lr"] == pytest.approx(1)
    assert found["kind"] == pytest.approx(math.sqrt(0.75))  # ranks 1 2 | 3 4 5: 7.5 of 10
    assert importance(results[:2], Goal("b")) == {}


@pytest.mark.parametrize("text", ["", ":max", "a:", "a:best"])
def test_a_malformed_goal_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--metric: expected NAME"):
        Goal.parse(text)


# ---------------------------------------------------------------------------- turns


def test_the_least_served_trial_has_the_next_turn() -> None:
    turns, order = Turns(), []
    running, waiting = threading.Event(), threading.Event()

    def long() -> None:
        for _ in range(2):
            with turns.turn("long"):
                order.append("long")
                running.set()
                waiting.wait(5)
                time.sleep(0.05)

    def short() -> None:
        running.wait(5)
        for number in range(3):
            if number == 0:
                waiting.set()
            with turns.turn("short"):
                order.append("short")

    threads = [threading.Thread(target=job) for job in (long, short)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert order.index("short") < len(order) - 1 - order[::-1].index("long") + 1
    assert order[0] == "long"
    assert sorted(order) == ["long"] * 2 + ["short"] * 3


def test_calls_of_one_caller_keep_their_order() -> None:
    turns, order = Turns(), []

    def call(number: int) -> None:
        with turns.call("trial", "me", number):
            order.append(number)

    threads = [threading.Thread(target=call, args=(number,)) for number in (2, 1, 3, 0)]
    for thread in threads:
        thread.start()
        time.sleep(0.02)
    for thread in threads:
        thread.join(5)
    assert order == [0, 1, 2, 3]


def test_a_restarted_host_takes_the_first_call_it_sees() -> None:
    turns = Turns(restarted=True)
    with turns.call("trial", "me", 7), turns.call("trial", "me", None):
        pass
    with turns.call("trial", "me", 8):
        pass


# ---------------------------------------------------------------------------- judges, clones


def test_asha_recalls_trials_of_an_earlier_session() -> None:
    space = build_space(WORKLOAD.recipe(), {"lr": "uniform(0.1, 1)"})
    scheduler = judges.make_scheduler("asha", Goal("a"), space, 90)
    for name, value in (("t", 3.0), ("u", 2.0), ("v", 1.0)):
        judges.recall(scheduler, Goal("a"), name, [{"step": 10, "a": value}])
    fresh: Any = type("Fresh", (), {"trial_id": "w"})()
    scheduler.on_trial_add(None, fresh)  # type: ignore[arg-type]
    assert scheduler.on_trial_result(None, fresh, {"step": 10, "a": 0.5}) == "STOP"  # type: ignore[arg-type]


def test_nobody_is_cut_near_the_end() -> None:
    space = build_space(WORKLOAD.recipe(), {"lr": "uniform(0.1, 1)"})
    scheduler = judges.make_scheduler("asha", Goal("a"), space, 30)
    judges.recall(scheduler, Goal("a"), "t", [{"step": 29, "a": 9.0}])
    late: Any = type("Late", (), {"trial_id": "w"})()
    scheduler.on_trial_add(None, late)  # type: ignore[arg-type]
    for step, value in ((3, 9.0), (9, 9.0), (27, -9.0)):
        assert scheduler.on_trial_result(None, late, {"step": step, "a": value}) == "CONTINUE"  # type: ignore[arg-type]


def proposals(
    made: list[tuple[str, Mapping[str, Any]]], count: int, goals: tuple[Goal, ...]
) -> list[tuple[str, Mapping[str, Any]]]:
    """Lets Optuna propose trials until there are ``count``; larger lr and choice 1 are better."""
    space = build_space(WORKLOAD.recipe(), {"lr": "uniform(0.1, 1)", "batch": "choice(8, 1)"})
    known = dict(made)

    def propose(index: int, point: Mapping[str, Any]) -> str:
        name = f"trial-{index:03d}"
        known[name] = point
        return name

    def results(name: str) -> dict[str, float]:
        point = known[name]
        if point["lr"] < 0.2:
            return {}  # it failed
        return {"a": point["lr"] + (point["batch"] == 1), "b": point["lr"]}

    searcher = judges.OptunaSearcher(space, goals, 0, [], propose, results)
    for name, point in made:
        searcher.recall(name, point)
    for number in range(len(made), count):
        config = searcher.suggest(str(number))["point"]
        assert config == {"trial": f"trial-{number:03d}", **known[config["trial"]]}
        searcher.on_trial_complete(str(number))
    return list(known.items())


@pytest.mark.parametrize("goals", [(Goal("a"),), (Goal("a"), Goal("b", "min"))])
def test_optuna_goes_on_from_the_run_folders_as_if_uninterrupted(goals: tuple[Goal, ...]) -> None:
    straight = proposals([], 24, goals)
    assert proposals(straight[:13], 24, goals) == straight
    if len(goals) == 1:  # and it has learnt which choice is better
        assert [point["batch"] for _, point in straight[12:]].count(1) >= 9


def test_absent_optuna_is_told_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UsageError, match=r"pip install 'heliostat\[search\]'"):
        Search.of(plan(ToyRecipe(steps=2), search="optuna"), WORKLOAD, Path("nowhere"))


def bench(folder: Path, recipe: ToyRecipe, **changes: Any) -> trial.Bench:
    settings = {"metrics": ("train/fit",), "every": 5, "pools": {}} | changes
    return trial.Bench(workload=WORKLOAD, spec=SPEC, recipe=recipe, folder=folder, **settings)


def test_a_clone_goes_on_from_the_others_state_with_its_own_recipe(tmp_path: Path) -> None:
    recipe = ToyRecipe(steps=20, checkpoint_every=10, lr=0.1)
    setting = bench(tmp_path, recipe)
    for name, lr in (("good", 0.2), ("poor", 0.001)):
        launch.create(setting.order(name, replace(recipe, lr=lr, steps=10)))
        RunFolder(tmp_path / name).result.unlink()
    poor = RunFolder(tmp_path / "poor")
    trial.clone(setting, poor, replace(recipe, lr=0.24), {"run": "good", "step": 10, "id": "x"})
    ours, theirs = (checkpoint.latest(tmp_path / name / "checkpoints") for name in ("poor", "good"))
    assert ours is not None
    assert theirs is not None
    assert ours[1]["learner"]["model"]["weight"].equal(theirs[1]["learner"]["model"]["weight"])
    (event,) = [event for event in poor.events.read() if event["event"] == "cloned"]
    assert (event["from"], event["step"]) == ("good", 10)
    assert json.loads(event["changed"]) == {"lr": 0.24, "steps": 20}
    record = json.loads(poor.record.read_text())
    assert record["fingerprint"] == replace(recipe, lr=0.24).fingerprint()
    outcome = launch.resume(setting.order("poor", replace(recipe, lr=0.24)))
    assert outcome.metrics["score"] > -3


def test_a_clone_takes_a_newer_checkpoint_where_the_judged_one_is_gone(tmp_path: Path) -> None:
    recipe = ToyRecipe(steps=20, checkpoint_every=10)
    setting = bench(tmp_path, recipe)
    launch.create(setting.order("good", recipe))
    launch.create(setting.order("poor", replace(recipe, steps=10)))
    origin = {"run": "good", "step": 5, "id": "x"}
    trial.clone(setting, RunFolder(tmp_path / "poor"), recipe, origin)
    assert trial.newest_step(RunFolder(tmp_path / "poor")) == 20


def test_a_pruned_run_is_marked_finished_without_fault(tmp_path: Path) -> None:
    setting = bench(tmp_path, ToyRecipe(steps=20, checkpoint_every=10))
    launch.prepare(setting.order("trial-000", setting.recipe))
    folder = RunFolder(tmp_path / "trial-000")
    attempt = trial.Attempt(setting, folder, {"trial": "trial-000"}, None)
    assert attempt.next_report()["step"] == 5
    folder.stop.write_text("pruned")
    folder.events.add("pruned", step=5)
    attempt.leave()
    assert summarise(folder).status == "pruned"
    assert has_ended(folder)
    assert summarise(folder).step == 5


def test_a_failing_trial_reports_its_end_and_its_reason(tmp_path: Path) -> None:
    broken = replace(WORKLOAD, train="toy_package.faulty:broken")
    setting = replace(bench(tmp_path, ToyRecipe(steps=20)), workload=broken)
    launch.prepare(setting.order("trial-000", setting.recipe))
    folder = RunFolder(tmp_path / "trial-000")
    report = trial.Attempt(setting, folder, {"trial": "trial-000"}, None).next_report()
    assert report["done"]
    assert math.isnan(report["train/fit"])
    assert summarise(folder).status == "failed"


def test_a_metric_that_nobody_logs_fails_the_trial_with_those_there_are(tmp_path: Path) -> None:
    setting = bench(tmp_path, ToyRecipe(steps=2), metrics=("train/fitt",), every=None)
    launch.prepare(setting.order("trial-000", setting.recipe))
    folder = RunFolder(tmp_path / "trial-000")
    assert trial.Attempt(setting, folder, {"trial": "trial-000"}, None).next_report()["done"]
    reason = folder.events.read()[-1]["reason"]
    assert "found no 'train/fitt' among" in reason
    assert "train/fit" in reason


# ---------------------------------------------------------------------------- room


def room(layout: Layout, **changes: Any) -> tuple[Room, Search]:
    found = Search.of(plan(ToyRecipe(steps=2, layout=layout), **changes), WORKLOAD, Path("none"))
    return Room.of(found), found


def test_a_single_learner_lives_in_its_trials_actor_and_several_reserve_for_themselves() -> None:
    alone, _ = room(Layout.laptop())
    assert (alone.nested, alone.layout.learners) == (False, 0)
    assert alone.trial == {"CPU": 1.0, "GPU": 0.0}
    ranks, _ = room(Layout(learners=2, learner_cpus=3))
    assert (ranks.nested, ranks.layout.learners) == (True, 2)
    assert ranks.trial == {"CPU": 6.0, "GPU": 0.0}


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        (POOLS, {"concurrent": 3}, "3 trials at a time need 3 CPUs, found 2 beside the pools"),
        (Layout(learner_cpus=5), {}, "does not fit the cluster"),
        (Layout(learners=2), {"scheduler": "pbt"}, "8 trials at a time need 16 CPUs"),
    ],
)
def test_more_trials_than_fit_are_refused(
    layout: Layout, changes: dict[str, Any], message: str
) -> None:
    wanted, found = room(layout, **changes)
    with pytest.raises(UsageError, match=message):
        wanted.check(found, [{"CPU": 4.0}])


# ---------------------------------------------------------------------------- commands


def command(*words: str, runs: Path) -> list[str]:
    return ["search", *words, "--runs", str(runs)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([SPEC], "nothing to search over"),
        ([SPEC, "lrr=uniform(0.1,1)"], "did you mean 'lr'"),
        ([SPEC, "lr=uniform(0.1,1)", "batch=many"], "batch"),
        ([SPEC, "--space", "smal"], "space"),
        ([SPEC, "--space", "nowhere.yaml"], "cannot read"),
        ([SPEC, "lr=uniform(0.1,1)", "--trials", "0"], "--trials: expected at least 1, found 0"),
        ([SPEC, "lr=uniform(0.1,1)", "--metric", "a:best"], "--metric: expected NAME"),
        ([], "expected a workload to search over, or --resume NAME"),
        ([SPEC, "--resume", "a"], "leave out workload"),
        (["--resume", "a"], "no runs there"),
        (
            [SPEC, "lr=uniform(0.1,1)", "--search", "optuna", "--scheduler", "pbt"],
            "--scheduler pbt changes points itself",
        ),
    ],
)
def test_a_wrong_command_is_refused_and_leaves_nothing(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(*words, runs=tmp_path)) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_run_takes_the_recipe_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "best.yaml"
    path.write_text(replace(WORKLOAD.recipe(), lr=0.3, steps=2).to_yaml())
    assert main(["run", SPEC, f"@{path}", "batch=4", "--name", "a", "--runs", str(tmp_path)]) == 0
    values = yaml.safe_load((tmp_path / "a" / "recipe.yaml").read_text())
    assert (values["lr"], values["steps"], values["batch"]) == (0.3, 2, 4)
    assert main(["run", SPEC, "@nowhere.yaml", "--runs", str(tmp_path)]) == 2
    path.write_text("lrr: 1\nsteps: 2\n")
    assert main(["run", SPEC, f"@{path}", "--runs", str(tmp_path)]) == 2
    errors = capsys.readouterr().err
    assert "cannot read the recipe" in errors
    assert "did you mean 'lr'" in errors


@pytest.mark.parametrize("content", ["", "[]", '{"trials": "many"}', '{"goals": 3}'])
def test_a_torn_plan_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "search.json").write_text(content)
    with pytest.raises(UsageError, match="expected the plan of a search"):
        read_plan(tmp_path)


def test_a_search_from_elsewhere_cannot_name_code_that_lies_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "s"
    folder.mkdir(parents=True)
    (folder / "evil.py").write_text("raise SystemExit('imported')")
    record = asdict(plan(ToyRecipe(steps=2), workload="runs.s.evil:WORKLOAD"))
    (folder / "search.json").write_text(json.dumps(record))
    assert main(["search", "--resume", "s", "--runs", "runs"]) == 2
    assert "code inside" in capsys.readouterr().err


# ---------------------------------------------------------------------------- with Ray


def plan(recipe: ToyRecipe, **changes: Any) -> Plan:
    settings: dict[str, Any] = {
        "workload": SPEC,
        "recipe_name": "default",
        "recipe": recipe.to_dict(),
        "space": {"lr": "loguniform(1e-3, 1)"},
        "goals": ("train/fit:max",),
    }
    return Plan(**settings | changes)


def nothing_is_left() -> None:
    """All placement groups are gone and all CPUs are free again."""
    import ray
    from ray.util import placement_group_table

    def left() -> tuple[float, set[str]]:
        states = {group["state"] for group in placement_group_table().values()}
        return ray.available_resources().get("CPU", 0.0), states - {"REMOVED"}

    deadline = time.monotonic() + 30
    while left() != (8.0, set()):
        assert time.monotonic() < deadline, left()
        time.sleep(0.2)


def timeless(folder: Path) -> list[Mapping[str, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [
        {key: value for key, value in row.items() if key != "time" and key[:5] != "perf/"}
        for row in rows
    ]


@pytest.mark.ray
def test_a_search_shares_its_pools_and_gives_the_numbers_of_ordinary_runs(
    ray_cluster: str, tmp_path: Path
) -> None:
    recipe = ToyRecipe(steps=30, checkpoint_every=10, layout=POOLS)
    wanted = plan(recipe, trials=3, concurrent=2, goals=("score", "train/loss:min"))
    found = Search.of(wanted, WORKLOAD, tmp_path / "s")
    assert search.begin(found)
    nothing_is_left()
    for index, point in enumerate(found.points()):
        alone = replace(recipe.override(*assignments(point)), layout=Layout())
        folder = RunFolder(tmp_path / f"alone-{index}")
        outcome = launch.create(Order(workload=WORKLOAD, spec=SPEC, recipe=alone, folder=folder))
        one = RunFolder(tmp_path / "s" / f"trial-{index:03d}")
        assert json.loads(one.result.read_text()) == outcome.metrics
        assert timeless(one.path) == timeless(folder.path)
        record = json.loads(one.record.read_text())
        assert (record["group"], record["job_type"]) == ("s", "trial")
    events = RunFolder(tmp_path / "s").events.read()
    assert sum(event["event"] == "host-started" for event in events) == 3
    results = read_results(found.folder, wanted)
    assert write_best(found, results) is not None
    best = best_of(results, Goal("score"))
    assert best is not None
    values = yaml.safe_load((tmp_path / "s" / "best.yaml").read_text())
    assert values["lr"] == best.point["lr"]
    assert values["layout"] == recipe.to_dict()["layout"]


@pytest.mark.ray
def test_a_failing_trial_does_not_end_the_search(
    ray_cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [SPEC, "batch=choice(8,-1,16)", "steps=40", "--search", "grid"]
    words += ["--scheduler", "asha", "--name", "s", "--concurrent", "2", "--json"]
    assert main(command(*words, runs=tmp_path)) == 0
    said = json.loads(capsys.readouterr().out)
    status = {one["trial"]: one["status"] for one in said["trials"]}
    assert status["trial-001"] == "failed"
    assert "finished" in status.values()
    nothing_is_left()
    assert main(["runs", "--runs", str(tmp_path)]) == 0
    (line,) = capsys.readouterr().out.splitlines()[1:]
    assert line.split()[:2] == ["s", "search"]
    assert "finished" in line
    assert main(["report", "s", "--runs", str(tmp_path)]) == 0
    page = (tmp_path / "s" / "report.html").read_text()
    assert "trial-001 failed" in page
    assert "Parallel coordinates" in page
    assert main(["resume", "s", "--runs", str(tmp_path)]) == 2
    assert "heliostat search --resume s" in capsys.readouterr().err


@pytest.mark.ray
def test_a_search_can_be_stopped_from_another_terminal(ray_cluster: str, tmp_path: Path) -> None:
    recipe = ToyRecipe(steps=400, pause_s=0.02)
    found = Search.of(plan(recipe, trials=3, concurrent=1), WORKLOAD, tmp_path / "s")
    first = RunFolder(tmp_path / "s" / "trial-000")

    def stop() -> None:
        while not (first.metrics.exists() and len(timeless(first.path)) > 5):
            time.sleep(0.05)
        assert main(["stop", "s", "--runs", str(tmp_path)]) == 0

    stopper = threading.Thread(target=stop)
    stopper.start()
    assert not search.begin(found)
    stopper.join()
    assert [summarise(one).status for one in found.trials()] == ["stopped"] + ["interrupted"] * 2
    assert summarise(RunFolder(tmp_path / "s")).status == "stopped"
    nothing_is_left()


@pytest.mark.ray
def test_population_based_training_clones_and_ends_above_its_worst_start(
    ray_cluster: str, tmp_path: Path
) -> None:
    recipe = ToyRecipe(steps=64, pause_s=0.01)
    wanted = plan(
        recipe, trials=4, scheduler="pbt", concurrent=2, space={"lr": "loguniform(1e-5, 1)"}
    )
    found = Search.of(wanted, WORKLOAD, tmp_path / "s")
    assert search.begin(found)
    nothing_is_left()
    results = read_results(found.folder, wanted)
    assert sum(result.cloned for result in results) >= 1
    assert {result.status for result in results} == {"finished"}
    starts = [timeless(one.path)[0]["train/fit"] for one in found.trials()]
    assert min(result.scores["train/fit"] for result in results) > min(starts)


@pytest.mark.ray
@pytest.mark.slow
def test_ranks_of_a_pruned_trial_leave_no_placement_group(ray_cluster: str, tmp_path: Path) -> None:
    recipe = ToyRecipe(steps=36, pause_s=0.1, layout=Layout(learners=2))
    space = {"lr": "choice(0.2, 0.0001)"}
    wanted = plan(recipe, trials=2, search="grid", scheduler="asha", space=space)
    found = Search.of(wanted, WORKLOAD, tmp_path / "s")
    done = ToyRecipe(steps=36, lr=0.2)
    launch.create(bench(tmp_path / "s", done).order("trial-000", done))
    assert search.resume(found)
    assert [summarise(one).status for one in found.trials()] == ["finished", "pruned"]
    nothing_is_left()
