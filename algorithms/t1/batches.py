"""Graded answers of one update: joined, dealt over the ranks, cut into passes that waste little.

Shapes: ``P`` prompts with ``K`` answers each, ``N = P * K`` rows, ``T`` tokens; ``R`` rows and
``M`` answer tokens of a pass.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 (PyTorch's own name for it)
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from algorithms.t1.objective import informative_groups
from algorithms.t1.tasks import PADDING, to_tensors
from algorithms.t1.workload import T1Recipe
from heliostat import Run
from heliostat.actors.environment import Episodes

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Batch:
    """Graded answers of one update: N = P * K rows, prompt by prompt."""

    tokens: Int[Tensor, "N T"]
    """Prompt and answer, then token 0."""
    answer: Bool[Tensor, "N T"]
    """Marks the answer's tokens, its end included."""
    sampled: Float[Tensor, "N T"]
    """Log-probabilities as the sampler recorded them, 0 outside the answer."""
    versions: Int[Tensor, "N T"]
    """Of the weights that drew each token, 0 outside the answer."""
    lengths: Int[Tensor, " N"]
    """Tokens of each answer."""
    finished: Bool[Tensor, " N"]
    rewards: Float[Tensor, " N"]
    """r: 1 for a right answer, else 0; any number where ``graded`` is False."""
    graded: Bool[Tensor, " N"]
    """False for an answer without a verdict: it is neither learned from nor counted."""
    reasons: UInt8[Tensor, " N"]
    """The ``verifier.Reason`` of each."""
    repetitive: Bool[Tensor, " N"]
    false_claims: Bool[Tensor, " N"]
    copies: int
    """K."""
    version: int
    """Of the oldest weights that drew a token of it."""

    @classmethod
    def of(cls, parts: Sequence[Episodes]) -> Batch:
        """Joins the episodes of several jobs, each prompt followed at once by its answer."""
        prompts = joined([part["observation"][0] for part in parts], PADDING, left=True)
        actions = joined([part["action"][0] for part in parts], 0)
        log_probs = joined([part["log_probs"][0] for part in parts], 0)
        copies, longest = actions.shape[1:]
        lengths = _flat(parts, "lengths")
        given, real = to_tensors(np.repeat(prompts, copies, axis=0))
        inside = torch.arange(longest) < lengths[:, None]
        newest = max(part.version for part in parts)
        versions = joined([part["versions"][0] for part in parts], 0).reshape(-1, longest)
        versions = np.where(inside.numpy(), versions, newest)
        start = torch.zeros_like(given)
        # A row begins with the padding of its prompt: reading from behind it moves all to the left.
        room = (~real).sum(dim=1, keepdim=True)
        whole = given.shape[1] + longest
        source = torch.arange(whole) + room
        beyond = source >= whole
        source = source.clamp(max=whole - 1)

        def moved(prompt: Tensor, answer: Tensor) -> Tensor:
            return torch.cat([prompt, answer], dim=1).gather(1, source).masked_fill(beyond, 0)

        answers = torch.from_numpy(actions.reshape(-1, longest)).where(inside, 0)
        graded = all("graded" in part.fields for part in parts)
        rewards = _flat(parts, "reward")
        return cls(
            tokens=moved(given, answers),
            answer=moved(start.bool(), inside),
            sampled=moved(start.float(), torch.from_numpy(log_probs.reshape(-1, longest))),
            versions=moved(start.int(), torch.from_numpy(versions)),
            lengths=lengths,
            finished=_flat(parts, "finished"),
            rewards=rewards,
            graded=_flat(parts, "graded") if graded else torch.ones_like(lengths, dtype=torch.bool),
            reasons=_flat(parts, "reasons") if graded else (rewards <= 0).to(torch.uint8),
            repetitive=_flat(parts, "repetitive"),
            false_claims=_flat(parts, "false_claims"),
            copies=copies,
            version=int(versions.min(initial=newest)),
        )

    def grouped(self, values: Tensor) -> Tensor:
        """Returns one value an answer as [P, K]."""
        return values.view(-1, self.copies)

    def prompts(self, chosen: Tensor) -> Batch:
        """Returns the answers to some prompts, given by their places or as bool [P]."""
        rows = self.grouped(torch.arange(len(self.lengths)))[chosen].flatten()
        picked = {name: getattr(self, name)[rows] for name in _TENSORS}
        return replace(self, **picked)


_TENSORS = [item.name for item in fields(Batch) if item.name not in {"copies", "version"}]


def joined(arrays: Sequence[Array], padding: int, left: bool = False) -> Array:
    """Concatenates arrays along the first axis, the last one padded to the longest."""
    longest = max(array.shape[-1] for array in arrays)
    padded: list[Array] = []
    for array in arrays:
        room = longest - array.shape[-1]
        sides = [(0, 0)] * (array.ndim - 1) + [(room, 0) if left else (0, room)]
        padded.append(np.pad(array, sides, constant_values=padding))
    return np.concatenate(padded)


def _flat(parts: Sequence[Episodes], name: str) -> Tensor:
    return torch.from_numpy(np.concatenate([part[name][0] for part in parts]).reshape(-1))


