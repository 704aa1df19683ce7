"""Countdown with three or four numbers: a reasoning task with trial, error and self-verification.

A prompt gives three numbers and a target, an answer is a chain of tries, one token a word:

    Q 4 7 2 = 26 :   4 + 7 11 * 2 22 26 N   4 * 7 28 - 2 26 26 Y   E
    prompt           first try: wrong       second try: right      end

A try ``a o b x p c y t V`` computes ``x = a o b`` and ``y = x p c``, repeats the target ``t`` and
ends with the verdict ``V`` of its author: ``Y`` for a solution, ``N`` for a failure. The last try
is the answer. The operators are ``+ - * ~``, where ``u ~ v`` is the reversed difference ``v - u``.
Everything is recomputed from the tokens by ``grade``; no text is parsed. With four numbers a prompt
has 8 tokens and a try 12: one more operation, number and value.

Training traces hold failures before the success, which is the cold start of T1 (arXiv 2501.11651,
section 2: trial and error with self-verification) in miniature.

Arrays: ``P`` problems, ``N`` answers, ``L`` tokens, ``n`` numbers. All tokens are int64.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from itertools import combinations_with_replacement, product
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from envs.countdown_chains import (
    LARGEST_VALUE,
    PLUS,
    REVERSED_MINUS,
    Bools,
    Ints,
    apply_operator,
    candidates,
    expression_code,
    repeats,
)

Split = Literal["train", "validation", "test"]

QUESTION: Final = 100
EQUALS: Final = 101
COLON: Final = 102
YES: Final = 107
NO: Final = 108
END: Final = 109
PAD: Final = 110

VOCABULARY: Final[tuple[str, ...]] = (*map(str, range(LARGEST_VALUE + 1)), *"Q=:+-*~YNE_")
"""The word of each token."""

_SPLIT_BUCKETS: Final[dict[Split, tuple[int, ...]]] = {
    "train": (0, 1, 2, 3, 4, 5),
    "validation": (6,),
    "test": (7,),
}


@dataclass(frozen=True, slots=True)
class Level:
    """How hard problems are."""

    numbers: int = 3
    """How many are given: 3 or 4."""
    largest: int = 9
    """They lie in 1..largest, at most 99."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of a prompt."""
        return self.numbers + 4

    @property
    def try_tokens(self) -> int:
        """Tokens of a try."""
        return 3 * self.numbers

    def trace_tokens(self, max_failures: int) -> int:
        """Returns the length of the longest supervised answer: its tries and the end token.

        Sampling beyond it reaches positions that training never showed; use it as length limit.
        """
        return (max_failures + 1) * self.try_tokens + 1


THREE: Final = Level()
LEVELS: Final = {"three": THREE, "wide": Level(largest=20), "four": Level(numbers=4)}
"""Named levels, easiest first."""


@dataclass(frozen=True, slots=True)
class Problems:
    """A batch of problems.

    Attributes:
        numbers: ``[P, n]``, from 1, in the order of the prompt.
        targets: ``[P]``, 1..99.
    """

    numbers: Ints
    targets: Ints

    def __len__(self) -> int:
        """Returns the number of problems, ``P``."""
        return len(self.targets)

    @property
    def level(self) -> Level:
        """Of so many numbers; tells the sizes of prompts and tries."""
        return Level(self.numbers.shape[1])

    def take(self, indices: Ints) -> Problems:
        """Returns the problems at ``indices``; repeats are allowed."""
        return Problems(self.numbers[indices], self.targets[indices])


class Outcome(IntEnum):
    """How an answer ended; exactly one holds."""

    SOLVED = 0
    """The last try is right, uses each given number once, reaches the target and claims so."""
    FALSE_CLAIM = 1
    """The last try claims a solution with sound arithmetic, but the claim is false."""
    WRONG_ARITHMETIC = 2
    """The last try claims a solution, but one of its two computations is wrong."""
    GAVE_UP = 3
    """The answer ended after a try that its author called a failure."""
    OVERLONG = 4
    """No end token within the length limit."""
    MALFORMED = 5
    """It ended, but is not a whole number of well-formed tries."""


@dataclass(frozen=True, slots=True)
class Grades:
    """Verdicts over ``N`` answers.

    Attributes:
        outcomes: ``[N]`` values of ``Outcome``.
        tries: ``[N]`` complete leading tries that are well-formed.
        repeats: ``[N]`` of them that repeat an earlier expression of the same answer.
        wrong_computations: ``[N]`` of them with a wrong ``x`` or ``y``.
        wrong_verdicts: ``[N]`` of them whose verdict differs from the truth.
    """

    outcomes: Ints
    tries: Ints
    repeats: Ints
    wrong_computations: Ints
    wrong_verdicts: Ints

    @property
    def solved(self) -> Bools:
        """``[N]``: the verifiable reward of T1, 1 for solved and 0 for all else."""
        return self.outcomes == Outcome.SOLVED


