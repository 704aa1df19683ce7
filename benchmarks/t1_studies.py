"""T1's studies: what each choice of the method does, over seeds, with 95 % intervals.

``python -m benchmarks.t1_studies samples penalties temperature thinking`` trains what they need in
a folder of runs and writes a figure, a JSON of numbers and a table for each. All arms of a seed
begin from one supervised checkpoint and take ``UPDATES`` updates; only what an arm names differs.
Arms that are done are not done again: a study that was stopped goes on where it was.

Accuracy is that on held-out test prompts at temperature 1, after the last update; nothing is chosen
by it. An interval is Student's t over the seeds' differences to the arm it is compared with.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from algorithms.t1.probe import Policy, thinking_curve
from algorithms.t1.workload import WORKLOAD, T1Recipe
from benchmarks.t1_tables import FIGURES, format_table
from heliostat import Layout
from heliostat.folder import RunFolder
from heliostat.launch import Order, create, resume

UPDATES = 40
FRACTIONS = (0.0, 0.3, 0.6, 1.0)
"""Of reinforcement learning, at which ``thinking`` measures a policy."""
BUDGETS = (0, 4, 9, 13, 18, 22, 27, 31, 36)
"""Tokens of thought: whole tries and halves of them."""
_SHORT, _LONG = 28, 37
"""Limits of an answer in tokens: three tries and an end; four, the longest supervised trace."""

Change = dict[str, Any]
ARMS: dict[str, Change] = {
    "base": {},
    "k4": {"answers_per_prompt": 4},
    "k64": {"answers_per_prompt": 64},
    "k4-equal": {"answers_per_prompt": 4, "prompts_per_step": 64},
    "k64-equal": {"answers_per_prompt": 64, "prompts_per_step": 4},
    "t07": {"temperature": 0.7},
    "t12": {"temperature": 1.2},
    "t15": {"temperature": 1.5},
    "short-penalty": {"penalise": ("overlong",)},
    "long": {"max_new_tokens": _LONG, "checkpoint_every": 4, "keep_checkpoints": 99},
    "long-penalty": {"max_new_tokens": _LONG, "penalise": ("overlong",)},
}
"""Name -> what differs from ``base``: K = 16, 16 prompts, temperature 1, at most 28 tokens."""
STUDIES: dict[str, tuple[str, ...]] = {
    "samples": ("k4", "base", "k64", "k4-equal", "k64-equal"),
    "penalties": ("base", "short-penalty", "long", "long-penalty"),
    "temperature": ("t07", "base", "t12", "t15"),
    "thinking": ("long",),
}
_ORDER = ("k64", "long", "long-penalty")
"""Arms that take longest begin first."""


@dataclass(frozen=True, slots=True)
class Size:
    """How large a study is; the default is what the figures were made with."""

    sft_steps: int = 700
    updates: int = UPDATES
    prompts: int = 512

    @classmethod
    def tiny(cls) -> Size:
        """Seconds: proves that everything runs, shows nothing."""
        return cls(sft_steps=20, updates=10, prompts=16)


def recipe_of(arm: str, seed: int, size: Size) -> T1Recipe:
    """Returns an arm's recipe; ``trunk`` is the supervised training that all arms share."""
    recipe = replace(
        cast("T1Recipe", WORKLOAD.recipe("laptop")),
        layout=Layout.in_process(),
        seed=seed,
        sft_steps=size.sft_steps,
        steps=0 if arm == "trunk" else size.updates,
        checkpoint_every=size.sft_steps if arm == "trunk" else 10**6,
        answers_per_prompt=16,
        prompts_per_step=16,
        max_new_tokens=_SHORT,
        test_prompts=16 if arm == "trunk" else size.prompts,
    )
    return recipe if arm == "trunk" else replace(recipe, **ARMS[arm])


