"""Ranks of ``test_t1_learners``: each trains T1 under one layout after the other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from learner_ranks import LAYOUTS
from torch import distributed

from algorithms.t1.train import train
from algorithms.t1.workload import WORKLOAD, T1Recipe
from heliostat.folder import RunFolder
from heliostat.run import Assignment, Run
from heliostat.tracker import JsonlTracker
from heliostat.views import Silent

TINY = replace(
    WORKLOAD.recipe("smoke"),
    hidden=32,
    layers=2,
    feed_forward=32,
    optimizer="adamw",
    sft_steps=4,
    sft_warm_steps=1,
    sft_batch=8,
    sft_lr=3e-3,
    steps=3,
    prompts_per_step=4,
    prompts_per_job=2,
    answers_per_prompt=3,
    max_new_tokens=12,
    beta=0.1,
    anchor_decay=0.5,
    drop_flat_groups=False,
    tokens_per_pass=60,
    checkpoint_every=100,
    eval_every=100,
    test_prompts=4,
    test_answers=1,
)


def recipe(name: str) -> T1Recipe:
    """Returns the recipe of a layout; ``lora-`` before its name trains adapters."""
    layout = LAYOUTS[name.removeprefix("lora-")]
    return replace(TINY, layout=layout, lora_rank=4 if name.startswith("lora-") else 0)


def start(names: Sequence[str], folder: Path) -> None:
    """Trains with each layout on two ranks, in ``folder/NAME``."""
    command = [sys.executable, __file__, str(folder), *names]
    ranks = [subprocess.Popen([*command, str(rank)], cwd=folder) for rank in range(2)]
    assert [rank.wait(timeout=550) for rank in ranks] == [0, 0]


def main() -> None:
    folder, *names, number = sys.argv[1:]
    rank = int(number)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2
    )
    for name in names:
        run_folder = RunFolder(Path(folder) / name)
        run_folder.path.mkdir(exist_ok=True)
        if rank == 0:
            run_folder.attempt.write_text("1")
        distributed.barrier()
        tracker = JsonlTracker(run_folder.path) if rank == 0 else Silent()
        train(Run(Assignment(WORKLOAD, recipe(name), run_folder, 1, {}), tracker, rank, 2))
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
