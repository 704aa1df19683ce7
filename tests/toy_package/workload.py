"""A workload as a user would write one: least squares, with an actor of every family."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from annotated_types import Gt

from heliostat import Layout, Member, Recipe, Run, Weights, Workload, idempotent
from heliostat.actors.data import Reader, Stream, share
from heliostat.seeding import numpy_generator, torch_generator


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyRecipe(Recipe):
    lr: Annotated[float, Gt(0)] = 0.1
    batch: int = 8
    pause_s: float = 0.0  # inside every environment call, so that tests can kill in one


class Rows(Reader[np.ndarray]):
    def __init__(self, recipe: ToyRecipe, member: Member) -> None:
        rows = numpy_generator(recipe.seed, "rows").normal(size=(64, 3)).astype(np.float32)
        super().__init__([rows[index] for index in share(len(rows), member)])


class Targets:
    family = "environment"

    def __init__(self, recipe: ToyRecipe, member: Member) -> None:
        self._recipe = recipe

    @idempotent
    def answer(self, rows: np.ndarray, weights: Weights) -> tuple[int, np.ndarray]:
        time.sleep(self._recipe.pause_s)
        return weights.version, rows @ np.array([1.0, -2.0, 0.5], np.float32)


class Judge:
    family = "evaluation"

    def __init__(self, recipe: ToyRecipe, member: Member) -> None:
        pass

    @idempotent
    def score(self, weights: Weights) -> float:
        (_, found), *_ = weights.arrays()
        return float(-np.abs(found - np.array([[1.0, -2.0, 0.5]])).max())


def train(run: Run[ToyRecipe]) -> Mapping[str, float]:
    recipe = run.recipe
    model = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.normal_(model.weight, generator=torch_generator(recipe.seed, "model"))
    learner = run.learner(model, lambda m: torch.optim.AdamW(m.parameters(), lr=recipe.lr))
    rows = Stream(run.pool(Rows), Rows, run.seed("rows"))
    step = 0
    if state := run.restore():
        learner.load(state["learner"])
        rows.load(state["rows"])
        step = state["step"]
    while step < recipe.steps:
        weights = learner.weights(step)
        batch = np.stack(rows.next(recipe.batch))[run.rank :: run.world]
        halves = run.pool(Targets).map(Targets.answer, np.array_split(batch, 2), weights)
        targets = torch.from_numpy(np.concatenate([part for _, part in halves]))
        predicted = learner.forward(torch.from_numpy(batch)).squeeze(1)
        loss = (predicted - targets).square().mean()
        learner.backward(loss)
        learner.step(max_norm=1.0)
        step += 1
        run.report(
            step,
            {"train/loss": float(loss.detach()), "train/fit": -float(loss.detach())},
            lambda at=step: {"learner": learner.state(), "rows": rows.state(), "step": at},
        )
    weights = learner.weights(step)
    (score,) = run.pool(Judge).each(Judge.score, weights)
    return {"score": score, "weight": float(model.weight.detach().double().sum())}


ROLES = {"rows": "Rows", "targets": "Targets", "judge": "Judge"}
WORKLOAD = Workload(
    name="toy",
    summary="Least squares by stochastic gradients.",
    paper="none",
    recipes={
        "default": ToyRecipe(steps=30, checkpoint_every=10),
        "laptop": ToyRecipe(steps=30, checkpoint_every=10, layout=Layout.laptop()),
    },
    train=f"{__name__}:train",
    roles={name: f"{__name__}:{role}" for name, role in ROLES.items()},
    score="train/fit",
)
