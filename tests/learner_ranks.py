"""A rank of ``test_learner``: trains a small model on its share and writes what it got."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from heliostat import checkpoint
from heliostat.layout import Layout
from heliostat.learner import Learner, full_state

STEPS, BATCH, SWITCH = 6, 8, 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x).squeeze(-1)


def learner(layout: Layout, world: int) -> Learner[Net]:
    torch.manual_seed(0)
    return Learner(Net(), optimizers, layout, torch.device("cpu"), world)


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    heads = [p for name, p in model.named_parameters() if "head" in name]
    rest = [p for name, p in model.named_parameters() if "head" not in name]
    return [torch.optim.AdamW(rest, lr=0.05), torch.optim.SGD(heads, lr=0.05, momentum=0.9)]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(step))
    return rows, rows.sum(dim=1)


def train(layout: Layout, rank: int, world: int, folder: Path | None) -> dict[str, Any]:
    """Trains ``STEPS`` steps; half way it saves and goes on in a new learner that loads."""
    made = learner(layout, world)
    norms: list[float] = []
    for step in range(STEPS):
        if step == SWITCH and folder is not None:
            state = made.state()
            if rank == 0:
                checkpoint.save(folder, step, state)
            if world > 1:
                distributed.barrier()
            made = learner(layout, world)
            found = checkpoint.latest(folder)
            assert found is not None
            made.load(found[1])
        rows, targets = (part[rank::world] for part in batch(step))
        for half in (slice(0, None, 2), slice(1, None, 2)):  # two micro-batches
            errors = (made.forward(rows[half]) - targets[half]).square()
            made.backward(errors.sum() / len(rows))
        norms.append(made.step(rate=1 - step / 10, max_norm=1.0))
    weights = {name: torch.from_numpy(a.copy()) for name, a in made.weights(STEPS).arrays()}
    return {"weights": weights, "norms": norms, "full": full_state(made.model)}


def main() -> None:
    rank, world, parallelism, address, folder = sys.argv[1:]
    distributed.init_process_group(
        "gloo", init_method=address, rank=int(rank), world_size=int(world)
    )
    layout = Layout(learners=int(world), parallelism=parallelism)  # type: ignore[arg-type]
    result = train(layout, int(rank), int(world), Path(folder) / "checkpoints")
    torch.save(result, Path(folder) / f"rank-{rank}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
