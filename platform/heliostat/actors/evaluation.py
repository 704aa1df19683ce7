"""Evaluation actors: weights in, scores out, with fixed seeds and beside training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from heliostat.actors.environment import Environment, Episodes, Job, Policy, play
from heliostat.layout import Family
from heliostat.pool import idempotent
from heliostat.weights import Weights

Scorer = Callable[[Episodes], Mapping[str, float]]
"""Turns played episodes into mean metrics over them."""


@dataclass(frozen=True, slots=True)
class Score:
    """Mean metrics over ``count`` cases, with the weights that earned them."""

    version: int
    count: int
    means: Mapping[str, float]
    key: str = ""
    """Digest of the weights; ``Weights.load_into`` has proved that the policy held them."""


def merge(scores: Sequence[Score]) -> Score:
    """Joins scores of parts of one evaluation, weighted by their counts.

    Raises:
        ValueError: there are none, or they belong to different weights.
    """
    versions = {score.version for score in scores}
    if len(versions) != 1:
        raise ValueError(f"expected scores of one version, found versions {sorted(versions)}")
    keys = {score.key for score in scores}
    if len(keys) != 1:
        raise ValueError(f"expected scores of one set of weights, found digests {sorted(keys)}")
    total = sum(score.count for score in scores)
    means = {
        name: sum(score.means[name] * score.count for score in scores) / total
        for name in scores[0].means
    }
    return Score(versions.pop(), total, means, keys.pop())


class EvaluationActor:
    """Scores weights on jobs; a method's actor makes its parts in its constructor."""

    family: ClassVar[Family] = "evaluation"

    def __init__(self, environment: Environment, policy: Policy, scorer: Scorer) -> None:
        self._environment = environment
        self._policy = policy
        self._scorer = scorer

    @idempotent
    def score(self, job: Job, weights: Weights) -> Score:
        """Plays the job and scores it; the count is the number of episodes."""
        episodes = play(self._environment, self._policy, job, weights)
        means = self._scorer(episodes)
        return Score(episodes.version, episodes["reward"][0].size, means, weights.key)
