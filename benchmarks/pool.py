"""What the pool adds to raw Ray: round trips, and 100 MB of weights to 1, 2, 4 and 8 members.

``python -m benchmarks.pool`` prints one table. Each figure is the median of interleaved
repetitions, so that a machine that slows down slows both sides; only the ratios travel.
"""

from __future__ import annotations

import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import ray

from heliostat.events import EventLog
from heliostat.layout import Family, Hosts, Layout
from heliostat.pool import Member, idempotent
from heliostat.ray_pool import RayPool
from heliostat.recipe import Recipe
from heliostat.weights import Weights

MEGABYTES = 100
REPEATS = 15
TRIPS = 300


class Listener:
    """A role that answers at once, or reads all of its weights."""

    family: ClassVar[Family] = "environment"

    def __init__(self, recipe: Recipe, member: Member) -> None:
        del recipe, member

    @idempotent
    def echo(self, number: int) -> int:
        """Returns the number."""
        return number

    @idempotent
    def read(self, weights: Weights) -> int:
        """Copies the arrays once, as a model that loads them does."""
        return sum(array.copy().nbytes for _, array in weights.arrays())


class RawListener:
    """The same without the pool."""

    def echo(self, number: int) -> int:
        """Returns the number."""
        return number

    def read(self, buffer: np.ndarray) -> int:
        """Copies the buffer once."""
        return buffer.copy().nbytes


def interleaved(repeats: int, *sides: Callable[[], object]) -> list[float]:
    """Returns the median seconds of each side, called in turn."""
    seconds: list[list[float]] = [[] for _ in sides]
    for repeat in range(repeats + 1):
        for side, spent in zip(sides, seconds, strict=True):
            start = time.perf_counter()
            side()
            if repeat:  # the first round warms up
                spent.append(time.perf_counter() - start)
    return [statistics.median(spent) for spent in seconds]


def compare(members: int, folder: Path) -> tuple[list[float], list[float]]:
    """Returns (pool, raw) seconds of a round trip and (pool, raw, memcpy) of a broadcast."""
    recipe = Recipe(steps=1, layout=Layout())
    hosts = Hosts(hosts=members, cpus=0.1)
    pool = RayPool("listeners", Listener, recipe, hosts, EventLog(folder / "events.jsonl"))
    pool.ready()
    raw_class = cast("Any", ray.remote(num_cpus=0.1)(RawListener))
    raw = [raw_class.remote() for _ in range(members)]
    numbers = list(range(members))
    trip = interleaved(
        TRIPS,
        lambda: pool.map(Listener.echo, numbers),
        lambda: ray.get([actor.echo.remote(n) for actor, n in zip(raw, numbers, strict=True)]),
    )
    array = np.random.default_rng(0).random(MEGABYTES * 125_000)

    def raw_broadcast() -> None:
        ref = ray.put(array)
        ray.get([actor.read.remote(ref) for actor in raw])

    fresh = Weights.of({"w": array}, 0)

    def pool_broadcast() -> None:
        # a new snapshot of the same buffer, so that the store is paid for each time
        pool.each(Listener.read, replace(fresh))

    cast_out = interleaved(REPEATS, pool_broadcast, raw_broadcast, array.copy)
    pool.close()
    for actor in raw:
        ray.kill(actor)
    return trip, cast_out


def main() -> None:
    """Prints the table."""
    say = sys.stdout.write
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    with tempfile.TemporaryDirectory(prefix="heliostat-") as folder:
        ray.init(address="local", num_cpus=4, _temp_dir=folder, logging_level="ERROR")
        say(f"{'members':>8}{'trip ms':>9}{'raw ms':>8}{'ratio':>7}")
        say(f"{'100 MB ms':>11}{'raw ms':>8}{'ratio':>7}{'memcpys':>9}\n")
        for members in (1, 2, 4, 8):
            (ours, raw), (broadcast, raw_broadcast, memcpy) = compare(members, Path(folder))
            say(f"{members:>8}{ours * 1e3:>9.2f}{raw * 1e3:>8.2f}{ours / raw:>7.2f}")
            say(f"{broadcast * 1e3:>11.1f}{raw_broadcast * 1e3:>8.1f}")
            say(f"{broadcast / raw_broadcast:>7.2f}{broadcast / memcpy:>9.1f}\n")
        ray.shutdown()


if __name__ == "__main__":
    main()
