"""What T1 trains on: countdown, or the user's own questions; both grade exactly.

Shapes: ``P`` prompts with ``K`` answers each, ``S`` prompt tokens, ``L`` answer tokens, ``T``
tokens of a trace. A *row* is one problem as the data actors hand it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from algorithms.t1.dataset import Split
from algorithms.t1.model import ModelShape, local_model, scratch_model
from algorithms.t1.verifier import Reason
from algorithms.t1.workload import T1Recipe
from envs import countdown
from heliostat.seeding import derive, numpy_generator

Row = Any
"""A problem; only its task knows what is inside."""

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

PADDING = -1
"""Stands to the left of a short prompt and to the right of a short trace or answer."""


@dataclass(frozen=True, slots=True)
class Grades:
    """Verdicts over answers, each array [P, K]."""

    solved: Bools
    """bool: the verifiable reward, 1 for a right answer and 0 for any other."""
    false_claims: Bools
    """bool: ended with an answer that is wrong."""
    repetitive: Bools
    """bool: tries the same thing again."""
    graded: Bools
    """bool: False where no score could be given; such an answer must teach and count nothing."""
    reasons: npt.NDArray[np.uint8]
    """uint8: the ``verifier.Reason`` of each."""

    @classmethod
    def of(cls, reasons: npt.NDArray[np.uint8], repetitive: Bools | None = None) -> Grades:
        """Returns what follows from the reasons [P, K]; a wrong answer is a false claim."""
        return cls(
            solved=reasons == Reason.OK,
            false_claims=reasons == Reason.WRONG,
            repetitive=np.zeros(reasons.shape, np.bool_) if repetitive is None else repetitive,
            graded=~np.isin(reasons, [reason for reason in Reason if reason.score is None]),
            reasons=reasons,
        )


@runtime_checkable
class Task(Protocol):
    """A source of problems and their exact grader."""

    vocabulary: int
    """Number of tokens."""
    end_token: int

    @property
    def fingerprint(self) -> str:
        """Tells training sets apart by their content; kept with the reading position."""
        ...

    def rows(self, split: Split) -> Sequence[Row]:
        """Returns all problems of a split; no problem is in two of them."""
        ...

    def prompts(self, rows: Sequence[Row]) -> Ints:
        """Returns int64 [P, S], ``PADDING`` on the left."""
        ...

    def traces(self, rows: Sequence[Row], seed: int) -> tuple[Ints, Bools]:
        """Returns supervised sequences.

        Returns:
            (tokens int64 [P, T] with ``PADDING`` on the right, bool [P, T] marking the answer).
        """
        ...

    def grade(self, rows: Sequence[Row], answers: Ints, lengths: Ints) -> Grades:
        """Grades answers int64 [P, K, L] of which ``lengths`` [P, K] tokens count."""
        ...

    def text(self, tokens: Ints) -> str:
        """Writes one sequence of tokens for people to read."""
        ...


def make_task(recipe: T1Recipe) -> Task:
    """Returns the recipe's task: its questions, or countdown where it names none."""
    if recipe.questions or recipe.gym:
        from algorithms.t1.questions import Questions

        return Questions(recipe)
    return Countdown(recipe.max_failures, recipe.level)


def held_out(task: Task, split: Split, count: int) -> list[Row]:
    """Returns ``count`` problems of a split, or all where it has fewer; the same in any run."""
    rows = task.rows(split)
    order = numpy_generator(0, "held out", split).permutation(len(rows))
    return [rows[place] for place in order[:count]]


def make_policy(recipe: T1Recipe, task: Task) -> PreTrainedModel:
    """Returns the policy before training; the same on every process of a run."""
    if recipe.model:
        from pathlib import Path

        return local_model(Path(recipe.model))
    shape = ModelShape(
        hidden=recipe.hidden,
        layers=recipe.layers,
        heads=recipe.hidden // 32,
        feed_forward=recipe.feed_forward,
        positions=recipe.positions,
    )
    return scratch_model(shape, task.vocabulary, task.end_token, derive(recipe.seed, "model"))


_COUNTDOWN_REASONS = np.full(len(countdown.Outcome), Reason.NO_ANSWER, np.uint8)
_COUNTDOWN_REASONS[countdown.Outcome.SOLVED] = Reason.OK
_COUNTDOWN_REASONS[[countdown.Outcome.FALSE_CLAIM, countdown.Outcome.WRONG_ARITHMETIC]] = (
    Reason.WRONG
)


