"""Scores beside training: validation while it goes on, the held-out test before and after RL."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

from algorithms.t1.batches import Batch
from algorithms.t1.roles import Problems, Solvers
from algorithms.t1.tasks import Row, Split, Task
from algorithms.t1.turn import GRID, diagnosis
from algorithms.t1.workload import T1Recipe
from heliostat import Pending, Run, Weights
from heliostat.actors.environment import Job
from heliostat.actors.evaluation import Score, merge
from heliostat.errors import WeightsDiffer

_PROMPTS_PER_JOB = 256
_SAMPLES = 8

_Reading = Callable[[Sequence[Score]], dict[str, float]]

TEMPERATURES = {"": 1.0, "_t05": 0.5}
"""Suffix of a score's name -> temperature; the first is sampled ``test_answers`` times."""


class Examiner:
    """Rank 0's view of the solvers; on the other ranks it does nothing."""

    def __init__(self, run: Run[T1Recipe]) -> None:
        self._run = run
        self._rows: dict[Split, list[Row]] = {}
        self._pending: list[tuple[Weights, Pending[list[Score]], _Reading]] = []
        self.scores: dict[str, float] = {}
        """Final metrics so far."""

    def validate(self, weights: Weights, updates: int) -> None:
        """Starts scoring on validation prompts at temperature 1 and logs what has come in.

        Where it is due after so many ``updates``, TURN judges the rollout temperature too.
        """
        if self._run.rank != 0:
            return
        self._pending.append((weights, self._start("validation", weights, 1.0, 1), _scored))
        every = self._run.recipe.turn_every
        if every and updates % every == 0:
            rows = self._held_out("validation")[: self._run.recipe.turn_prompts]
            probes = [(Job(rows, self._run.seed("turn", str(grid))), grid) for grid in GRID]
            pending = self._run.pool(Solvers).start(Solvers.entropy, probes, weights)
            self._pending.append((weights, pending, self._judged))
        self.collect(wait=False)

    def collect(self, wait: bool) -> None:
        """Logs finished scores at the step of the weights that earned them; may wait for all."""
        while self._pending and (wait or self._pending[0][1].done()):
            weights, pending, reading = self._pending.pop(0)
            scores = pending.result()
            self._run.log(proven(weights, scores).version, reading(scores))

    def _judged(self, scores: Sequence[Score]) -> dict[str, float]:
        entropies = [score.means["entropy"] for score in scores]
        found = diagnosis(GRID, entropies, self._run.recipe.temperature)
        return {f"train/{name}": value for name, value in found.items()}

    def test(self, weights: Weights, prefix: str) -> None:
        """Scores on the held-out test prompts at both temperatures, as ``<prefix>accuracy`` etc."""
        if self._run.rank != 0:
            return
        answers = {"": self._run.recipe.test_answers, "_t05": 1}
        started = {
            suffix: self._start("test", weights, temperature, answers[suffix])
            for suffix, temperature in TEMPERATURES.items()
        }
        for suffix, pending in started.items():
            score = proven(weights, pending.result())
            means = {f"{prefix}{name}{suffix}": value for name, value in score.means.items()}
            self.scores |= means
        self.scores[f"{prefix}prompts"] = len(self._rows["test"])

    def _start(
        self, split: Split, weights: Weights, temperature: float, answers: int
    ) -> Pending[list[Score]]:
        rows = self._held_out(split)
        if split == "validation":
            rows = rows[: self._run.recipe.eval_prompts]
        starts = range(0, len(rows), _PROMPTS_PER_JOB)
        jobs = [
            Job(rows[start : start + _PROMPTS_PER_JOB], self._run.seed(split, str(temperature), i))
            for i, start in enumerate(starts)
        ]
        solvers = self._run.pool(Solvers)
        return solvers.start(Solvers.solve, jobs, weights, temperature, answers)

    def _held_out(self, split: Split) -> list[Row]:
        if split not in self._rows:
            recipe, problems = self._run.recipe, self._run.pool(Problems)
            needed = max(recipe.eval_prompts, recipe.turn_prompts if recipe.turn_every else 0)
            count = recipe.test_prompts if split == "test" else needed
            (self._rows[split],) = problems.map(Problems.held_out, [split], count)
        return self._rows[split]


def _scored(scores: Sequence[Score]) -> dict[str, float]:
    score = merge(scores)
    means = {f"eval/{name}": value for name, value in score.means.items()}
    return means | {"eval/version": score.version}


def proven(weights: Weights, scores: Sequence[Score]) -> Score:
    """Merges scores and checks that just these weights earned them.

    Raises:
        WeightsDiffer: others did.
    """
    score = merge(scores)
    if (score.version, score.key) != (weights.version, weights.key):
        raise WeightsDiffer(
            f"expected a score of version {weights.version}, digest {weights.key}; found one of "
            f"version {score.version}, digest {score.key}"
        )
    return score


def log_samples(run: Run[T1Recipe], task: Task, batch: Batch, step: int) -> None:
    """Logs a few right and a few wrong answers as a table, and the lengths as a histogram."""
    solved = cast("list[float]", batch.rewards.tolist())
    right = [row for row, reward in enumerate(solved) if reward > 0][:_SAMPLES]
    wrong = [row for row, reward in enumerate(solved) if reward <= 0][:_SAMPLES]
    rows: list[Sequence[str | bool]] = []
    for row in right + wrong:
        tokens, answer = batch.tokens[row].numpy(), batch.answer[row].numpy()
        start = int(answer.argmax())
        texts = task.text(tokens[:start]), task.text(tokens[answer])
        rows.append((*texts, row in right, bool(batch.false_claims[row])))
    run.tracker.log_table("samples", ("prompt", "answer", "right", "false_claim"), rows, step)
    run.tracker.log_histogram("train/length", batch.lengths.numpy(), step)


def gains(scores: Mapping[str, float]) -> dict[str, float]:
    """Returns final metrics: all scores, and accuracy gained over SFT at both temperatures."""
    return {
        **scores,
        **{
            f"gain{suffix}": scores[f"accuracy{suffix}"] - scores[f"sft_accuracy{suffix}"]
            for suffix in TEMPERATURES
            if scores  # only rank 0 has any
        },
    }
