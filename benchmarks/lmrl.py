"""The table of LMRL-Gym on CPU: six methods, a small model from scratch, and less data.

``python -m benchmarks.lmrl FOLDER --games maze_fo wordle --seeds 0`` trains what the folder lacks,
one run after another in this process, and prints the table in markdown; ``--readme`` also writes
it, and ``table.json`` beside it, into the method's folder. Methods of one seed share their steps
of imitation, but for filtered BC, which imitates fewer episodes. The paper's column is quoted from
its table 2 (GPT-2 small, all data); ours tells what a model of a hundredth of that size shows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from algorithms.lmrl.workload import WORKLOAD, LmrlRecipe
from heliostat import launch
from heliostat.folder import RunFolder
from heliostat.launch import Order

METHODS = ("bc", "filtered_bc", "mc", "ilql", "ppo", "online_filtered_bc")
PAPER: Mapping[str, Sequence[float]] = {
    "maze_fo": (58.2, 68.9, 75.0, 99.9, 79.7, 57.4),
    "maze_po": (53.1, 50.1, 52.4, 76.3, 42.4, 53.1),
    "wordle": (79.9, 79.1, 94.9, 97.7, 84.2, 95.2),
}
"""Normalised scores of table 2, in the order of ``METHODS``."""
_MAZE = {
    "mc": "steps=400 beta=2 lr=1e-3 polyak=0.05",
    "ppo": "steps=60 lr=1e-3",
    "online_filtered_bc": "steps=60 lr=1e-3",
}
_WORDLE = {
    "ppo": "bc_steps=400 steps=20",
    "online_filtered_bc": "bc_steps=400 steps=20",
    **dict.fromkeys(("bc", "filtered_bc", "mc", "ilql"), "bc_steps=400 steps=150"),
}
GAMES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "maze_fo": ("maze", _MAZE),
    "maze_po": ("maze-po", _MAZE),
    "wordle": ("wordle", _WORDLE),
}
"""Game -> recipe, and what each method changes in it."""
README = Path(__file__).parents[1] / "algorithms" / "lmrl" / "README.md"
MARKS = ("<!-- table -->\n", "<!-- end of table -->\n")


def recipe_of(game: str, method: str, seed: int) -> LmrlRecipe:
    """Returns the recipe of one cell."""
    name, changes = GAMES[game]
    overrides = changes.get(method, "").split()
    settings = ("layout=in_process", f"method={method}", f"seed={seed}", "keep_checkpoints=50")
    recipe = WORKLOAD.recipe(name).override(*settings, *overrides)
    assert isinstance(recipe, LmrlRecipe)
    return recipe


def train(game: str, method: str, seed: int, folder: Path) -> dict[str, Any]:
    """Trains one cell, unless its result lies in the folder already."""
    place = folder / f"{game}-{method}-{seed}"
    done = folder / f"{place.name}.json"
    if done.exists():
        return json.loads(done.read_text())
    recipe = recipe_of(game, method, seed)
    trunk = folder / f"{game}-bc-{seed}"
    branches = method not in ("bc", "filtered_bc")
    began, spent = time.perf_counter(), time.process_time()
    outcome = launch.create(
        Order(
            workload=WORKLOAD,
            spec="lmrl",
            recipe=recipe,
            folder=RunFolder(place),
            begin_from=(RunFolder(trunk), recipe.bc_steps) if branches else None,
        )
    )
    found = {
        "game": game,
        "method": method,
        "seed": seed,
        "steps": recipe.steps,
        "wall_s": round(time.perf_counter() - began, 1),
        "cpu_s": round(time.process_time() - spent, 1),
        **{name: round(value, 3) for name, value in outcome.metrics.items()},
    }
    done.write_text(json.dumps(found, indent=1))
    return found


def table(cells: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table in markdown: mean (smallest to largest of several seeds)."""
    lines = [
        "| game | method | score | paper's | raw return | success | seeds | CPU s a seed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for game, paper in PAPER.items():
        for method, quoted in zip(METHODS, paper, strict=True):
            mine = [c for c in cells if (c["game"], c["method"]) == (game, method)]
            if not mine:
                continue
            lines.append(
                f"| {game} | {method} | {_spread(mine, 'score', 1)} | {quoted} "
                f"| {_spread(mine, 'return', 2)} | {_spread(mine, 'success', 2)} | {len(mine)} "
                f"| {statistics.mean(c['cpu_s'] for c in mine):.0f} |"
            )
    return "\n".join(lines) + "\n"


def _spread(cells: Sequence[Mapping[str, Any]], name: str, digits: int) -> str:
    values = [cell[name] for cell in cells]
    mean = f"{statistics.mean(values):.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main() -> None:
    """Trains what is missing and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--games", nargs="+", default=["maze_fo", "wordle"], choices=list(GAMES))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--readme", action="store_true", help="write the table into the README")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    asked.folder.mkdir(parents=True, exist_ok=True)
    for seed in asked.seeds:
        for game in asked.games:
            for method in asked.methods:
                found = train(game, method, seed, asked.folder)
                sys.stderr.write(f"{found}\n")
    files = sorted(asked.folder.glob("*.json"))
    cells = [json.loads(file.read_text()) for file in files]
    text = table(cells)
    sys.stdout.write(text)
    if asked.readme:
        README.with_name("table.json").write_text(json.dumps(cells, indent=1) + "\n")
        before, rest = README.read_text().split(MARKS[0])
        README.write_text(f"{before}{MARKS[0]}{text}{MARKS[1]}{rest.split(MARKS[1])[1]}")


if __name__ == "__main__":
    main()
