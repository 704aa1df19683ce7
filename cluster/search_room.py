"""How many trials of a search fit beside its pools, and what Tune reserves for each."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import ray

from cluster.search_plan import Search
from heliostat.errors import UsageError
from heliostat.layout import Hosts, Layout
from heliostat.ray_session import Nodes, check_layout
from heliostat.workload import pool_hosts

Bundle = dict[str, float]
"""CPUs and GPUs that are reserved together."""

_DRIVER_CPUS = 0.01
"""Reserved by the actor of a trial whose ranks reserve for themselves: Tune wants some."""


@dataclass(frozen=True, slots=True)
class Room:
    """What the pools and each trial of a search take up."""

    layout: Layout
    """Of a trial."""
    pools: Mapping[str, Hosts]
    """Hosts that all trials share."""
    bundles: tuple[Bundle, ...]
    """What Tune reserves for a trial, its actor first."""
    nested: bool
    """Whether a trial's learners are ranks of Ray Train, which reserves for them."""

    @classmethod
    def of(cls, search: Search) -> Room:
        """Finds where the processes of a search live.

        A single learner on CPUs runs inside the trial's own actor, which gives the same numbers as
        a rank of Ray Train and saves its process. A workload that brings actors of its own starts
        them inside what Tune reserves for the trial.
        """
        layout = search.recipe.layout
        pools = pool_hosts(search.workload, layout)
        learner = {"CPU": layout.learner_cpus, "GPU": layout.learner_gpus}
        if getattr(search.workload, "brings_actors", False):
            runner = {"CPU": layout.environment.cpus, "GPU": layout.environment.gpus}
            others = [runner] * layout.environment.hosts + [learner] * layout.learners
            return cls(layout, pools, ({"CPU": layout.learner_cpus}, *others), nested=False)
        if layout.learners <= 1 and not layout.learner_gpus:
            layout = replace(layout, learners=0, min_learners=None)
            return cls(layout, pools, ({"CPU": layout.learner_cpus},), nested=False)
        return cls(layout, pools, ({"CPU": _DRIVER_CPUS},), nested=True)

    @property
    def trial(self) -> Bundle:
        """What a trial takes up in all."""
        if self.nested:
            ranks = self.layout.learners
            return {
                "CPU": ranks * self.layout.learner_cpus,
                "GPU": ranks * self.layout.learner_gpus,
            }
        kinds = ("CPU", "GPU")
        return {kind: sum(bundle.get(kind, 0) for bundle in self.bundles) for kind in kinds}

    def free(self, total: Mapping[str, float]) -> Bundle:
        """Returns what the pools leave of ``total``."""
        used = {
            "CPU": sum(hosts.hosts * hosts.cpus for hosts in self.pools.values()),
            "GPU": sum(hosts.hosts * hosts.gpus for hosts in self.pools.values()),
        }
        return {kind: total.get(kind, 0) - amount for kind, amount in used.items()}

    def check(self, search: Search, nodes: Nodes) -> None:
        """Refuses what the nodes can never hold: the pools beside one trial, or all wanted ones.

        Raises:
            UsageError: says what is needed and what there is.
        """
        check_layout(replace(self.layout, learners=max(1, self.layout.learners)), self.pools, nodes)
        plan = search.plan
        # A population is alive at once; ranks of Ray Train cannot be made to take turns.
        wanted = plan.trials if self.nested and plan.scheduler == "pbt" else plan.concurrent or 1
        free = self.free(
            {kind: sum(node.get(kind, 0) for node in nodes) for kind in ("CPU", "GPU")}
        )
        for kind, each in self.trial.items():
            if wanted * each > free[kind] + 1e-9:
                raise UsageError(
                    f"{wanted} trials at a time need {wanted * each:g} {kind}s, found "
                    f"{free[kind]:g} beside the pools; ask for fewer with --concurrent (a "
                    "population of several ranks each: with --trials), or lower layout.*"
                )

    def fit(self, search: Search) -> tuple[int, tuple[Bundle, ...]]:
        """Returns how many trials run at a time, and the bundles that Tune reserves for each.

        Population-based training needs all trials alive and takes turns by pausing them, so that
        there the reservation alone limits how many run.
        """
        free, plan = self.free(cast("dict[str, float]", ray.cluster_resources())), search.plan
        fits = [int(free[kind] / each + 1e-9) for kind, each in self.trial.items() if each]
        most = min(fits, default=os.cpu_count() or 1)
        concurrent = max(1, min(plan.concurrent or most, plan.trials))
        first, *others = self.bundles
        if plan.scheduler == "pbt" and not self.nested:
            spare = math.floor(free["CPU"] / concurrent * 100) / 100 - self.trial["CPU"]
            first = {**first, "CPU": first["CPU"] + max(0.0, spare)}
        return concurrent, (first, *others)
