"""Ranks of ``test_learner``: each trains a small model on its share and writes what it got."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from heliostat import checkpoint
from heliostat.layout import Layout
from heliostat.learner import Learner, full_state

STEPS, BATCH, SWITCH = 6, 8, 3
DDP = Layout(learners=2, parallelism="ddp")
FSDP = Layout(learners=2, parallelism="fsdp")
ZERO = Layout(learners=2, parallelism="deepspeed")
LAYOUTS = {
    "ddp": DDP,
    "fsdp": FSDP,
    "fsdp-checkpointing": replace(FSDP, activation_checkpointing=True),
    "zero1": replace(ZERO, zero_stage=1),
    "zero2": replace(ZERO, zero_stage=2),
    "zero3": replace(ZERO, zero_stage=3),
    "zero3-checkpointing": replace(ZERO, zero_stage=3, activation_checkpointing=True),
    "zero2-bfloat16": replace(ZERO, zero_stage=2, precision="bfloat16"),
}


class Net(nn.Module):
    """Two blocks and a head; 320 is just wide enough for DeepSpeed to shard a block's weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, width), nn.Linear(width, width)])
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x).squeeze(-1)


def learner(layout: Layout, world: int) -> Learner[Net]:
    torch.manual_seed(0)
    if layout.parallelism != "deepspeed":
        return Learner(Net(4), optimizers, layout, torch.device("cpu"), world)
    kind = Learner[Net]
    if world > 1:
        from heliostat.deepspeed_learner import DeepSpeedLearner

        kind = DeepSpeedLearner[Net]
    return kind(Net(320), one_optimizer, layout, torch.device("cpu"), world)


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    heads = [p for name, p in model.named_parameters() if "head" in name]
    rest = [p for name, p in model.named_parameters() if "head" not in name]
    return [torch.optim.AdamW(rest, lr=0.05), torch.optim.SGD(heads, lr=0.05, momentum=0.9)]


def one_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(step))
    return rows, rows.sum(dim=1)


def train(
    layout: Layout,
    rank: int = 0,
    world: int = 1,
    folder: Path | None = None,
    begin: Path | None = None,
) -> dict[str, Any]:
    """Trains ``STEPS`` steps.

    Args:
        layout: how.
        rank: this process.
        world: how many there are.
        folder: where to save half way, to go on in a new learner that loads.
        begin: where to find what was saved half way, to take only the steps behind.
    """
    made = learner(layout, world)
    losses: list[float] = []
    norms: list[float] = []
    for step in range(SWITCH if begin else 0, STEPS):
        if step == SWITCH and (folder or begin):
            if folder is not None:
                state = made.state()
                if rank == 0:
                    checkpoint.save(folder, step, state)
                if world > 1:
                    distributed.barrier()
                made = learner(layout, world)
            found = checkpoint.latest(folder or begin)
            assert found is not None
            made.load(found[1])
        rows, targets = (part[rank::world] for part in batch(step))
        loss = torch.zeros(())
        for half in (slice(0, None, 2), slice(1, None, 2)):  # two micro-batches
            with made.autocast():
                errors = (made.forward(rows[half]).float() - targets[half]).square()
            part = errors.sum() / len(rows)
            made.backward(part)
            loss += part.detach()
        norms.append(made.step(rate=1 - step / 10, max_norm=1.0))
        if world > 1:
            distributed.all_reduce(loss)
        losses.append(float(loss) / world)
    weights = {name: torch.from_numpy(a.copy()) for name, a in made.weights(STEPS).arrays()}
    full = {} if layout.parallelism == "deepspeed" else full_state(made.model)
    held = sum(weight.numel() for weight in made.model.parameters())
    return {"weights": weights, "norms": norms, "losses": losses, "full": full, "held": held}


def start(names: Sequence[str], folder: Path) -> None:
    """Trains each layout on two ranks: saving half way, and from ``folder/half-NAME`` if any."""
    command = [sys.executable, __file__, str(folder), *names]
    ranks = [subprocess.Popen([*command, str(rank)], cwd=folder) for rank in range(2)]
    assert [rank.wait(timeout=550) for rank in ranks] == [0, 0]


def main() -> None:
    folder, *names, rank = sys.argv[1:]
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=int(rank), world_size=2
    )
    for name in names:
        place = Path(folder) / name
        result = train(LAYOUTS[name], int(rank), 2, folder=place / "checkpoints")
        if (place / "half").exists():
            result["resumed"] = train(LAYOUTS[name], int(rank), 2, begin=place / "half")
        place.mkdir(exist_ok=True)
        torch.save(result, place / f"rank-{rank}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