def draw(rng: np.random.Generator, split: Split, count: int) -> Problems:
    """Draws three-number problems of a split, independently, each a random expression's value.

    A problem's probability is proportional to the number of expressions that solve it, as if its
    numbers and one valid expression had been drawn uniformly and the target computed. About 10 %
    of a problem's expressions solve it.

    Args:
        rng: The only source of randomness.
        split: Which of the three disjoint sets of problems.
        count: How many to draw; repeats are possible, as splits are finite.
    """
    pool = problems(split)
    places = np.searchsorted(_cumulative_odds(split), rng.random(count), side="right")
    return pool.take(places)


@cache
def _cumulative_odds(split: Split) -> npt.NDArray[np.float64]:
    pool = problems(split)
    values, valid, _ = candidates(pool.numbers)
    solutions = (valid & (values == pool.targets[:, None])).sum(axis=1)
    odds = np.cumsum(solutions, dtype=np.float64)
    return odds / odds[-1]


@cache
def problems(split: Split, level: Level = THREE) -> Problems:
    """Returns every solvable problem of a split, one for each order of three numbers in 1..9.

    Of the harder levels it is one for each set of numbers, in some order.

    Problems without a solution are left out: every answer to them has reward 0, so that a group of
    answers carries no gradient and a supervised trace does not exist. A problem's split depends on
    (sorted numbers, target) only: two orders of the same numbers never lie on two sides. About 75,
    12.5 and 12.5 % of the problems are in the train, validation and test splits. The arrays are
    read-only.
    """
    whole = _solvable_problems(level)
    mine = np.isin(split_bucket(whole), _SPLIT_BUCKETS[split])
    chosen = whole.take(np.flatnonzero(mine))
    chosen.numbers.setflags(write=False)
    chosen.targets.setflags(write=False)
    return chosen


def split_bucket(batch: Problems) -> Ints:
    """Returns ``[P]`` in 0..7, a hash of (sorted numbers, target): 0..5 train, 6, 7 held out."""
    ordered = np.sort(batch.numbers, axis=1)
    places = np.array([100**power for power in range(ordered.shape[1], 0, -1)], dtype=np.int64)
    key = (ordered * places).sum(axis=1) + batch.targets
    mixed = key.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing, wraps
    return ((mixed >> np.uint64(32)) % np.uint64(8)).astype(np.int64)


@cache
def _solvable_problems(level: Level) -> Problems:
    given = range(1, level.largest + 1)
    if level == THREE:
        numbers = np.array(list(product(given, repeat=3)), dtype=np.int64)
    else:
        sets = list(combinations_with_replacement(given, level.numbers))
        numbers = np.random.default_rng(0).permuted(np.array(sets, dtype=np.int64), axis=1)
    values, valid, _ = candidates(numbers)
    targets = np.arange(1, LARGEST_VALUE + 1)
    reached = np.zeros((len(numbers), LARGEST_VALUE + 1), np.bool_)
    reached[np.nonzero(valid)[0], values[valid]] = True
    row, column = np.nonzero(reached[:, targets])
    return Problems(numbers[row], targets[column])


def prompts(batch: Problems) -> Ints:
    """Returns the prompts ``Q a b c = t :``, shape ``[P, n + 4]``."""
    out = np.empty((len(batch), batch.level.prompt_tokens), dtype=np.int64)
    out[:, 0], out[:, -3], out[:, -1] = QUESTION, EQUALS, COLON
    out[:, 1:-3], out[:, -2] = batch.numbers, batch.targets
    return out


def traces(rng: np.random.Generator, batch: Problems, max_failures: int = 5) -> tuple[Ints, Ints]:
    """Writes supervised sequences: the prompt, distinct random failures, a solution and the end.

    The number of failures is uniform in 0..``max_failures`` (bounded by the failures a problem
    has); failures and solution are drawn uniformly among the problem's distinct expressions, all
    with sound arithmetic and true verdicts.

    Args:
        rng: The only source of randomness.
        batch: Solvable problems, as ``draw`` gives them.
        max_failures: Largest number of failed tries in a trace, ≥ 0.

    Returns:
        ``(tokens, lengths)``: ``[P, n + 4 + trace_tokens(max_failures)]`` padded with ``PAD`` on
        the right, and ``[P]``, the tokens before the padding.

    Raises:
        ValueError: A problem has no solution.
    """
    level = batch.level
    values, valid, tries = candidates(batch.numbers)
    hits = valid & (values == batch.targets[:, None])
    if not hits.any(axis=1).all():
        row = int(np.argmin(hits.any(axis=1)))
        raise ValueError(
            f"expected solvable problems, found {batch.numbers[row].tolist()} with target "
            f"{batch.targets[row]}; draw them with countdown.draw"
        )
    order = rng.random(valid.shape)
    misses = valid & ~hits
    failures = np.minimum(rng.integers(max_failures + 1, size=len(batch)), misses.sum(axis=1))
    rows = np.arange(len(batch))
    sequence = np.argsort(np.where(misses, order, 2.0), axis=1)[:, : max_failures + 1]
    sequence[rows, failures] = np.argmin(np.where(hits, order, 2.0), axis=1)

    chosen = tries[rows[:, None], sequence]
    chosen[:, :, -2] = batch.targets[:, None]
    chosen[:, :, -1] = np.where(np.arange(max_failures + 1) == failures[:, None], YES, NO)
    start = level.prompt_tokens
    tokens = np.full((len(batch), start + level.trace_tokens(max_failures)), PAD, dtype=np.int64)
    tokens[:, :start] = prompts(batch)
    tokens[:, start:-1] = chosen.reshape(len(batch), -1)
    lengths = start + (failures + 1) * level.try_tokens + 1
    tokens[rows, lengths - 1] = END
    tokens[np.arange(tokens.shape[1]) >= lengths[:, None]] = PAD
    return tokens, lengths


