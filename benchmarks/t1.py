"""T1 against TRL's GRPOTrainer: the same model, prompts, answers and cores, in one run.

``python -m benchmarks.t1`` prints one table. Each size of model is taught the task for a moment, so
that answers end when answers end; then both sides take turns training on it at a rate of next to
nothing, so that the answers stay as long as they are. TRL runs in an environment of its own, with
one and with two threads, and the better one counts. Only the ratios travel.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from algorithms.t1.model import TokenScorer
from algorithms.t1.tasks import make_policy, make_task
from algorithms.t1.workload import WORKLOAD, T1Recipe
from benchmarks.peers import ROOT, peer_python
from heliostat import checkpoint
from heliostat.folder import RunFolder
from heliostat.launch import Order, create
from heliostat.learner import load_full_state
from heliostat.ray_session import ray_session
from heliostat.tracker import read_metrics

SIZES = {
    "0.34M": ("hidden=96", "layers=3", "feed_forward=256"),
    "1.8M": ("hidden=192", "layers=4", "feed_forward=512"),
    "6.2M": ("hidden=320", "layers=5", "feed_forward=864"),
}
"""Parameters -> what makes them; the first is the demonstration's."""
TRL = ("trl==1.16.0", "torch", "transformers", "accelerate", "datasets==5.2.0")
_WARM_UP = 3


def main() -> int:
    """Trains both sides and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--steps", type=int, default=12, help="of each turn")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each side")
    options = parser.parse_args()
    trl = peer_python("trl", *TRL)
    _say("model", "KL", "heliostat samples/s", "TRL samples/s", "ratio", "TRL rollout share")
    _say(*["---"] * 6)
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as folder, ray_session(None, lambda _: None):
            _compare(size, Path(folder), trl, options.steps, options.rounds)
    return 0


def _compare(size: str, folder: Path, trl: Path, steps: int, rounds: int) -> None:
    taught = _recipe(size, steps=0, beta=0.0)
    create(Order(workload=WORKLOAD, spec="t1", recipe=taught, folder=RunFolder(folder / "taught")))
    model = _export(taught, folder)
    for beta in (0.0, 2e-4):
        ours: list[float] = []
        theirs: dict[int, list[float]] = {1: [], 2: []}
        share: list[float] = []
        for turn in range(rounds):
            ours += _ours(folder, _recipe(size, steps=steps, beta=beta), f"ours-{beta}-{turn}")
            for threads in theirs:
                told = _theirs(trl, folder, model, replace(taught, steps=steps, beta=beta), threads)
                theirs[threads] += told["steps_s"][_WARM_UP:]
                share.append(sum(told["rollouts_s"]) / sum(told["steps_s"]))
        samples = taught.prompts_per_step * taught.answers_per_prompt
        mine = samples / statistics.median(ours)
        peer = samples / min(statistics.median(seconds) for seconds in theirs.values())
        ratio = f"{mine / peer:.2f}"
        kl = "yes" if beta else "no"
        _say(size, kl, f"{mine:.0f}", f"{peer:.0f}", ratio, f"{statistics.mean(share):.0%}")


def _say(*cells: str) -> None:
    sys.stdout.write(f"| {' | '.join(cells)} |\n")
    sys.stdout.flush()


def _recipe(size: str, steps: int, beta: float) -> T1Recipe:
    recipe = cast("T1Recipe", WORKLOAD.recipe("laptop")).override(
        *SIZES[size],
        "optimizer=adamw",
        "sft_lr=2e-3",
        "sft_steps=200",
        "lr=1e-9",
        "drop_flat_groups=false",
        "eval_every=1000000",
        "test_prompts=8",
        "test_answers=1",
        "checkpoint_every=1000000",
    )
    layout = replace(recipe.layout, learner_cpus=0.5)
    return replace(recipe, steps=steps, beta=beta, layout=layout)


def _export(recipe: T1Recipe, folder: Path) -> Path:
    """Writes what the supervised steps made as transformers would."""
    found = checkpoint.latest(RunFolder(folder / "taught").checkpoints)
    assert found is not None, "a run that ends leaves a checkpoint"
    scorer = TokenScorer(make_policy(recipe, make_task(recipe)))
    load_full_state(scorer, cast("Any", found[1])["policy"]["model"])
    scorer.policy.save_pretrained(folder / "model")
    return folder / "model"


def _ours(folder: Path, recipe: T1Recipe, name: str) -> list[float]:
    begin = (RunFolder(folder / "taught"), None)
    run = RunFolder(folder / name)
    create(Order(workload=WORKLOAD, spec="t1", recipe=recipe, folder=run, begin_from=begin))
    rows = [row["perf/step_s"] for row in read_metrics(run.path) if "perf/step_s" in row]
    return cast("list[float]", rows[_WARM_UP:])


def _theirs(
    trl: Path, folder: Path, model: Path, recipe: T1Recipe, threads: int
) -> dict[str, list[float]]:
    told = {
        "model": str(model),
        "output": str(folder / "trl"),
        "prompts": recipe.prompts_per_step,
        "answers": recipe.answers_per_prompt,
        "max_new_tokens": recipe.max_new_tokens,
        "steps": recipe.steps,
        "beta": recipe.beta,
        "threads": threads,
    }
    command: Sequence[str] = (str(trl), str(ROOT / "benchmarks" / "trl_grpo.py"), json.dumps(told))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    answer = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(answer.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
