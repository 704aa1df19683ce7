"""A node dies, another comes: an elastic run shrinks, grows back, and ends at the same numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from toy_package.workload import WORKLOAD

from heliostat import launch
from heliostat.folder import RunFolder
from heliostat.launch import Order

pytestmark = [pytest.mark.ray, pytest.mark.long]
TESTS = Path(__file__).parents[1]
STEPS = 150


def test_an_elastic_run_outlives_a_raylet_and_grows_back(tmp_path: Path) -> None:
    recipe = replace(WORKLOAD.recipe(), steps=STEPS)
    place = RunFolder(tmp_path / "straight")
    straight = launch.create(Order(workload=WORKLOAD, spec="toy", recipe=recipe, folder=place))
    process = subprocess.run(
        [sys.executable, str(TESTS / "elastic_run.py"), str(tmp_path / "a"), str(STEPS)],
        capture_output=True,
        text=True,
        timeout=420,
        env={**os.environ, "RAY_ADDRESS": ""},
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    folder = RunFolder(tmp_path / "a")
    worlds = [event["world"] for event in folder.events.read() if "world" in event]
    assert worlds == [2, 1, 2]
    assert json.loads(folder.result.read_text()) == pytest.approx(dict(straight.metrics), abs=1e-4)
