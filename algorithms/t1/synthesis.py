"""Chain-of-thought synthesis (T1, section 2): failures, checks and a success as one thought.

Several policies attempt each question, a verifier criticises every attempt, and some failures, each
with its criticism, are put before a success. ``cluster.synthesis`` runs it over a whole file.

Shapes: ``P`` questions of a chunk, ``K`` attempts of a policy at each.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import torch

from algorithms.t1.answers import final_value
from algorithms.t1.dataset import Question
from algorithms.t1.model import local_model
from algorithms.t1.questions import Questions
from algorithms.t1.sampler import Sampling, sample
from algorithms.t1.tasks import to_tensors
from algorithms.t1.verifier import Reason, Verifier
from algorithms.t1.workload import T1Recipe
from heliostat.errors import UsageError
from heliostat.seeding import numpy_generator, torch_generator

SOLVER = "solution"
"""The policy that writes down the file's own worked solution."""
_MARK = re.compile(r"####[ \t]*")
_AGAIN = "Let me try another way."


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Numbers of the synthesis; the attempts kept are a function of it and the questions alone."""

    attempts: int = 16
    """K of each model."""
    temperature: float = 1.0
    max_new_tokens: int = 512
    max_pass_rate: float = 0.3
    """Questions that the models solve more often are too easy to teach anything."""
    max_failures: int = 3
    """Largest number of failures before the success, ≥ 0."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuses values out of range.

        Raises:
            UsageError: a value is out of range.
        """
        try:
            Sampling(self.attempts, self.max_new_tokens, 0, self.temperature)
        except ValueError as error:
            raise UsageError(str(error)) from error
        if not 0 <= self.max_pass_rate <= 1 or self.max_failures < 0:
            raise UsageError(
                f"expected 0 ≤ max_pass_rate ≤ 1 and max_failures ≥ 0, found {self.max_pass_rate} "
                f"and {self.max_failures}; change --max-pass-rate or --max-failures"
            )


@dataclass(frozen=True, slots=True)
class Attempt:
    """What one policy wrote, and how it was judged."""

    policy: str
    text: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class Thought:
    """A synthesised solution."""

    solution: str
    failures: int
    """How many come before the success."""


@runtime_checkable
class Writer(Protocol):
    """A policy that attempts questions."""

    def write(self, questions: Sequence[Question], first: int) -> list[list[str]]:
        """Returns the attempts at each question of a chunk whose first has the place ``first``."""
        ...


def make_writer(policy: str, plan: Plan, number: int = 0) -> Writer:
    """Returns the writer of a policy: the folder of a Hugging Face causal model, or ``SOLVER``.

    Args:
        policy: names it.
        plan: numbers of the synthesis.
        number: of the policy among all; each has draws of its own.

    Raises:
        UsageError: there is no model in the folder.
    """
    return SolutionWriter() if policy == SOLVER else ModelWriter(policy, plan, number)


class SolutionWriter:
    """Writes the worked solution, where there is one."""

    def write(self, questions: Sequence[Question], first: int) -> list[list[str]]:
        """Returns no attempt at a question without a solution."""
        del first
        worked = [[f"{one.solution.strip()}\n#### {one.answer}"] for one in questions]
        return [text if one.solution else [] for one, text in zip(questions, worked, strict=True)]


class ModelWriter:
    """Samples K attempts at each question from a causal model in a local folder."""

    def __init__(self, folder: str, plan: Plan, number: int) -> None:
        model: Any = local_model(Path(folder)).eval()
        self._model = model.to("cuda" if torch.cuda.is_available() else "cpu")
        self._task = Questions(T1Recipe(steps=1, model=folder))
        self._plan = plan
        self._number = number

    def write(self, questions: Sequence[Question], first: int) -> list[list[str]]:
        """Samples; the draws follow from the seed and the place of the chunk."""
        plan = self._plan
        prompts, real = to_tensors(self._task.prompts(questions))
        device = self._model.device
        answers = sample(
            self._model,
            prompts.to(device),
            Sampling(plan.attempts, plan.max_new_tokens, self._task.end_token, plan.temperature),
            torch_generator(plan.seed, "attempts", self._number, first),
            None if bool(real.all()) else real.to(device),
        )
        texts = [self._task.text(row) for row in answers.tokens.cpu().numpy()]
        # an answer without an end is no attempt at all: what it says last is where it was cut
        ended = cast("list[bool]", answers.finished.tolist())
        whole = [text if end else "" for text, end in zip(texts, ended, strict=True)]
        return [whole[at : at + plan.attempts] for at in range(0, len(whole), plan.attempts)]


def judge(
    verifier: Verifier, policy: str, questions: Sequence[Question], texts: Sequence[Sequence[str]]
) -> list[list[Attempt]]:
    """Has the verifier compare the final value of every attempt with the gold answer."""
    values = [[final_value(text) for text in row] for row in texts]
    pairs = [
        (one.gold, value)
        for one, row in zip(questions, values, strict=True)
        for value in row
        if value is not None
    ]
    reasons = iter(verifier(pairs))
    return [
        [
            Attempt(policy, text, Reason.NO_ANSWER if value is None else next(reasons))
            for text, value in zip(row, found, strict=True)
        ]
        for row, found in zip(texts, values, strict=True)
    ]


def criticism(attempt: Attempt) -> str:
    """Says what the verifier found, in the words of somebody who checks their own work."""
    value = final_value(attempt.text)
    if attempt.reason is Reason.OK:
        return f"Check: {value} is right."
    if attempt.reason is Reason.WRONG:
        return f"Check: {value} is not right. {_AGAIN}"
    return f"Check: this leads to no answer. {_AGAIN}"


def pass_rate(attempts: Sequence[Attempt]) -> float | None:
    """Returns the share of right ones among the models' judged attempts, None without any."""
    judged = [
        one.reason is Reason.OK
        for one in attempts
        if one.policy != SOLVER and one.reason.score is not None
    ]
    return sum(judged) / len(judged) if judged else None


