"""What a search costs beside the same runs made by hand: CPU seconds, and memory of the pools.

``python -m benchmarks.search`` runs eight short T1 runs one after another in one process, then the
same eight points as a search whose trials share one set of pools, then starts eight separate sets
of pools, and prints one table. CPU seconds are those of all processes with their children, start-up
and Ray included, at one priority; memory is the sum of the host actors' proportional set sizes at
its peak.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from algorithms.t1.workload import WORKLOAD
from cluster.spaces import Point, assignments, build_space, random_points
from heliostat.events import EventLog
from heliostat.folder import RunFolder
from heliostat.launch import Order, create
from heliostat.ray_pool import RayPool
from heliostat.ray_session import ray_session
from heliostat.recipe import Recipe
from heliostat.workload import pool_hosts, resolve

TRIALS = 8
SPACE = {"lr": "loguniform(1e-4, 1e-3)", "temperature": "uniform(0.9, 1.3)"}
SHORT = ("steps=24",)
POOLED = ("layout.data.hosts=0", "layout.evaluation.hosts=0", "layout.learner_cpus=0.5")
"""Of the laptop's layout the samplers stay in a host; two learners share a core."""
_EVERY_S = 0.25
_MEMORY_EVERY = 8
"""Looks at processes for each look at memory, which is the dearer one."""


@dataclass(slots=True)
class Cost:
    """What a command and all its descendants have used."""

    cpu_s: dict[tuple[int, float], float] = field(default_factory=dict[tuple[int, float], float])
    hosts_mib: float = 0.0
    """Largest sum over the host actors."""
    seconds: float = 0.0

    @property
    def total_cpu_s(self) -> float:
        """CPU seconds of all processes."""
        return sum(self.cpu_s.values())


def watch(arguments: Sequence[str]) -> Cost:
    """Runs ``python -m`` with the arguments to its end and returns what it used."""
    cost, start = Cost(), time.perf_counter()
    priority = {"RAY_worker_niceness": "0"}  # as the runs by hand have it
    command = psutil.Popen(
        [sys.executable, "-m", *arguments],
        stdout=subprocess.DEVNULL,
        env={"WANDB_MODE": "disabled", **os.environ, **priority},
    )
    looks = 0
    while command.poll() is None:
        time.sleep(_EVERY_S)
        looks += 1
        _look(command, cost, memory=looks % _MEMORY_EVERY == 0)
    if command.returncode:
        raise SystemExit(f"{' '.join(arguments)} ended with {command.returncode}")
    cost.seconds = time.perf_counter() - start
    return cost


def _look(command: psutil.Popen, cost: Cost, memory: bool) -> None:
    hosts = 0.0
    try:
        processes = [command, *command.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in processes:
        try:
            times = process.cpu_times()
            cost.cpu_s[process.pid, process.create_time()] = times.user + times.system
            if memory and "Host" in (process.cmdline() or [""])[0]:
                hosts += process.memory_full_info().pss / 2**20
        except psutil.Error:  # it has ended in between
            continue
    cost.hosts_mib = max(cost.hosts_mib, hosts)


def pooled_recipe(name: str) -> Recipe:
    """Returns the recipe of the search: a learner in each trial's actor beside shared hosts."""
    return WORKLOAD.recipe(name).override(*SHORT, *POOLED)


def points(name: str) -> list[Point]:
    """Returns the points that the search will draw."""
    recipe = pooled_recipe(name)
    return random_points(build_space(recipe, SPACE), recipe.seed, TRIALS)


def by_hand(name: str, folder: Path) -> None:
    """Makes the runs one after another in this process."""
    for index, point in enumerate(points(name)):
        recipe = WORKLOAD.recipe(name).override("layout=in_process", *SHORT, *assignments(point))
        run = RunFolder(folder / f"by-hand-{index}")
        create(Order(workload=WORKLOAD, spec="t1", recipe=recipe, folder=run))


def separate_pools(name: str, folder: Path) -> None:
    """Starts as many sets of pools as there are trials, and keeps them for a while."""
    with ray_session(None, lambda _: None), ExitStack() as stack:
        events = EventLog(folder / "events.jsonl")
        for _ in range(TRIALS):
            recipe = pooled_recipe(name).override("layout.environment.cpus=0")
            for pool_name, hosts in pool_hosts(WORKLOAD, recipe.layout).items():
                role = resolve(WORKLOAD.roles[pool_name])
                pool = RayPool(pool_name, role, recipe, hosts, events)
                stack.callback(pool.close)
                pool.ready()
        time.sleep(2 * _EVERY_S * _MEMORY_EVERY)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="smoke")
    parser.add_argument("--part", choices=("by-hand", "pools"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        (by_hand if options.part == "by-hand" else separate_pools)(options.recipe, options.folder)
        return
    with tempfile.TemporaryDirectory(prefix="heliostat-") as folder:
        part = ["benchmarks.search", "--recipe", options.recipe, "--folder", folder, "--part"]
        hand = watch([*part, "by-hand"])
        words = ["cluster.cli", "search", f"t1:{options.recipe}", "--runs", folder, *SHORT, *POOLED]
        words += [f"{key}={text}" for key, text in SPACE.items()]
        words += ["--trials", str(TRIALS), "--metric", "accuracy", "--name", "search"]
        search = watch(words)
        pools = watch([*part, "pools"])
    say = sys.stdout.write
    say(f"{TRIALS} runs of t1:{options.recipe}{'CPU s':>16}{'wall s':>10}{'hosts MiB':>12}\n")
    for title, cost in (
        ("by hand, one process", hand),
        ("search, shared pools", search),
        (f"{TRIALS} separate sets of pools", pools),
    ):
        say(f"{title:<27}{cost.total_cpu_s:>11.0f}{cost.seconds:>10.0f}{cost.hosts_mib:>12.0f}\n")
    say(f"search / by hand: {search.total_cpu_s / hand.total_cpu_s:.2f} of the CPU seconds; ")
    say(f"shared / separate: {search.hosts_mib / pools.hosts_mib:.2f} of the memory\n")


if __name__ == "__main__":
    main()
