"""A method and an environment with faults of their own."""

from __future__ import annotations

from typing import Any

from toy_package.workload import ToyRecipe

from heliostat import Run


def broken(run: Run[ToyRecipe]) -> dict[str, float]:
    raise ValueError(f"the method's own mistake at seed {run.recipe.seed}")


def shaky(steps: int) -> Any:
    """An environment that raises after some steps."""
    import gymnasium

    class Shaky(gymnasium.Wrapper):
        left = steps

        def step(self, action: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                raise ArithmeticError("the pole broke")
            return super().step(action)

    return Shaky(gymnasium.make("CartPole-v1"))
