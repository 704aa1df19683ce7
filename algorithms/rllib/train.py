"""Any of RLlib's algorithms: train for an iteration, evaluate with fixed seeds, report."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from algorithms.rllib.config import configure, make
from algorithms.rllib.evaluate import draw, scores
from algorithms.rllib.workload import RllibRecipe
from heliostat import Run
from heliostat.rllib import Algorithm


def train(run: Run[RllibRecipe]) -> Mapping[str, float]:
    """Trains until the target or the last iteration; returns the last evaluation's scores."""
    recipe = run.recipe
    seeds = range(recipe.eval_seed, recipe.eval_seed + recipe.eval_episodes)
    config = configure(recipe, run.seed("rllib") % 2**30)
    with Algorithm(config, partial(make, recipe), recipe.layout) as algorithm:
        step, final = 0, dict[str, float]()
        if saved := run.restore():
            algorithm.load(saved["algorithm"])
            step, final = saved["step"], saved["final"]

        def state() -> dict[str, Any]:
            return {"algorithm": algorithm.state(recipe.keep_replay), "step": step, "final": final}

        fresh, reached = True, False
        while step < recipe.steps and not reached:
            if fresh:  # as a run does that is resumed here
                algorithm.begin_anew(run.seed("episodes", step))
            with run.phase("train"):
                metrics = algorithm.step()
            step += 1
            if step % recipe.eval_every == 0 or step == recipe.steps:
                with run.phase("evaluate"):
                    episodes = algorithm.evaluate(seeds, recipe.eval_longest)
                final = scores(episodes)
                metrics |= final
                reached = recipe.target is not None and final["eval/return"] >= recipe.target
                if recipe.draw and (reached or step == recipe.steps):
                    draw(run, episodes[0], step)
            run.report(step, metrics, state, last=reached)
            fresh = run.due(step)
    return {**final, "steps": step}