def train(arm: str, seed: int, runs: Path, size: Size) -> dict[str, float]:
    """Trains one arm to its end, from where it was; returns its final metrics and CPU seconds."""
    folder = RunFolder(runs / f"{arm}-{seed}")
    cost = folder.path / "cpu_s.json"
    if not cost.exists():
        trunk = RunFolder(runs / f"trunk-{seed}")
        order = Order(
            workload=WORKLOAD,
            spec="t1",
            recipe=recipe_of(arm, seed, size),
            folder=folder,
            begin_from=None if arm == "trunk" else (trunk, size.sft_steps),
        )
        begun = time.process_time()
        if not folder.result.exists():
            (resume if folder.record.exists() else create)(order)
        cost.write_text(json.dumps(time.process_time() - begun))
    metrics = json.loads(folder.result.read_text())
    return {**metrics, "cpu_s": json.loads(cost.read_text())}


def think(seed: int, runs: Path, size: Size) -> dict[str, list[dict[str, Any]]]:
    """Measures accuracy over budgets of thought at each fraction of the ``long`` arm."""
    folder = RunFolder(runs / f"long-{seed}")
    summariser = Policy.of(folder, size.sft_steps)
    found: dict[str, list[dict[str, Any]]] = {}
    for fraction in FRACTIONS:
        policy = Policy.of(folder, size.sft_steps + round(fraction * size.updates))
        curve = thinking_curve(policy, summariser, BUDGETS, size.prompts, copies=4)
        points = (*curve.points, curve.whole, curve.greedy)
        found[str(fraction)] = [asdict(point) for point in points]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains, measures, and writes what the studies show."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("studies", nargs="*", help="all by default")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, default=Path("runs") / "t1-studies")
    parser.add_argument("--out", type=Path, help="folder of the results; that of the runs if none")
    parser.add_argument("--at-once", type=int, default=2, help="runs at a time, one core each")
    parser.add_argument("--tiny", action="store_true", help="prove that it runs, in a minute")
    options = parser.parse_args(arguments)
    runs, size = options.runs.resolve(), Size.tiny() if options.tiny else Size()
    out: Path = (options.out or runs).resolve()
    out.mkdir(parents=True, exist_ok=True)
    seeds = range(options.seeds)
    for study in options.studies or STUDIES:
        table = conduct(study, seeds, runs, size, options.at_once)
        (out / f"{study}.json").write_text(json.dumps(table, indent=1) + "\n")
        FIGURES[study](table).savefig(out / f"{study}.png", dpi=150)
        sys.stdout.write(f"{format_table(study, table)}\n\n{out / study}.png\n\n")
    return 0


def conduct(
    study: str, seeds: Sequence[int], runs: Path, size: Size, at_once: int
) -> dict[str, Any]:
    """Trains what a study needs and returns its numbers, one list over seeds each."""
    start = time.monotonic()
    arms = sorted(STUDIES[study], key=lambda arm: _ORDER.index(arm) if arm in _ORDER else 99)
    _each(train, [("trunk", seed, runs, size) for seed in seeds], at_once)
    jobs = [(arm, seed, runs, size) for arm in arms for seed in seeds]
    done = dict(zip([job[:2] for job in jobs], _each(train, jobs, at_once), strict=True))
    table: dict[str, Any] = {
        "seeds": list(seeds),
        "updates": size.updates,
        "prompts": size.prompts,
        "commit": _commit(),
        "arms": {
            arm: {name: [done[arm, seed][name] for seed in seeds] for name in done[arm, seeds[0]]}
            for arm in STUDIES[study]
        },
    }
    if study == "thinking":
        table["curves"] = _each(think, [(seed, runs, size) for seed in seeds], at_once)
    table["wall_s"] = round(time.monotonic() - start)
    return table


def _each(function: Callable[..., Any], jobs: Sequence[tuple[Any, ...]], at_once: int) -> list[Any]:
    """Calls the function once a job, each in a process with one thread, a few at a time."""
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(at_once, mp_context=context) as processes:
        futures = [processes.submit(function, *job) for job in jobs]
        answers: list[Any] = []
        for job, future in zip(jobs, futures, strict=True):
            answers.append(future.result())
            sys.stderr.write(f"{len(answers)}/{len(jobs)} {function.__name__} {job[0]}\n")
        return answers


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    home = Path(__file__).parent
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=home)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