def dealt(run: Run[T1Recipe], batch: Batch) -> Batch:
    """Returns this rank's share of what all ranks learn from, prompts whole, tokens in balance.

    Left out are prompts with fewer than two graded answers and, if the recipe says so, those whose
    answers all earned the same. A rank for which nothing is left gets a prompt that counts nothing,
    so that it can keep in step with the others.

    Args:
        run: every rank must call with its own.
        batch: what this rank's samplers sent.
    """
    graded = batch.grouped(batch.graded)
    useful = graded.sum(dim=1) >= 2
    if run.recipe.drop_flat_groups or run.recipe.dynamic_sampling:
        useful = useful & informative_groups(batch.grouped(batch.rewards), graded)
    parts = run.gather(batch.prompts(useful))
    whole = parts[0] if len(parts) == 1 else _stacked(parts)
    tokens = whole.grouped(whole.answer.sum(dim=1)).sum(dim=1)
    mine = deal(cast("list[int]", tokens.tolist()), run.world)[run.rank]
    if not mine:
        first = batch.prompts(torch.tensor([0]))
        return replace(first, graded=torch.zeros_like(first.graded))
    return whole.prompts(torch.tensor(mine))


def _stacked(parts: Sequence[Batch]) -> Batch:
    longest = max(part.tokens.shape[1] for part in parts)

    def padded(value: Tensor) -> Tensor:
        return value if value.ndim == 1 else F.pad(value, (0, longest - value.shape[1]))

    tensors = {
        name: torch.cat([padded(getattr(part, name)) for part in parts]) for name in _TENSORS
    }
    return replace(parts[0], **tensors)


def deal(costs: Sequence[int], hands: int) -> list[list[int]]:
    """Shares out things of known cost: the costliest first, each to whoever has least so far.

    Args:
        costs: of each thing, ≥ 0.
        hands: how many share them.

    Returns:
        The places in ``costs`` of each hand, ascending; the fullest hand exceeds the mean by less
        than the largest cost.
    """
    given: list[list[int]] = [[] for _ in range(hands)]
    lightest = [(0, hand) for hand in range(hands)]
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        total, hand = heapq.heappop(lightest)
        given[hand].append(place)
        heapq.heappush(lightest, (total + costs[place], hand))
    return [sorted(places) for places in given]


@dataclass(frozen=True, slots=True)
class Pass:
    """Rows of a batch for one forward and backward pass, on the learner's device."""

    tokens: Int[Tensor, "R T"]
    chosen: Bool[Tensor, "R T"]
    groups: Int[Tensor, " R"]
    """The prompt of each row."""
    owners: Int[Tensor, " M"]
    """The row *of the batch* that each answer token belongs to."""
    sampled: Float[Tensor, " M"]
    """The sampler's log-probability of each answer token."""


def passes(run: Run[T1Recipe], batch: Batch) -> list[Pass]:
    """Cuts the graded answers of a batch into passes; a batch without any gives one all the same.

    Args:
        run: tells the size of a pass; every rank must call and gets equally many passes.
        batch: this rank's share.
    """
    kept = batch.graded.nonzero().squeeze(1)
    kept = kept if len(kept) else torch.tensor([0])
    starts = batch.answer.int().argmax(dim=1)
    groups = torch.arange(len(batch.lengths)) // batch.copies
    found: list[Pass] = []
    for rows in micro_batches(run, (starts + batch.lengths)[kept], starts[kept], groups[kept]):
        some = kept[rows]
        width = int((starts + batch.lengths)[some].max())
        tokens, chosen = batch.tokens[some, :width], batch.answer[some, :width]
        owners = some.repeat_interleave(batch.lengths[some])
        parts = (tokens, chosen, groups[some], owners, batch.sampled[some, :width][chosen])
        found.append(Pass(*(part.to(run.device) for part in parts)))
    return found


def micro_batches(
    run: Run[T1Recipe],
    lengths: Int[Tensor, " N"],
    shared: Int[Tensor, " N"] | None = None,
    groups: Int[Tensor, " N"] | None = None,
) -> list[Int[Tensor, " _"]]:
    """Splits rows into passes of similar length and about ``tokens_per_pass`` distinct tokens.

    Args:
        run: tells the size of a pass; every rank gets equally many passes.
        lengths: tokens of each row.
        shared: how many of them the row has in common with others of its group.
        groups: of each row; None where rows share nothing.

    Returns:
        Row indices of each pass, shortest rows first; no pass is empty.
    """
    order = torch.argsort(lengths, stable=True)
    costs = lengths[order]
    if shared is not None and groups is not None:
        repeated = groups[order] == groups[order].roll(1)
        repeated[0] = False
        costs = costs - shared[order].where(repeated, 0)
    below = torch.cumsum(costs, dim=0)
    wanted = run.largest(math.ceil(int(below[-1]) / run.recipe.tokens_per_pass))
    fewest_rows = -run.largest(-len(order))
    count = int(min(wanted, fewest_rows))
    places = torch.arange(1, count)
    cuts = torch.searchsorted(below, below[-1] * places / count)
    # at least one row a pass: cut i lies behind cut i - 1 and leaves a row for each later pass
    cuts = torch.cummax((cuts - places).clamp(0, len(order) - count), dim=0).values + places
    return list(torch.tensor_split(order, cuts))
