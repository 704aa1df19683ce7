"""Inference scaling (T1, section 4): accuracy over the length of a thought that is cut off.

A policy answers once with a large budget. For each smaller budget B the *summariser*, a model from
before reinforcement learning, reads the problem and the first B tokens and must give a final answer
at once; it never sees what came after. B = 0 is the control: what the summariser solves alone.

Shapes: ``P`` prompts, ``K`` thoughts each, ``N = P * K``, ``S`` prompt tokens, ``L`` tokens of
thought.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from transformers import PreTrainedModel

from algorithms.t1.sampler import Answers, Sampling, sample
from algorithms.t1.tasks import PADDING, Ints, Row, Task, to_tensors
from heliostat.seeding import torch_generator


@runtime_checkable
class Summarising(Task, Protocol):
    """A task whose cut-off thoughts can be turned into final answers."""

    cue: tuple[int, ...]
    """Tokens put after a thought to ask for the final answer; may be none."""
    answer_tokens: int
    """Longest final answer, its end token included."""

    def commit(self, answers: Ints, lengths: Ints) -> tuple[Ints, Ints]:
        """Makes thought plus summary [N, L] an answer that ended: the summariser must answer."""
        ...


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a curve."""

    budget: int | None
    """B; None for the whole response, graded as the policy gave it."""
    tokens: float
    """Mean tokens of thought really used, end tokens included: a response shorter than B counts
    with its own length."""
    accuracy: float


@dataclass(frozen=True, slots=True)
class Curve:
    """Accuracy of one policy over budgets of thought."""

    points: tuple[Point, ...]
    """By budget, the smallest first."""
    whole: Point
    """The sampled responses, not cut and not summarised."""
    greedy: Point
    """The same of the likeliest response at each step."""


def truncate(tokens: Ints, lengths: Ints, budget: int, end_token: int) -> tuple[Ints, Ints]:
    """Cuts thoughts to their first ``budget`` tokens.

    Args:
        tokens: int64 [N, L].
        lengths: int64 [N], of each thought, its end token included.
        budget: B ≥ 0.
        end_token: left out of what the summariser reads, as it would forbid it to answer.

    Returns:
        (thoughts int64 [N, min(B, L)] with ``PADDING`` on the *left*, int64 [N] tokens used).
    """
    used = np.minimum(lengths, budget)
    width = min(budget, tokens.shape[1])
    last = np.take_along_axis(tokens, np.maximum(used - 1, 0)[:, None], axis=1)[:, 0]
    kept = used - ((last == end_token) & (used > 0))
    place = np.arange(width) - (width - kept)[:, None]
    cut = np.take_along_axis(tokens, np.maximum(place, 0), axis=1)
    return np.where(place >= 0, cut, PADDING), used


def scaling_curve(
    task: Summarising,
    rows: Sequence[Row],
    models: tuple[PreTrainedModel, PreTrainedModel],
    thinking: Sampling,
    budgets: Sequence[int],
    seed: int,
) -> Curve:
    """Measures one policy.

    Args:
        task: gives prompts and grades.
        rows: P problems.
        models: (policy, summariser of before reinforcement learning, which answers greedily).
        thinking: how the policy samples: K, temperature and the large budget.
        budgets: B of each point.
        seed: of the thoughts.
    """
    policy, summariser = models
    prompts = task.prompts(rows)
    generator = torch_generator(seed, "thoughts")
    thoughts = _sample(policy, prompts, thinking, generator)
    copies = thinking.answers_per_prompt
    tokens, lengths = thoughts.tokens.numpy(), thoughts.lengths.numpy()
    repeated = np.repeat(prompts, copies, axis=0)
    points: list[Point] = []
    for budget in sorted(budgets):
        cut, used = truncate(tokens, lengths, budget, task.end_token)
        answers, ends = task.commit(*_summarise(task, repeated, cut, summariser))
        accuracy = _accuracy(task, rows, answers, ends)
        points.append(Point(budget, float(used.mean()), accuracy))
    whole = Point(None, float(lengths.mean()), _accuracy(task, rows, tokens, lengths))
    likeliest = Sampling(1, thinking.max_new_tokens, task.end_token, temperature=0.0)
    best = _sample(policy, prompts, likeliest, generator)
    greedy = best.tokens.numpy(), best.lengths.numpy()
    mean = float(greedy[1].mean())
    return Curve(tuple(points), whole, Point(None, mean, _accuracy(task, rows, *greedy)))


def _summarise(
    task: Summarising, prompts: Ints, thoughts: Ints, summariser: PreTrainedModel
) -> tuple[Ints, Ints]:
    """Returns (thought, cue and final answer int64 [N, _], their lengths int64 [N])."""
    cue = np.broadcast_to(np.array(task.cue, np.int64), (len(prompts), len(task.cue)))
    asked = np.concatenate([prompts, thoughts, cue], axis=1)
    order = np.argsort(asked != PADDING, axis=1, kind="stable")  # all padding to the left
    likeliest = Sampling(1, task.answer_tokens, task.end_token, temperature=0.0)
    given = _sample(summariser, np.take_along_axis(asked, order, 1), likeliest, torch.Generator())
    behind = np.concatenate([thoughts, cue, given.tokens.numpy()], axis=1)
    room = (thoughts == PADDING).sum(axis=1)
    places: Ints = np.arange(behind.shape[1], dtype=np.int64)
    source = (places + room[:, None]) % behind.shape[1]
    answers = np.where(behind == PADDING, task.end_token, behind)
    lengths = thoughts.shape[1] - room + cue.shape[1] + given.lengths.numpy()
    return np.take_along_axis(answers, source, axis=1), lengths


def _sample(
    model: PreTrainedModel, prompts: Ints, sampling: Sampling, generator: torch.Generator
) -> Answers:
    tokens, real = to_tensors(prompts)
    return sample(model, tokens, sampling, generator, None if bool(real.all()) else real)


def _accuracy(task: Task, rows: Sequence[Row], answers: Ints, lengths: Ints) -> float:
    shape = (len(rows), -1)
    solved = task.grade(rows, answers.reshape(*shape, answers.shape[1]), lengths.reshape(shape))
    return float(solved.solved.mean())
