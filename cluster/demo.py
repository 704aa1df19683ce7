"""The demonstration behind the README's figures: does RL beat the same time of more SFT?

For each seed it trains T1's ``laptop`` recipe and its control ``more-sft``, which spends about
the time of RL on more supervised steps instead: it branches off 70 % in and follows the longer
cosine from there. Three runs at a time on one local Ray. It prints and plots accuracy on held-out
prompts, with 95 % intervals over seeds, and writes a report.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import webbrowser
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from algorithms.t1.workload import WORKLOAD, T1Recipe
from cluster.plots import plot_lines
from cluster.registry import summarise
from cluster.report import write_report
from heliostat import Hosts
from heliostat.folder import RunFolder
from heliostat.launch import Order, Outcome, create
from heliostat.ray_session import ray_session
from heliostat.tracker import read_metrics

RECIPES = ("laptop", "more-sft")
_AT_ONCE = 3
_STATUS_EVERY_S = 15.0


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds and half the width of its 95 % interval (Student's t)."""

    mean: float
    half: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Needs at least two values."""
        spread = float(np.std(values, ddof=1)) / len(values) ** 0.5
        return cls(float(np.mean(values)), float(stats.t.ppf(0.975, len(values) - 1)) * spread)

    def __str__(self) -> str:
        return f"{100 * self.mean:+.1f} ± {100 * self.half:.1f}"


def main() -> int:
    """Trains, prints the table and writes ``demo.json``, ``demo.png`` and a report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds, from --first-seed")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--runs", type=Path, help="folder of the runs")
    options = parser.parse_args()
    runs = (options.runs or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")).resolve()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    started = time.monotonic()
    outcomes: dict[tuple[str, int], Outcome] = {}
    with ray_session(None, lambda _: None):
        for name in RECIPES:
            outcomes |= _train([_order(runs, name, seed) for seed in seeds])
    table = _table(outcomes, seeds)
    runs.joinpath("demo.json").write_text(json.dumps(table, indent=2))
    _plot(outcomes, seeds).savefig(runs / "demo.png", dpi=150)
    report = write_report(RunFolder(outcomes[RECIPES[0], seeds[0]].folder))
    sys.stdout.write(f"{format_table(table)}\n\n")
    sys.stdout.write(f"{time.monotonic() - started:.0f} s; {runs / 'demo.png'}\n{report}\n")
    if os.environ.get("DISPLAY") or sys.platform == "darwin":
        webbrowser.open(report.as_uri())
    return 0


def _order(runs: Path, name: str, seed: int) -> Order:
    """Makes one run; the control branches off 70 % into the other's supervised steps."""
    recipe = replace(
        cast("T1Recipe", WORKLOAD.recipe(name)), seed=seed, checkpoint_every=70, keep_checkpoints=99
    )
    # parts of a CPU reserved: runs share the cores, one works while another waits
    layout = replace(recipe.layout, learner_cpus=0.25)
    folder = RunFolder(runs / f"{name}-{seed}")
    if name == RECIPES[0]:
        layout = replace(layout, environment=replace(layout.environment, cpus=0.25))
        return Order(
            workload=WORKLOAD, spec="t1", recipe=replace(recipe, layout=layout), folder=folder
        )
    # supervised steps need no samplers beside them
    layout = replace(layout, data=Hosts(), environment=Hosts(), evaluation=Hosts())
    trunk = _order(runs, RECIPES[0], seed)
    shared = cast("T1Recipe", trunk.recipe).sft_steps * 7 // 10
    return Order(
        workload=WORKLOAD,
        spec="t1",
        recipe=replace(recipe, layout=layout),
        folder=folder,
        begin_from=(trunk.folder, shared),
    )


def _train(orders: Sequence[Order]) -> dict[tuple[str, int], Outcome]:
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        futures = {order.folder.name: threads.submit(create, order) for order in orders}
        try:
            _watch(orders, futures)
        except BaseException:
            for order in orders:
                if order.folder.path.exists():
                    order.folder.stop.touch()
            threads.shutdown(wait=True, cancel_futures=True)
            raise
    return {
        (order.folder.name.rpartition("-")[0], order.recipe.seed): futures[
            order.folder.name
        ].result()
        for order in orders
    }


def _watch(orders: Sequence[Order], futures: Mapping[str, Future[Outcome]]) -> None:
    """Writes a line of status now and then until all runs are done or one has failed."""
    while True:
        done, waiting = wait(futures.values(), _STATUS_EVERY_S, return_when="FIRST_EXCEPTION")
        if not waiting or any(future.exception() for future in done):
            for future in done:
                future.result()
            return
        steps = [
            f"{order.folder.name} {summarise(order.folder).step}/{order.recipe.total_steps}"
            for order in orders
            if futures[order.folder.name].running()
        ]
        sys.stderr.write(f"{len(done)}/{len(orders)} runs done; {', '.join(steps)}\n")


def _table(
    outcomes: Mapping[tuple[str, int], Outcome], seeds: Sequence[int]
) -> dict[str, list[float]]:
    """Returns one list over seeds a row: accuracies before, after and of the control, and times."""
    rl, control = ([outcomes[name, seed].metrics for seed in seeds] for name in RECIPES)
    table: dict[str, list[float]] = {"seeds": [float(seed) for seed in seeds]}
    for suffix in ("", "_t05"):
        table[f"sft_accuracy{suffix}"] = [run[f"sft_accuracy{suffix}"] for run in rl]
        table[f"accuracy{suffix}"] = [run[f"accuracy{suffix}"] for run in rl]
        table[f"more_sft_accuracy{suffix}"] = [run[f"accuracy{suffix}"] for run in control]
    table["prompts"] = [run["prompts"] for run in rl]
    sft_steps = WORKLOAD.recipe(RECIPES[0]).total_steps - WORKLOAD.recipe(RECIPES[0]).steps
    for row, name in (("rl_s", RECIPES[0]), ("more_sft_s", RECIPES[1])):
        table[row] = [_seconds_after(outcomes[name, seed].folder, sft_steps) for seed in seeds]
    return table


def _seconds_after(folder: Path, step: int) -> float:
    rows = read_metrics(folder)
    return sum(float(row.get("perf/step_s", 0.0)) for row in rows if row["step"] > step)


def format_table(table: Mapping[str, Sequence[float]]) -> str:
    """Returns the table as Markdown: accuracy in per cent, gains in points with 95 % intervals."""

    def mean(row: str) -> str:
        return f"{100 * float(np.mean(table[row])):.1f}"

    def gain(after: str, before: str) -> str:
        pairs = zip(table[after], table[before], strict=True)
        return str(Interval.of([one - other for one, other in pairs]))

    lines = [
        f"| accuracy on {table['prompts'][0]:.0f} held-out prompts, mean of "
        f"{len(table['seeds'])} seeds | after SFT | + RL (T1) | + as much time of SFT "
        "| RL over SFT, points | RL over more SFT, points |",
        "|---|---|---|---|---|---|",
    ]
    for title, suffix in (("temperature 1.0", ""), ("temperature 0.5", "_t05")):
        after, before, control = (
            f"{name}{suffix}" for name in ("accuracy", "sft_accuracy", "more_sft_accuracy")
        )
        lines.append(
            f"| {title} | {mean(before)} | **{mean(after)}** | {mean(control)} "
            f"| {gain(after, before)} | {gain(after, control)} |"
        )
    rl, sft = (float(np.mean(table[row])) for row in ("rl_s", "more_sft_s"))
    lines.append(f"\nRL took {rl:.0f} s and the control's further SFT {sft:.0f} s a seed.")
    return "\n".join(lines)


def _plot(outcomes: Mapping[tuple[str, int], Outcome], seeds: Sequence[int]) -> Figure:
    series: dict[str, tuple[list[float], list[float]]] = {}
    for seed in seeds:
        folder = outcomes[RECIPES[0], seed].folder
        rows = [row for row in read_metrics(folder) if "eval/accuracy" in row]
        series[f"seed {seed}"] = (
            [float(row["step"]) for row in rows],
            [float(row["eval/accuracy"]) for row in rows],
        )
    level = float(np.mean([outcomes[RECIPES[0], seed].metrics["sft_accuracy"] for seed in seeds]))
    return plot_lines(
        series,
        title="T1 on countdown: accuracy while RL goes on",
        xlabel="step, supervised steps and updates",
        ylabel="validation accuracy, temperature 1",
        level=("after SFT", level),
    )


if __name__ == "__main__":
    sys.exit(main())
