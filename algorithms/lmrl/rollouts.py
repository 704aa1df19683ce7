"""Episodes that the policy plays for the online methods."""

from __future__ import annotations

from algorithms.lmrl.games import make_game
from algorithms.lmrl.roles import Players, best
from algorithms.lmrl.rows import Rows, recording
from algorithms.lmrl.workload import LmrlRecipe
from heliostat import Run, Weights
from heliostat.actors.environment import Job
from heliostat.seeding import numpy_generator


def play(run: Run[LmrlRecipe], weights: Weights, step: int) -> tuple[Rows, dict[str, float]]:
    """Plays this rank's share of a step's rollouts.

    Returns:
        The episodes as rows, and means over all ranks. For online filtered BC only the best
        episodes of each job count.
    """
    recipe, game = run.recipe, make_game(run.recipe)
    size = recipe.rollouts_per_job
    starts = range(0, recipe.rollouts, size)
    jobs = [
        Job(
            game.draw(
                numpy_generator(recipe.seed, "cases", step, start),
                min(size, recipe.rollouts - start),
            ),
            run.seed("rollouts", step, start),
        )
        for start in starts
    ][run.rank :: run.world]
    with run.phase("play"):
        answers = run.pool(Players).map(Players.play, jobs, weights)
    parts: list[Rows] = []
    earned = invalid = 0.0
    for episodes in answers:
        played = recording(episodes)
        rows = Rows.of(played, recipe.discount, episodes["log_probs"])
        if recipe.method == "online_filtered_bc":
            rows = rows.part(best(played, game.goal, recipe.keep))
        parts.append(rows)
        earned += float(played.returns.sum())
        invalid += float(episodes["invalid"][played.alive].mean()) / len(answers)
    run.count("episodes", sum(len(job.task) for job in jobs))
    return Rows.join(parts), {
        "train/return": run.sum(earned) / recipe.rollouts,
        "train/invalid": run.sum(invalid) / run.world,
    }
