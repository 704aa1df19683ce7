"""Scores beside training, and after imitation and at the end, normalised as in the paper."""

from __future__ import annotations

from algorithms.lmrl.games import make_game
from algorithms.lmrl.roles import Judges
from algorithms.lmrl.workload import LmrlRecipe
from heliostat import Pending, Run, Weights
from heliostat.actors.environment import Job
from heliostat.actors.evaluation import Score, merge
from heliostat.seeding import numpy_generator


class Examiner:
    """Rank 0's view of the judges; on the other ranks it does nothing."""

    def __init__(self, run: Run[LmrlRecipe]) -> None:
        self._run = run
        self._game = make_game(run.recipe)
        self._pending: list[Pending[list[Score]]] = []
        self.scores: dict[str, float] = {}
        """Final metrics so far."""

    def validate(self, weights: Weights) -> None:
        """Starts scoring on a few cases and logs what has come in."""
        recipe = self._run.recipe
        if self._run.rank == 0:
            pending = self._start("validation", weights, recipe.eval_cases, recipe.eval_repeats)
            self._pending.append(pending)
            self.collect(wait=False)

    def collect(self, wait: bool) -> None:
        """Logs finished scores at the step of the weights that earned them; may wait for all."""
        while self._pending and (wait or self._pending[0].done()):
            score = merge(self._pending.pop(0).result())
            metrics = {f"eval/{name}": value for name, value in self._named(score).items()}
            self._run.log(score.version, metrics)

    def test(self, weights: Weights, prefix: str) -> None:
        """Scores on all the recipe's test cases, as ``<prefix>score`` and others."""
        recipe = self._run.recipe
        if self._run.rank != 0:
            return
        pending = self._start("test", weights, recipe.test_cases, recipe.test_repeats)
        score = merge(pending.result())
        assert score.version == weights.version, "a score must belong to the weights it names"
        named = self._named(score)
        self.scores |= {f"{prefix}{name}": value for name, value in named.items()}
        self.scores["episodes"] = score.count

    def _named(self, score: Score) -> dict[str, float]:
        return {**score.means, "score": self._game.normaliser(score.means["return"])}

    def _start(
        self, split: str, weights: Weights, cases: int, repeats: int
    ) -> Pending[list[Score]]:
        run, size = self._run, self._run.recipe.episodes_per_job
        order = numpy_generator(0, "cases", split).permutation(self._game.cases())
        chosen = order[:cases].repeat(repeats)
        jobs = [
            Job(chosen[start : start + size], run.seed(split, start))
            for start in range(0, len(chosen), size)
        ]
        return run.pool(Judges).start(Judges.score, jobs, weights)