def grade(batch: Problems, answers: Ints) -> Grades:
    """Grades answers exactly, from their tokens alone.

    Args:
        batch: The ``N`` problems, one for each answer.
        answers: ``[N, L]`` generated tokens without the prompt. What follows the first ``END`` is
            ignored; an answer without ``END`` is over-long.

    Raises:
        ValueError: The numbers of problems and answers differ.
    """
    if answers.ndim != 2 or len(answers) != len(batch):
        raise ValueError(
            f"expected answers of shape [{len(batch)}, L], one row a problem, found "
            f"{list(answers.shape)}; repeat the problems with Problems.take"
        )
    ended, lengths = _ends(answers)
    size = batch.level.try_tokens
    slots = answers.shape[1] // size
    tries = answers[:, : slots * size].reshape(len(batch), slots, size)
    try_ends = np.arange(1, slots + 1, dtype=np.int64) * size
    complete: Bools = np.less_equal(try_ends, lengths[:, None])
    formed = np.logical_and.accumulate(complete & _well_formed(tries), axis=1)
    count = formed.sum(axis=1)

    sound = _sound(tries)
    true = _reaches_target(batch, tries)
    claimed = tries[..., -1] == YES
    code = np.where(formed, expression_code(tries), -1 - np.arange(slots, dtype=np.int64))
    whole = (count > 0) & (count * size == lengths)

    return Grades(
        outcomes=_outcomes(ended, whole, _last(claimed, count), _last(sound, count),
                           _last(sound & true, count)),
        tries=count,
        repeats=(repeats(code) & formed).sum(axis=1),
        wrong_computations=(~sound & formed).sum(axis=1),
        wrong_verdicts=(((sound & true) != claimed) & formed).sum(axis=1),
    )  # fmt: skip


def _ends(answers: Ints) -> tuple[Bools, Ints]:
    """Returns whether each answer ended, and its tokens before the end or the limit."""
    ends = np.equal(answers, END)
    fenced = np.concatenate([ends, np.ones((len(answers), 1), dtype=np.bool_)], axis=1)
    lengths = np.argmax(fenced, axis=1).astype(np.int64)
    return lengths < answers.shape[1], lengths


def _outcomes(ended: Bools, whole: Bools, claimed: Bools, sound: Bools, right: Bools) -> Ints:
    return np.select(
        [~ended, ~whole, ~claimed, ~sound, ~right],
        [
            Outcome.OVERLONG,
            Outcome.MALFORMED,
            Outcome.GAVE_UP,
            Outcome.WRONG_ARITHMETIC,
            Outcome.FALSE_CLAIM,
        ],
        Outcome.SOLVED,
    ).astype(np.int64)


def _last(flags: Bools, count: Ints) -> Bools:
    """Picks ``flags[i, count[i] - 1]``, False where there is no try."""
    padded = np.concatenate([np.zeros((len(flags), 1), dtype=np.bool_), flags], axis=1)
    return padded[np.arange(len(flags)), count]


def _well_formed(tries: Ints) -> Bools:
    """``[N, S, 3n] -> [N, S]``: each slot holds a token of its kind."""
    size = tries.shape[-1]
    signs = list(range(1, size - 2, 3))
    numbers = [slot for slot in range(size - 1) if slot not in signs]
    known = ((tries[..., signs] >= PLUS) & (tries[..., signs] <= REVERSED_MINUS)).all(axis=-1)
    verdicts = (tries[..., -1] == YES) | (tries[..., -1] == NO)
    return (tries[..., numbers] <= LARGEST_VALUE).all(axis=-1) & known & verdicts


def _sound(tries: Ints) -> Bools:
    """``[N, S, 3n] -> [N, S]``: all computations are right."""
    left, signs, right, results = (tries[..., slot:-2:3] for slot in range(4))
    return (apply_operator(left[..., : signs.shape[-1]], signs, right) == results).all(axis=-1)


def _reaches_target(batch: Problems, tries: Ints) -> Bools:
    """``[N, S, 3n] -> [N, S]``: uses each given number once and ends at the target."""
    given = np.concatenate([tries[..., :1], tries[..., 2:-2:3]], axis=-1)
    used = np.sort(given, axis=-1) == np.sort(batch.numbers, axis=1)[:, None]
    target = batch.targets[:, None]
    return used.all(axis=-1) & (tries[..., -3] == target) & (tries[..., -2] == target)
