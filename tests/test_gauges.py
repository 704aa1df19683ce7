"""The gauges of a run: what a real Ray exports, what a dashboard reads, and what it costs."""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from gauged import WORKLOAD
from logged import LABELS

from heliostat.folder import RunFolder
from heliostat.gauges import GaugeView, is_connected
from heliostat.launch import Order, prepare, resume

DASHBOARD = Path(__file__).parents[1] / "k8s" / "grafana" / "heliostat.json"
METRIC = re.compile(r"\b(?:ray|heliostat)_[a-z_]+")
SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)")

Sample = tuple[dict[str, str], float]
"""Labels and value."""


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text())


def expressions(dashboard: dict[str, Any]) -> list[str]:
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    variables = [item["query"] for item in dashboard["templating"]["list"]]
    return panels + [query["query"] for query in variables if isinstance(query, dict)]


def test_a_dashboard_has_what_grafana_needs(dashboard: dict[str, Any]):
    assert {"uid", "title", "schemaVersion", "panels", "templating", "time"} <= dashboard.keys()
    variables = {item["name"]: item["type"] for item in dashboard["templating"]["list"]}
    assert variables["datasource"] == "datasource"
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["title"]
        assert panel["description"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["type"] in {"timeseries", "stat"}
        ids = [target["refId"] for target in panel["targets"]]
        assert len(set(ids)) == len(ids) > 0
    used = {name for text in expressions(dashboard) for name in re.findall(r"\$(\w+)", text)}
    assert used == variables.keys() - {"datasource"}


def test_no_panel_lies_on_another(dashboard: dict[str, Any]):
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    assert all(place["x"] >= 0 and place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or apart


def test_brackets_of_every_query_close(dashboard: dict[str, Any]):
    for text in expressions(dashboard):
        bare = re.sub(r'"[^"]*"', "", text)
        while (shorter := re.sub(r"\(\)|\{\}", "", re.sub(r"[^(){}]", "", bare))) != bare:
            bare = shorter
        assert bare == "", text


# ---------------------------------------------------------------------------- a real Ray


def scrape(session: Path) -> dict[str, list[Sample]]:
    """Reads what the head and its node export, at the addresses that Prometheus would ask."""
    found: dict[str, list[Sample]] = defaultdict(list)
    for group in json.loads((session / "prom_metrics_service_discovery.json").read_text()):
        for target in group["targets"]:
            with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
                lines = answer.read().decode().splitlines()
            for name, labels, value in filter(None, map(parsed, lines)):
                found[name].append((labels, value))
    return found


def parsed(line: str) -> tuple[str, dict[str, str], float] | None:
    if match := SAMPLE.fullmatch(line):
        labels = dict(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
        return match[1], labels, float(match[3])
    return None


@pytest.fixture(scope="module")
def exported(
    ray_cluster: str, tmp_path_factory: pytest.TempPathFactory, dashboard: dict[str, Any]
) -> Iterator[dict[str, list[Sample]]]:
    """What Ray exports while a run goes on, once it holds every name of the dashboard."""
    import ray

    session = Path(ray.get_runtime_context().get_temp_dir())
    folder = RunFolder(tmp_path_factory.mktemp("runs") / "tidal")
    order = Order(
        workload=WORKLOAD, spec="gauged:WORKLOAD", recipe=WORKLOAD.recipe(), folder=folder
    )
    prepare(order)
    folder.events.add("host-lost", pool="samplers", host=0, call="play")
    run = threading.Thread(target=resume, args=(order,))
    run.start()
    try:
        yield once_exported(session, names_of(dashboard))
    finally:
        folder.stop.touch()
        run.join()


def once_exported(session: Path, names: set[str]) -> dict[str, list[Sample]]:
    """Waits until every name is there, or two minutes; a busy node may miss a request."""
    deadline = time.monotonic() + 120
    found: dict[str, list[Sample]] = {}
    while not names <= found.keys() and time.monotonic() < deadline:
        time.sleep(2)
        with suppress(OSError):
            found = scrape(session)
    return found


def names_of(dashboard: dict[str, Any]) -> set[str]:
    return {name for text in expressions(dashboard) for name in METRIC.findall(text)}


@pytest.mark.ray
def test_ray_exports_every_name_of_the_dashboard(
    exported: dict[str, list[Sample]], dashboard: dict[str, Any]
):
    assert names_of(dashboard) - exported.keys() == set()
    ours = {name for name in exported if "heliostat" in name}
    assert ours <= names_of(dashboard)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("name", "labels", "low", "high"),
    [
        ("running", {}, 1, 1),
        ("step_seconds", {}, 0.1, 5),
        ("phase_seconds", {"phase": "sample"}, 0.1, 5),
        ("samples_per_second", {}, 1, 80),
        ("tokens_per_second", {}, 64, 5120),
        ("queue_depth", {}, 2, 2),
        ("lag_versions", {}, 1, 1),
        ("restarts", {"kind": "learner"}, 0, 0),
        ("restarts", {"kind": "host"}, 1, 1),
        ("metric", {"metric": "train/loss"}, 0, 1),
    ],
)
def test_a_gauge_carries_the_runs_number_and_its_labels(
    exported: dict[str, list[Sample]], name: str, labels: dict[str, str], low: float, high: float
):
    wanted = {"run": "tidal", "workload": "gauged", **labels}
    (value,) = (
        value
        for found, value in exported[f"ray_heliostat_{name}"]
        if wanted.items() <= found.items()
    )
    assert low <= value <= high


@pytest.mark.ray
def test_a_row_costs_little_and_a_run_makes_few_series(ray_cluster: str, tmp_path: Path):
    assert is_connected()
    view = GaugeView(tmp_path, LABELS)
    row = {f"train/{number}": 1.0 for number in range(1000)}
    view.log(row, 0)
    assert len(view._metrics) == 64
    start = time.process_time()
    for step in range(1000):
        view.log({"train/1": 1.0, "perf/step_s": 0.1}, step)
    assert time.process_time() - start < 0.1  # of a second for a thousand steps