def is_hard(attempts: Sequence[Attempt], plan: Plan) -> bool:
    """Whether a question passes the difficulty filter; one that no model attempted does."""
    rate = pass_rate(attempts)
    return rate is None or rate <= plan.max_pass_rate


def thought(attempts: Sequence[Attempt], plan: Plan, place: int) -> Thought | None:
    """Merges some failures, each criticised, and a success into one linear solution.

    Failures with one final value count once, and policies come in no order. How many there are is
    drawn evenly from 0 to ``max_failures`` (or all there are). The ``####`` marks go: the reader of
    the file adds the one that counts.

    Args:
        attempts: at one question, by all policies.
        plan: gives the seed and the largest number of failures.
        place: of the question in its file.

    Returns:
        None where no attempt is right.
    """
    rng = numpy_generator(plan.seed, "thought", place)
    order = cast("list[int]", rng.permutation(len(attempts)).tolist())
    shuffled = [attempts[at] for at in order]
    right = [one for one in shuffled if one.reason is Reason.OK]
    if not right:
        return None
    wrong: dict[str | None, Attempt] = {}
    for one in shuffled:
        if one.reason in (Reason.WRONG, Reason.NO_ANSWER) and one.text.strip():
            wrong.setdefault(final_value(one.text), one)
    count = int(rng.integers(0, min(plan.max_failures, len(wrong)) + 1))
    told = [*list(wrong.values())[:count], right[0]]
    parts = [f"{_MARK.sub('', one.text).strip()}\n{criticism(one)}" for one in told]
    return Thought("\n".join(parts), count)


def chunks(questions: Sequence[Question], size: int) -> list[tuple[int, Sequence[Question]]]:
    """Cuts questions into chunks, each with the place of its first; the last may be shorter."""
    return [(at, questions[at : at + size]) for at in range(0, len(questions), size)]
