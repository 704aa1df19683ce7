"""What dies is made good: SIGKILL anywhere, and the final numbers of an undisturbed run."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from toy_package.workload import WORKLOAD

from heliostat import launch
from heliostat.errors import RunFailed
from heliostat.folder import RunFolder
from heliostat.launch import Order, Outcome
from heliostat.layout import Hosts, Layout
from heliostat.tracker import read_metrics

pytestmark = [pytest.mark.ray, pytest.mark.slow]
SPEC = "toy_package.workload:WORKLOAD"
ONE_LEARNER = Layout(
    learners=1,
    learner_cpus=1,
    environment=Hosts(hosts=2, cpus=0.5),
    data=Hosts(hosts=1, cpus=0.5),
    evaluation=Hosts(hosts=1, cpus=0.5),
    call_deadline_s=90,
)
TWO_LEARNERS = Layout(learners=2)


def order(folder: Path, layout: Layout, **changes: Any) -> Order:
    recipe = replace(WORKLOAD.recipe(), layout=layout, pause_s=0.15, **changes)
    return Order(workload=WORKLOAD, spec=SPEC, recipe=recipe, folder=RunFolder(folder))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return launch.create(order(tmp_path_factory.mktemp("undisturbed") / "a", Layout.in_process()))


def disturbed(wanted: Order, disturbances: Mapping[int, Callable[[RunFolder], None]]) -> Outcome:
    """Runs to the end, calling each disturbance once the run has logged its step."""

    def wait() -> None:
        for step, disturb in disturbances.items():
            while not any(row["step"] >= step for row in read_metrics(wanted.folder.path)):
                time.sleep(0.05)
            disturb(wanted.folder)

    folder = wanted.folder.path
    folder.parent.mkdir(parents=True, exist_ok=True)
    threading.Thread(target=wait, daemon=True).start()
    return launch.create(wanted)


def events(folder: Path) -> list[str]:
    return [event["event"] for event in RunFolder(folder).events.read()]


def kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)


def kill_learner(folder: RunFolder) -> None:
    began = [event for event in folder.events.read() if event["event"] in {"began", "restored"}]
    kill(began[-1]["process"])


def kill_target_host(folder: RunFolder) -> None:
    started = [event for event in folder.events.read() if event.get("pool") == "targets"]
    kill(int(started[0]["place"].rpartition("process ")[2].rstrip(")")))


def processes(title: str) -> list[int]:
    """Those of this process's own Ray: others may run on the machine."""
    found: list[int] = []
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if title in (one.cmdline() or [""])[0]:
                found.append(one.pid)
    return found


def kill_controller(_: RunFolder) -> None:
    (controller,) = processes("TrainController")
    kill(controller)


def test_kills_do_not_change_the_final_numbers(
    ray_cluster: str, tmp_path: Path, undisturbed: Outcome
) -> None:
    kills = {8: kill_target_host, 12: kill_learner, 20: kill_controller}
    outcome = disturbed(order(tmp_path / "a", ONE_LEARNER), kills)
    assert outcome.metrics == undisturbed.metrics
    found = events(outcome.folder)
    marks = {"host-lost": 1, "learner-lost": 2, "attempt": 3}
    assert {name: found.count(name) for name in marks} == marks
    steps = [row["step"] for row in read_metrics(outcome.folder)]
    assert steps == list(range(1, 31))
    losses = [row["train/loss"] for row in read_metrics(outcome.folder)]
    assert losses == [row["train/loss"] for row in read_metrics(undisturbed.folder)]


def test_two_ranks_learn_what_one_does_and_outlive_one_of_them(
    ray_cluster: str, tmp_path: Path, undisturbed: Outcome
) -> None:
    def kill_a_rank(_: RunFolder) -> None:
        ranks = processes("RayTrainWorker")
        assert len(ranks) == 2
        kill(max(ranks))

    outcome = disturbed(order(tmp_path / "a", TWO_LEARNERS), {12: kill_a_rank})
    assert outcome.metrics == pytest.approx(undisturbed.metrics, abs=1e-5)
    assert events(outcome.folder).count("learner-lost") == 1


def test_deaths_beyond_the_budget_fail_the_run(ray_cluster: str, tmp_path: Path) -> None:
    layout = replace(ONE_LEARNER, max_restarts=0, environment=Hosts(), evaluation=Hosts())
    with pytest.raises(RunFailed, match=r"died 1 times.*max_restarts=0.*heliostat resume a"):
        disturbed(order(tmp_path / "a", layout), {3: kill_learner})


def test_the_methods_mistake_is_not_tried_again(ray_cluster: str, tmp_path: Path) -> None:
    wanted = order(tmp_path / "a", Layout(learners=1))
    broken = replace(WORKLOAD, train="toy_package.faulty:broken")
    with pytest.raises(RunFailed, match="the method's own mistake at seed 0"):
        launch.create(replace(wanted, workload=broken))
    assert events(tmp_path / "a").count("attempt") == 1
