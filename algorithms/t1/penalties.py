"""Patterns whose answers earn -1 (T1, section 3.2), and the guard against what that can teach.

Shapes: ``N`` answers, ``L`` tokens of the longest, ``M`` answer tokens on one flat axis.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from algorithms.t1.workload import T1Recipe
from heliostat import Run

logger = logging.getLogger(__name__)

_WINDOW = 5
"""Updates behind each of the two rates that the guard compares."""


def penalised_rewards(
    rewards: Float[Tensor, " N"], penalised: Bool[Tensor, " N"], penalty: float = -1.0
) -> Float[Tensor, " N"]:
    """Sets r' = ``penalty`` for answers that show an unwanted pattern, right or wrong.

    With rewards in {0, 1} a penalty teaches a policy that often shows the pattern to end early
    with a false claim (reward 0 beats -1): switch a pattern on when its base rate is below 5 %.

    Args:
        rewards: r.
        penalised: Answers with such a pattern.
        penalty: The value given.
    """
    return rewards.masked_fill(penalised, penalty)


def repeats_ngram(
    tokens: Int[Tensor, "N L"], lengths: Int[Tensor, " N"], n: int, max_repeats: int
) -> Bool[Tensor, " N"]:
    """Tells which answers hold some n-gram more than ``max_repeats`` times, overlaps included.

    Args:
        tokens: Answers, padded on the right.
        lengths: Tokens of each answer before the padding.
        n: Length of the pattern, ≥ 1.
        max_repeats: Occurrences that are still fine, ≥ 1.

    Raises:
        ValueError: ``n`` or ``max_repeats`` is below 1.
    """
    if n < 1 or max_repeats < 1:
        raise ValueError(
            f"expected n ≥ 1 and max_repeats ≥ 1, found n={n}, max_repeats={max_repeats}; "
            "change the penalty's numbers"
        )
    places = tokens.shape[1] - n + 1
    if places <= max_repeats:
        return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    windows = tokens.unfold(1, n, 1).reshape(-1, n)
    grams = cast("Tensor", torch.unique(windows, dim=0, return_inverse=True)[1])
    # Windows that reach into the padding get numbers of their own, hence never repeat.
    place = torch.arange(places, device=tokens.device)
    inside = place + n <= lengths[:, None]
    ordered = torch.sort(grams.view(len(tokens), places).where(inside, -1 - place), dim=1)[0]
    return (ordered[:, max_repeats:] == ordered[:, :-max_repeats]).any(dim=1)


def perplexities(log_probs: Float[Tensor, " N"], lengths: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Returns exp(-log π_ref(y) / |y|) of each answer.

    Under the *anchor*, not the policy that sampled: a policy that drifts into garbage finds its
    own garbage likely, the slow anchor does not yet.

    Args:
        log_probs: log π_ref(y), sums over the tokens of an answer, in nats.
        lengths: Tokens of each answer, ≥ 1.
    """
    return (-log_probs / lengths).exp()


class FalseClaims:
    """Warns once when a penalty teaches the policy to stop early with a false claim of success.

    Where wrong earns 0 and over-long -1, giving up early pays; in a trial with K = 4 the share of
    false claims went from 17 to 51 %. Compared are the means of the first and of the newest five
    updates.
    """

    def __init__(self) -> None:
        self._first: list[float] = []
        self._last: list[float] = []
        self._warned = False

    def watch(self, run: Run[T1Recipe], metrics: Mapping[str, float]) -> dict[str, float]:
        """Takes up one update's share of false claims and warns, once, where it has risen far.

        That is by more than 0.1 and by half of its start, while a penalty is on. The warning goes
        to the log and to the run's events, with figures and remedy.

        Args:
            run: every rank may call; rank 0 warns.
            metrics: of the update, with ``train/false_claims`` in [0, 1].

        Returns:
            The metrics and ``train/false_claims_rise``, the newest rate less the first.
        """
        rate, on = metrics["train/false_claims"], list(run.recipe.penalise)
        if len(self._first) < _WINDOW:
            self._first.append(rate)
        self._last = [*self._last, rate][-_WINDOW:]
        start, now = _mean(self._first), _mean(self._last)
        if on and not self._warned and now - start > max(0.1, start / 2):
            self._warned = True
            if run.rank == 0:
                text = (
                    f"false claims of success rose from {start:.0%} to {now:.0%} of the answers "
                    f"with penalise={on}: wrong (0) beats penalised (-1), so that the policy "
                    "learns to give up early. Resume from before the rise with penalise=[]; "
                    "switch a penalty on once its pattern shows in less than 5 % of the answers"
                )
                logger.warning(text)
                run.folder.events.add("warning", text=text)
        return {**metrics, "train/false_claims_rise": now - start}

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint must hold."""
        return {"first": self._first, "last": self._last, "warned": self._warned}

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes up what ``state`` returned."""
        self._first, self._last = list(state["first"]), list(state["last"])
        self._warned = bool(state["warned"])


def _mean(values: list[float]) -> float:
    return sum(values) / max(len(values), 1)
