"""T1's actors: problems (data), samplers (environment) and solvers (evaluation).

Each plugs a task, a policy and a scorer into one of the shared families; a prompt is an
environment of one step whose action is an answer and whose reward is its grade.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from algorithms.t1.model import TokenScorer
from algorithms.t1.sampler import Sampling, sample
from algorithms.t1.tasks import Row, Split, Task, make_policy, make_task, to_tensors
from algorithms.t1.workload import T1Recipe
from heliostat import Member, Weights, idempotent
from heliostat.actors.data import Reader, share
from heliostat.actors.environment import EnvironmentActor, Episodes, Job, Step
from heliostat.actors.evaluation import EvaluationActor, Score
from heliostat.seeding import numpy_generator


class Problems(Reader[Row]):
    """Training problems in shares, held-out ones on request."""

    def __init__(self, recipe: T1Recipe, member: Member) -> None:
        self._task = make_task(recipe)
        rows = self._task.rows("train")
        mine = share(len(rows), member)
        super().__init__(rows[mine.start : mine.stop])

    @idempotent
    def held_out(self, split: Split, count: int) -> list[Row]:
        """Returns ``count`` problems of a split, or all where it has fewer; the same in any run."""
        rows = self._task.rows(split)
        order = numpy_generator(0, "held out", split).permutation(len(rows))
        return [rows[place] for place in order[:count]]


class Answering:
    """The environment: prompts are observations, graded answers end the episode."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._rows: Sequence[Row] = ()
        self._prompts = np.empty(0)

    def reset(self, task: Sequence[Row], seed: int) -> np.ndarray:
        """Returns the prompts of the rows, int64 [P, S]."""
        del seed
        self._rows = task
        self._prompts = self._task.prompts(task)
        return self._prompts

    def step(self, actions: Mapping[str, np.ndarray]) -> Step:
        """Grades answers [P, K, L]; rewards are [P, K], and every episode is done."""
        grades = self._task.grade(self._rows, actions["action"], actions["lengths"])
        info = {"false_claims": grades.false_claims, "repetitive": grades.repetitive}
        done = np.ones_like(grades.solved)
        return Step(self._prompts, grades.solved.astype(np.float32), done, info)


class Answerer:
    """The policy: samples K answers to each prompt."""

    def __init__(self, recipe: T1Recipe, task: Task, sampling: Sampling) -> None:
        self.sampling = sampling
        self._scorer = TokenScorer(make_policy(recipe, task)).eval()
        self._key = ""

    def load(self, weights: Weights) -> None:
        """Copies new weights into the model; those it has already cost nothing."""
        if weights.key != self._key:
            weights.load_into(self._scorer)
            self._key = weights.key

    def act(self, observations: np.ndarray, generator: torch.Generator) -> dict[str, np.ndarray]:
        """Returns ``action`` int64 and ``log_probs`` float32, [P, K, L], and what describes them.

        ``lengths`` int64 and ``finished`` bool are [P, K]; L is the longest answer of the batch.
        """
        prompts, real = to_tensors(observations)
        answers = sample(
            self._scorer.policy,
            prompts,
            self.sampling,
            generator,
            None if bool(real.all()) else real,
        )
        shape = (len(observations), self.sampling.answers_per_prompt)
        return {
            "action": answers.tokens.numpy().reshape(*shape, -1),
            "log_probs": answers.log_probs.numpy().reshape(*shape, -1),
            "lengths": answers.lengths.numpy().reshape(shape),
            "finished": answers.finished.numpy().reshape(shape),
        }


class Samplers(EnvironmentActor):
    """Samples and grades training answers."""

    def __init__(self, recipe: T1Recipe, member: Member) -> None:
        del member
        task = make_task(recipe)
        super().__init__(Answering(task), Answerer(recipe, task, _sampling(recipe, task)))


class Solvers(EvaluationActor):
    """Scores weights on held-out problems."""

    def __init__(self, recipe: T1Recipe, member: Member) -> None:
        del member
        task = make_task(recipe)
        self._answerer = Answerer(recipe, task, replace(_sampling(recipe, task), min_p=0.0))
        super().__init__(Answering(task), self._answerer, score_answers)

    @idempotent
    def solve(self, job: Job, weights: Weights, temperature: float, answers: int) -> Score:
        """Samples ``answers`` answers to each prompt of the job at a temperature."""
        self._answerer.sampling = replace(
            self._answerer.sampling, temperature=temperature, answers_per_prompt=answers
        )
        return self.score(job, weights)


def score_answers(episodes: Episodes) -> dict[str, float]:
    """Returns means over answers, and over prompts for pass@k (some of the K answers is right)."""
    solved = episodes["reward"][0] > 0
    return {
        "accuracy": float(solved.mean()),
        "pass_at_k": float(solved.any(axis=1).mean()),
        "false_claims": float(episodes["false_claims"].mean()),
        "overlong": float(1 - episodes["finished"].mean()),
        "length": float(episodes["lengths"].mean()),
    }


def _sampling(recipe: T1Recipe, task: Task) -> Sampling:
    return Sampling(
        answers_per_prompt=recipe.answers_per_prompt,
        max_new_tokens=recipe.max_new_tokens,
        end_token=task.end_token,
        temperature=recipe.temperature,
        min_p=recipe.min_p,
    )
