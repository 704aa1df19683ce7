"""What cannot start ends in an error by its deadline; what can start smaller does."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toy_package.workload import WORKLOAD

from heliostat import launch
from heliostat.errors import DeadlineExceeded, RunFailed, UsageError
from heliostat.folder import RunFolder
from heliostat.launch import Order
from heliostat.layout import Hosts, Layout

pytestmark = [pytest.mark.ray, pytest.mark.slow]
SPEC = "toy_package.workload:WORKLOAD"
TESTS = Path(__file__).parent.parent


def order(folder: Path, layout: Layout, **changes: Any) -> Order:
    recipe = replace(WORKLOAD.recipe(), layout=layout, **changes)
    return Order(workload=WORKLOAD, spec=SPEC, recipe=recipe, folder=RunFolder(folder))


@pytest.fixture
def busy_cluster(ray_cluster: str) -> Iterator[None]:
    """A cluster whose CPUs are all taken by somebody else."""
    import ray

    @ray.remote(num_cpus=8)
    class Squatter:
        def here(self) -> bool:
            return True

    squatter = Squatter.remote()
    assert ray.get(squatter.here.remote(), timeout=60)
    yield
    ray.kill(squatter)


def test_a_learner_that_can_never_start_is_given_up(busy_cluster: None, tmp_path: Path) -> None:
    layout = Layout(learners=1, start_deadline_s=5)
    start = time.monotonic()
    with pytest.raises(RunFailed, match="the learner's ranks could not start"):
        launch.create(order(tmp_path / "a", layout))
    assert time.monotonic() - start < 120


def test_a_host_that_can_never_start_is_given_up(busy_cluster: None, tmp_path: Path) -> None:
    layout = Layout(environment=Hosts(hosts=2, cpus=1), start_deadline_s=3)
    with pytest.raises(DeadlineExceeded, match=r"waited 3 s for host 0 of 2 of pool 'targets'"):
        launch.create(order(tmp_path / "a", layout))


def test_a_layout_beyond_the_cluster_is_refused_with_a_table(
    ray_cluster: str, tmp_path: Path
) -> None:
    layout = Layout(learners=5, learner_cpus=1, environment=Hosts(hosts=4, cpus=1))
    with pytest.raises(UsageError, match=r"requested in all +9 .*\n.*in the cluster +8 "):
        launch.create(order(tmp_path / "a", layout))
    assert not (tmp_path / "a").exists()


def test_an_elastic_run_goes_on_with_the_ranks_that_fit(ray_cluster: str, tmp_path: Path) -> None:
    layout = Layout(learners=3, min_learners=1, learner_cpus=3)
    outcome = launch.create(order(tmp_path / "a", layout))
    (began,) = [
        event for event in RunFolder(outcome.folder).events.read() if event["event"] == "began"
    ]
    assert began["world"] == 2
    assert outcome.metrics["score"] > -0.5


def command(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "cluster.cli", *arguments],
        cwd=TESTS,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAY_ADDRESS": ""},
    )


def wait_for_step(folder: Path, step: int) -> None:
    deadline = time.monotonic() + 240
    metrics = folder / "metrics.jsonl"
    while not (metrics.exists() and f'"step": {step},' in metrics.read_text()):
        assert time.monotonic() < deadline, f"{folder} did not reach step {step}"
        time.sleep(0.1)


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGKILL]
)
def test_a_driver_on_its_own_ray_can_be_stopped_or_killed_and_resumed(
    tmp_path: Path, number: signal.Signals
) -> None:
    straight = launch.create(order(tmp_path / "straight", Layout(), steps=60))
    name, runs = "mine", str(tmp_path)
    driver = command(
        "run", f"{SPEC}:laptop", "steps=60", "pause_s=0.1", "--name", name, "--runs", runs
    )
    wait_for_step(tmp_path / name, 12)
    driver.send_signal(number)
    asked = time.monotonic()
    _, errors = driver.communicate(timeout=120)
    if number == signal.SIGTERM:
        assert time.monotonic() - asked < 10 * max(1.0, os.getloadavg()[0] / 2)
        assert driver.returncode == 1
        assert f"heliostat resume {name} --runs {runs}" in errors
    resumed = command("resume", name, "--runs", runs, "--json")
    output, errors = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, errors
    scores = {
        key: float(value) for key, value in re.findall(r'"(score|weight)": ([-\d.e]+)', output)
    }
    assert scores == straight.metrics
