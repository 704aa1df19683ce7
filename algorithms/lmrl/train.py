"""LMRL-Gym (arXiv 2311.18232): imitation, then one of six ways to learn a text game."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from algorithms.lmrl.evaluate import Examiner
from algorithms.lmrl.games import make_game
from algorithms.lmrl.learning import Learning
from algorithms.lmrl.roles import Trajectories
from algorithms.lmrl.rollouts import play
from algorithms.lmrl.rows import Rows
from algorithms.lmrl.updates import imitation_step, online_imitation_step, ppo_step, value_step
from algorithms.lmrl.workload import LmrlRecipe
from heliostat import Run
from heliostat.actors.data import Stream


def train(run: Run[LmrlRecipe]) -> Mapping[str, float]:
    """Trains one player and returns its scores after imitation (``bc_``) and at the end."""
    recipe = run.recipe
    models = Learning(run, len(make_game(recipe).words))
    data = Stream[Rows](run.pool(Trajectories), Trajectories, run.seed("data"))
    examiner = Examiner(run)
    step = 0

    def state() -> dict[str, Any]:
        examiner.collect(wait=True)
        return {
            "step": step,
            "models": models.state(step),
            "data": data.state(),
            "scores": examiner.scores,
        }

    if saved := run.restore():
        step = saved["step"]
        models.load(saved["models"])
        data.load(saved["data"])
        examiner.scores = saved["scores"]

    def chunks() -> list[Rows]:
        return data.next(recipe.batch)[run.rank :: run.world]

    while step < recipe.total_steps:
        if step == recipe.bc_steps:
            examiner.test(models.weights(step), "bc_")
            models.begin()
        own = step - recipe.bc_steps
        rate = min(1.0, ((own if own >= 0 else step) + 1) / recipe.warm_steps)
        if own < 0 or recipe.method in ("bc", "filtered_bc"):
            metrics = imitation_step(run, models, chunks(), 1.0 if own >= 0 else rate)
        elif recipe.extracts:
            metrics = value_step(run, models, chunks(), rate)
        elif recipe.method == "ppo":
            played, metrics = play(run, models.weights(step), step)
            imitated = chunks() if recipe.bc_weight > 0 else []
            metrics |= ppo_step(run, models, played, imitated, rate)
        else:
            played, metrics = play(run, models.weights(step), step)
            metrics |= online_imitation_step(run, models, played, rate)
        step += 1
        if step % recipe.eval_every == 0:
            examiner.validate(models.weights(step))
        run.report(step, metrics, state)

    examiner.collect(wait=True)
    examiner.test(models.weights(step), "")
    return examiner.scores
