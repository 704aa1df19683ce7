"""What the platform costs RLlib: training steps through ``heliostat run`` and by a bare script.

``python -m benchmarks.rllib`` prints one table. Both sides have the same configuration and take
turns, one iteration each, so that a machine that slows down slows both; only the ratios travel.
Evaluations and checkpoints are left out, since a script has them or not.
"""

from __future__ import annotations

import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray

from algorithms.rllib.config import configure
from algorithms.rllib.workload import WORKLOAD, RllibRecipe
from heliostat import launch
from heliostat.folder import RunFolder
from heliostat.launch import Order

CASES = {
    "ppo CartPole-v1": ("ppo", "steps=40"),
    "sac Pendulum-v1": ("sac", "steps=40", "training.num_steps_sampled_before_learning_starts=50"),
}
"""Name -> recipe and what is changed in it."""
WARM_UP = 5
"""Iterations of each side that do not count."""


def seconds(name: str, *overrides: str, folder: Path) -> tuple[list[float], list[float]]:
    """Returns the seconds of each iteration: through the platform, and bare."""
    alone = ("checkpoint_every=1000000", "eval_every=1000000", "eval_episodes=1", "eval_longest=1")
    recipe = WORKLOAD.recipe(name).override(*overrides, *alone, "target=null", "draw=false")
    assert isinstance(recipe, RllibRecipe)
    bare = configure(recipe, seed=0).build_algo()
    spent: tuple[list[float], list[float]] = ([], [])
    began = time.perf_counter()

    def take_turns(step: int, _: Mapping[str, float]) -> None:
        nonlocal began
        now = time.perf_counter()
        if step < recipe.steps:  # the last one is evaluated and saved
            spent[0].append(now - began)
            bare.train()
            spent[1].append(time.perf_counter() - now)
        began = time.perf_counter()

    order = Order(
        workload=WORKLOAD,
        spec="rllib",
        recipe=recipe,
        folder=RunFolder(folder / name),
        listen=take_turns,
    )
    launch.create(order)
    bare.stop()
    return spent[0][WARM_UP:], spent[1][WARM_UP:]


def main() -> None:
    """Prints the table."""
    say = sys.stdout.write
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    settings: dict[str, Any] = {"address": "local", "num_cpus": 4, "logging_level": "ERROR"}
    with tempfile.TemporaryDirectory(prefix="heliostat-") as folder:
        ray.init(**settings, _temp_dir=folder)
        say(f"{'':<18}{'ms an iteration':>16}{'bare':>8}{'ratio':>7}\n")
        for title, (name, *overrides) in CASES.items():
            ours, bare = seconds(name, *overrides, folder=Path(folder))
            mine, theirs = statistics.median(ours), statistics.median(bare)
            say(f"{title:<18}{mine * 1e3:>16.1f}{theirs * 1e3:>8.1f}{mine / theirs:>7.3f}\n")
        ray.shutdown()


if __name__ == "__main__":
    main()
