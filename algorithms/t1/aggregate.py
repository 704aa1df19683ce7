"""Scores of several answers to one prompt: pass@k, majority voting, best-of-n; pure functions.

Shapes: ``P`` prompts with ``N`` answers each. All scores are in [0, 1].
"""

from __future__ import annotations

from math import comb
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from algorithms.t1.tasks import Bools, Ints

Floats = npt.NDArray[np.float64]

NO_VOTE = -1
"""The vote of an answer that gave no final answer."""


@runtime_checkable
class Voting(Protocol):
    """A task whose final answers can be told apart without a label."""

    def votes(self, answers: Ints, lengths: Ints) -> Ints:
        """Returns int64 [P, K], equal within a prompt for equal final answers, else ``NO_VOTE``.

        Args:
            answers: int64 [P, K, L].
            lengths: int64 [P, K], end tokens included.
        """
        ...


def pass_at_k(solved: Bools, k: int) -> float:
    """Returns the mean chance that k of a prompt's N answers, drawn at random, hold a right one.

    The unbiased estimator 1 - C(N - c, k) / C(N, k) for c right answers (Chen et al. 2021,
    arXiv 2107.03374, equation 1); for k = N it is whether any answer is right.

    Args:
        solved: bool [P, N].
        k: 1 ≤ k ≤ N.

    Raises:
        ValueError: k is out of range.
    """
    answers = _check(solved, k)
    missed = np.array([comb(answers - right, k) / comb(answers, k) for right in range(answers + 1)])
    return float(1 - missed[solved.sum(axis=1)].mean())


def majority(solved: Bools, votes: Ints) -> float:
    """Returns the mean chance that the most frequent final answer is right, ties drawn by lot.

    Args:
        solved: bool [P, N]; answers of one vote are all right or all wrong, else their mean counts.
        votes: int64 [P, N], equal for equal final answers, ``NO_VOTE`` for none. A prompt without
            any vote scores 0.
    """
    _check(solved, 1)
    same = (votes[:, :, None] == votes[:, None, :]) & (votes != NO_VOTE)[:, :, None]
    counts = same.sum(axis=2)
    most = counts.max(axis=1, keepdims=True)
    # each of the tied answers is met `most` times: a mean over answers is a mean over the tied
    leaders = (counts == most) & (most > 0)
    right = (solved & leaders).sum(axis=1) / np.maximum(leaders.sum(axis=1), 1)
    return float(right.mean())


def best_of_n(solved: Bools, values: Floats, n: int) -> float:
    """Returns the mean chance that the best by ``values`` of n random answers is right.

    Unbiased over the C(N, n) subsets: with values in ascending order, the answer at place i (from
    0) is the best of C(i, n - 1) of them. Equal values share their places.

    Args:
        solved: bool [P, N].
        values: float64 [P, N], what a scorer that sees no label thinks of each answer.
        n: 1 ≤ n ≤ N.

    Raises:
        ValueError: n is out of range.
    """
    answers = _check(solved, n)
    share = np.array([comb(place, n - 1) / comb(answers, n) for place in range(answers)])
    order = np.argsort(values, axis=1, kind="stable")
    ranked = np.take_along_axis(values, order, axis=1)
    right = np.take_along_axis(solved, order, axis=1).astype(np.float64)
    tied = ranked[:, :, None] == ranked[:, None, :]
    fair = (tied * right[:, None, :]).sum(axis=2) / tied.sum(axis=2)
    return float((fair * share).sum(axis=1).mean())


def _check(solved: Bools, k: int) -> int:
    if solved.ndim != 2 or not solved.size or not 1 <= k <= solved.shape[1]:
        raise ValueError(
            f"expected answers [P, N] and 1 ≤ k ≤ N, found shape {list(solved.shape)} and k={k}; "
            "sample more answers to a prompt"
        )
    return solved.shape[1]
