"""A search outlives its driver, its shared hosts and its trials' actors, to the same numbers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toy_package.workload import WORKLOAD, ToyRecipe

from cluster import search
from cluster.search_plan import Plan, Search
from cluster.spaces import assignments
from heliostat import launch
from heliostat.folder import RunFolder
from heliostat.launch import Order
from heliostat.layout import Hosts, Layout
from heliostat.tracker import read_metrics

pytestmark = [pytest.mark.ray, pytest.mark.slow]
SPEC = "toy_package.workload:WORKLOAD"
TESTS = Path(__file__).parent.parent


def the_search(folder: Path, recipe: ToyRecipe, **changes: Any) -> Search:
    settings: dict[str, Any] = {
        "workload": SPEC,
        "recipe_name": "default",
        "recipe": recipe.to_dict(),
        "space": {"lr": "loguniform(0.001, 1)"},
        "goals": ("score",),
    }
    return Search.of(Plan(**settings | changes), WORKLOAD, folder)


def alone(folder: Path, found: Search) -> list[dict[str, float]]:
    """Returns the final metrics of the same trials as ordinary runs, undisturbed."""
    metrics: list[dict[str, float]] = []
    for index, point in enumerate(found.points()):
        recipe = found.recipe.override(*assignments(point), "layout=in_process", "pause_s=0")
        run = RunFolder(folder / f"alone-{index}")
        order = Order(workload=WORKLOAD, spec=SPEC, recipe=recipe, folder=run)
        metrics.append(dict(launch.create(order).metrics))
    return metrics


def results(folder: Path) -> list[dict[str, float]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("trial-*/result.json"))]


def steps(folder: Path) -> list[int]:
    return [int(row["step"]) for row in read_metrics(folder)]


def await_(condition: Callable[[], bool], what: str, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def command(*words: str, runs: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "cluster.cli", "search", *words, "--runs", str(runs)],
        cwd=TESTS,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAY_ADDRESS": ""},
    )


def test_a_search_whose_driver_is_killed_and_stopped_repeats_nothing(tmp_path: Path) -> None:
    words = [SPEC, "lr=loguniform(0.001,1)", "steps=40", "pause_s=0.05", "--name", "mine"]
    words += ["layout.learner_cpus=0.5", "--trials", "5", "--concurrent", "2", "--metric", "score"]
    folder = tmp_path / "mine"
    kept: dict[Path, float] = {}
    for least, number in ((1, signal.SIGKILL), (3, signal.SIGTERM)):
        driver = command(*words, runs=tmp_path)
        try:
            await_(
                lambda least=least: len(results(folder)) >= least and _some_are_at_work(folder),
                f"{least} finished trials and one at work",
            )
            driver.send_signal(number)
            asked = time.monotonic()
            _, errors = driver.communicate(timeout=120)
        finally:
            driver.kill()
        kept |= {path: path.stat().st_mtime for path in folder.glob("trial-*/result.json")}
        assert least <= len(kept) < 5
        words = ["--resume", "mine", "--json"]
    assert time.monotonic() - asked < 15 * max(1.0, os.getloadavg()[0] / 2)
    assert driver.returncode == 1, errors
    assert "heliostat search --resume mine" in errors
    resumed = command(*words, runs=tmp_path)
    output, errors = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, errors
    assert {path: path.stat().st_mtime for path in kept} == kept
    assert re.findall(r'"status": "(\w+)"', output) == ["finished"] * 5
    found = the_search(folder, ToyRecipe(steps=40, checkpoint_every=10), trials=5)
    assert results(folder) == alone(tmp_path, found)
    assert all(steps(trial.path) == list(range(1, 41)) for trial in found.trials())


def _some_are_at_work(folder: Path) -> bool:
    unfinished = [path for path in folder.glob("trial-*") if not (path / "result.json").exists()]
    return any(15 <= len(steps(path)) < 35 for path in unfinished)


def test_a_killed_host_and_a_killed_trial_change_no_number(
    ray_cluster: str, tmp_path: Path
) -> None:
    layout = Layout(environment=Hosts(hosts=1, members=2, cpus=1), call_deadline_s=90)
    recipe = ToyRecipe(steps=30, checkpoint_every=10, pause_s=0.05, layout=layout)
    found = the_search(tmp_path / "s", recipe, trials=2, concurrent=2)
    first, second = (RunFolder(tmp_path / "s" / f"trial-00{index}") for index in (0, 1))

    def kill() -> None:
        await_(lambda: min(len(steps(first.path)), len(steps(second.path))) >= 12, "both trials")
        (host,) = [e for e in found.run_folder.events.read() if e["event"] == "host-started"]
        os.kill(int(re.findall(r"process (\d+)", host["place"])[0]), signal.SIGKILL)
        (began,) = [event for event in first.events.read() if event["event"] == "began"]
        os.kill(began["process"], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    assert search.begin(found)
    killer.join()
    assert results(tmp_path / "s") == alone(tmp_path, replace(found, recipe=recipe))
    assert "restored" in [event["event"] for event in first.events.read()]
    assert "host-lost" in [event["event"] for event in second.events.read()]
    assert steps(first.path) == steps(second.path) == list(range(1, 31))
