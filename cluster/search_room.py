"""How many trials of a search fit beside its pools, and what Tune reserves for each."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import ray

from cluster.search_plan import Search
from heliostat.errors import UsageError
from heliostat.ray_session import Nodes, check_layout
from heliostat.recipe import Hosts, Layout
from heliostat.workload import pool_hosts

_DRIVER_CPUS = 0.01
"""Reserved by the actor of a trial whose learners are elsewhere: Tune wants some."""


def layouts(search: Search) -> tuple[Layout, dict[str, Hosts]]:
    """Returns a trial's layout, and the hosts that all share.

    A single learner on CPUs runs inside the trial's own actor, which gives the same numbers as a
    rank of Ray Train and saves its process.
    """
    layout = search.recipe.layout
    if layout.learners <= 1 and not layout.learner_gpus:
        layout = replace(layout, learners=0, min_learners=None)
    return layout, pool_hosts(search.workload, search.recipe.layout)


def check_room(search: Search, layout: Layout, hosts: Mapping[str, Hosts], nodes: Nodes) -> None:
    """Refuses what the nodes can never hold: the pools beside one trial, or beside all wanted."""
    one = layout if layout.learners else replace(layout, learners=1)
    check_layout(one, hosts, nodes)
    wanted, total = search.plan.concurrent, sum(node.get("CPU", 0) for node in nodes)
    free = total - _pool_cpus(hosts)
    if wanted and wanted * _trial_cpus(layout) > free:
        raise UsageError(
            f"--concurrent {wanted} needs {wanted * _trial_cpus(layout):g} CPUs for learners, "
            f"found {free:g} of {total:g} beside the pools; ask for fewer, or lower "
            f"layout.learner_cpus from {layout.learner_cpus:g}"
        )


def _pool_cpus(hosts: Mapping[str, Hosts]) -> float:
    return sum(asked.hosts * asked.cpus for asked in hosts.values())


def _trial_cpus(layout: Layout) -> float:
    return max(1, layout.learners) * layout.learner_cpus


def concurrency(search: Search, layout: Layout, hosts: Mapping[str, Hosts]) -> tuple[int, float]:
    """Returns how many trials run at a time, and the CPUs that Tune reserves for each.

    Population-based training needs all trials alive at once and takes turns by pausing them, so
    that there the reservation alone limits how many run.
    """
    total = cast("dict[str, float]", ray.cluster_resources())
    free = total.get("CPU", 1.0) - _pool_cpus(hosts)
    each = _trial_cpus(layout)
    fits = int(free / each + 1e-9) if each else os.cpu_count() or 1
    if layout.learners and layout.learner_gpus:
        used = sum(asked.hosts * asked.gpus for asked in hosts.values())
        gpus = total.get("GPU", 0.0) - used
        fits = min(fits, int(gpus / (layout.learners * layout.learner_gpus) + 1e-9))
    concurrent = max(1, min(search.plan.concurrent or fits, search.plan.trials))
    if layout.learners:
        return concurrent, _DRIVER_CPUS  # Ray Train reserves for its ranks
    if search.plan.scheduler == "pbt":
        return concurrent, max(each, math.floor(free / concurrent * 100) / 100)
    return concurrent, each