class Countdown:
    """Numbers and a target; see ``envs.countdown``. Rows are int64 [a, b, c, …, target]."""

    vocabulary = len(countdown.VOCABULARY)
    end_token = countdown.END
    cue: tuple[int, ...] = ()

    def __init__(self, max_failures: int, level: str = "three") -> None:
        self._max_failures = max_failures
        self._level = countdown.LEVELS[level]
        self.fingerprint = f"countdown {level}"
        self._try_tokens = self._level.try_tokens
        self.answer_tokens = self._try_tokens + 1  # to finish a cut try, or make one, and to end

    def rows(self, split: Split) -> Sequence[Row]:
        """Returns every solvable problem of the split."""
        whole = countdown.problems(split, self._level)
        return list(np.column_stack([whole.numbers, whole.targets]))

    def prompts(self, rows: Sequence[Row]) -> Ints:
        """Returns ``Q a b c = t :``, with a fourth number at level ``four``."""
        return countdown.prompts(_problems(rows))

    def traces(self, rows: Sequence[Row], seed: int) -> tuple[Ints, Bools]:
        """Returns some failures, each judged N, then a solution judged Y."""
        rng = numpy_generator(seed, "traces")
        tokens, lengths = countdown.traces(rng, _problems(rows), self._max_failures)
        place = np.arange(tokens.shape[1], dtype=np.int64)
        inside = np.less(place, lengths[:, None])
        chosen = inside & np.greater_equal(place, self._level.prompt_tokens)
        return np.where(inside, tokens, np.int64(PADDING)), chosen

    def grade(self, rows: Sequence[Row], answers: Ints, lengths: Ints) -> Grades:
        """Recomputes every try from its tokens; the end token fences an answer by itself."""
        del lengths
        prompts, copies, longest = answers.shape
        batch = _problems(rows).take(np.repeat(np.arange(prompts, dtype=np.int64), copies))
        grades = countdown.grade(batch, answers.reshape(-1, longest))
        shape = (prompts, copies)
        reasons = _COUNTDOWN_REASONS[grades.outcomes].reshape(shape)
        return Grades.of(reasons, (grades.repeats > 0).reshape(shape))

    def votes(self, answers: Ints, lengths: Ints) -> Ints:
        """Tells the expressions that are claimed to solve the problem apart."""
        last, ends = self.commit(*(one.reshape(-1, *one.shape[2:]) for one in (answers, lengths)))
        flat = answers.reshape(-1, answers.shape[2])
        ended = flat[np.arange(len(flat)), lengths.ravel() - 1] == countdown.END
        places = np.maximum(lengths.ravel() - 2, 0)
        claimed = ended & (flat[np.arange(len(flat)), places] == countdown.YES) & (ends > 1)
        _, code = np.unique(last, axis=0, return_inverse=True)
        return np.where(claimed, code.ravel(), -1).reshape(lengths.shape)

    def commit(self, answers: Ints, lengths: Ints) -> tuple[Ints, Ints]:
        """Takes the last whole try [N, L] as the answer, whatever its verdict, and ends it.

        Returns:
            (int64 [N, 10]: the try, judged Y, and the end; int64 [N] tokens, 1 without any try).
        """
        size = self._try_tokens
        fenced = np.pad(answers, ((0, 0), (0, size)), constant_values=countdown.END)
        before = np.minimum(np.argmax(fenced == countdown.END, axis=1), lengths)
        start = np.maximum(before // size - 1, 0) * size
        last = np.take_along_axis(fenced, start[:, None] + np.arange(size + 1), axis=1)
        last[:, size - 1], last[:, size] = countdown.YES, countdown.END
        none = before < size
        last[none] = countdown.END
        return last, np.where(none, 1, size + 1)

    def text(self, tokens: Ints) -> str:
        """Writes the words up to the end token."""
        known = cast("list[int]", tokens.tolist())
        words = [countdown.VOCABULARY[token] for token in known if token != PADDING]
        return " ".join(words).partition(" E")[0]


def _problems(rows: Sequence[Row]) -> countdown.Problems:
    table = np.asarray(rows)
    return countdown.Problems(table[:, :-1], table[:, -1])


def to_tensors(tokens: Ints) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (tokens with padding made token 0, bool mask of what is real)."""
    given = torch.from_numpy(np.ascontiguousarray(tokens))
    real = given != PADDING
    return given.where(real, 0), real
