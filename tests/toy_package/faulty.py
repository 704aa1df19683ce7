"""A method with a fault of its own."""

from __future__ import annotations

from toy_package.workload import ToyRecipe

from heliostat import Run


def broken(run: Run[ToyRecipe]) -> dict[str, float]:
    raise ValueError(f"the method's own mistake at seed {run.recipe.seed}")
