"""Countdown with three numbers: a reasoning task with trial, error and self-verification.

A prompt gives three numbers and a target, an answer is a chain of tries, one token a word:

    Q 4 7 2 = 26 :   4 + 7 11 * 2 22 26 N   4 * 7 28 - 2 26 26 Y   E
    prompt           first try: wrong       second try: right      end

A try ``a o b x p c y t V`` computes ``x = a o b`` and ``y = x p c``, repeats the target ``t`` and
ends with the verdict ``V`` of its author: ``Y`` for a solution, ``N`` for a failure. The last try
is the answer. The operators are ``+ - * ~``, where ``u ~ v`` is the reversed difference ``v - u``.
Everything is recomputed from the tokens by ``grade``; no text is parsed.

Training traces hold failures before the success, which is the cold start of T1 (arXiv 2501.11651,
section 2: trial and error with self-verification) in miniature.

Arrays: ``P`` problems, ``N`` answers, ``L`` tokens, ``C`` = 36 candidate expressions of a problem.
All tokens are int64.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from itertools import product
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Split = Literal["train", "validation", "test"]

LARGEST_NUMBER: Final = 9
"""The three given numbers lie in 1..9."""
LARGEST_VALUE: Final = 99
"""Targets lie in 1..99, intermediate values in 0..99; the token of a number is the number."""

QUESTION: Final = 100
EQUALS: Final = 101
COLON: Final = 102
PLUS: Final = 103
MINUS: Final = 104
TIMES: Final = 105
REVERSED_MINUS: Final = 106
YES: Final = 107
NO: Final = 108
END: Final = 109
PAD: Final = 110

VOCABULARY: Final[tuple[str, ...]] = (*map(str, range(LARGEST_VALUE + 1)), *"Q=:+-*~YNE_")
"""The word of each token."""

PROMPT_TOKENS: Final = 7
TRY_TOKENS: Final = 9

_PAIRS: Final = ((0, 1, 2), (0, 2, 1), (1, 2, 0))
_SPLIT_BUCKETS: Final[dict[Split, tuple[int, ...]]] = {
    "train": (0, 1, 2, 3, 4, 5),
    "validation": (6,),
    "test": (7,),
}


@dataclass(frozen=True, slots=True)
class Problems:
    """A batch of problems.

    Attributes:
        numbers: ``[P, 3]``, 1..9, in the order of the prompt.
        targets: ``[P]``, 1..99.
    """

    numbers: Ints
    targets: Ints

    def __len__(self) -> int:
        """Returns the number of problems, ``P``."""
        return len(self.targets)

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
    """Draws problems of a split, independently, each as the value of a random expression.

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
    values, valid, _ = _candidates(pool.numbers)
    solutions = (valid & (values == pool.targets[:, None])).sum(axis=1)
    odds = np.cumsum(solutions, dtype=np.float64)
    return odds / odds[-1]


@cache
def problems(split: Split) -> Problems:
    """Returns every solvable problem of a split, one for each order of the numbers.

    Problems without a solution are left out: every answer to them has reward 0, so that a group of
    answers carries no gradient and a supervised trace does not exist. A problem's split depends on
    (sorted numbers, target) only: two orders of the same numbers never lie on two sides. About 75,
    12.5 and 12.5 % of the problems are in the train, validation and test splits. The arrays are
    read-only.
    """
    whole = _solvable_problems()
    mine = np.isin(split_bucket(whole), _SPLIT_BUCKETS[split])
    chosen = whole.take(np.flatnonzero(mine))
    chosen.numbers.setflags(write=False)
    chosen.targets.setflags(write=False)
    return chosen


def split_bucket(batch: Problems) -> Ints:
    """Returns ``[P]`` in 0..7, a hash of (sorted numbers, target): 0..5 train, 6, 7 held out."""
    ordered = np.sort(batch.numbers, axis=1)
    key = (ordered * (1_000_000, 10_000, 100)).sum(axis=1) + batch.targets
    mixed = key.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing, wraps
    return ((mixed >> np.uint64(32)) % np.uint64(8)).astype(np.int64)


@cache
def _solvable_problems() -> Problems:
    numbers = np.array(list(product(range(1, LARGEST_NUMBER + 1), repeat=3)), dtype=np.int64)
    values, valid, _ = _candidates(numbers)
    targets = np.arange(1, LARGEST_VALUE + 1)
    solvable = (np.where(valid, values, -1)[:, :, None] == targets).any(axis=1)
    row, column = np.nonzero(solvable)
    return Problems(numbers[row], targets[column])


def prompts(batch: Problems) -> Ints:
    """Returns the prompts ``Q a b c = t :``, shape ``[P, 7]``."""
    out = np.empty((len(batch), PROMPT_TOKENS), dtype=np.int64)
    out[:, 0], out[:, 4], out[:, 6] = QUESTION, EQUALS, COLON
    out[:, 1:4], out[:, 5] = batch.numbers, batch.targets
    return out


def trace_tokens(max_failures: int) -> int:
    """Returns the length of the longest supervised answer: its tries and the end token.

    Sampling beyond it reaches positions that training never showed; use it as the length limit.
    """
    return (max_failures + 1) * TRY_TOKENS + 1


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
        ``(tokens, lengths)``: ``[P, 7 + trace_tokens(max_failures)]`` padded with ``PAD`` on the
        right, and ``[P]``, the tokens before the padding.

    Raises:
        ValueError: A problem has no solution.
    """
    values, valid, tries = _candidates(batch.numbers)
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
    chosen[:, :, 7] = batch.targets[:, None]
    chosen[:, :, 8] = np.where(np.arange(max_failures + 1) == failures[:, None], YES, NO)
    tokens = np.full((len(batch), PROMPT_TOKENS + trace_tokens(max_failures)), PAD, dtype=np.int64)
    tokens[:, :PROMPT_TOKENS] = prompts(batch)
    tokens[:, PROMPT_TOKENS:-1] = chosen.reshape(len(batch), -1)
    lengths = PROMPT_TOKENS + (failures + 1) * TRY_TOKENS + 1
    tokens[rows, lengths - 1] = END
    tokens[np.arange(tokens.shape[1]) >= lengths[:, None]] = PAD
    return tokens, lengths


def _candidates(numbers: Ints) -> tuple[Ints, Bools, Ints]:
    """Lists the candidate expressions of each problem.

    A candidate picks a pair (the other number is third), one of ``+ - *`` for it (larger minus
    smaller, prompt order for the others) and one of the four operators for the third. It is valid
    when both values lie in 0..99 and no earlier candidate of the problem reads the same.

    Returns:
        ``(values [P, 36], valid [P, 36], tries [P, 36, 9])``; the last two tokens of a try are
        left to the caller.
    """
    columns = [
        _candidate(numbers[:, i], numbers[:, j], numbers[:, k], first, second)
        for i, j, k in _PAIRS
        for first in (PLUS, MINUS, TIMES)
        for second in (PLUS, MINUS, TIMES, REVERSED_MINUS)
    ]
    tries = np.stack(columns, axis=1)
    x, y = tries[..., 3], tries[..., 6]
    in_range = (x >= 0) & (x <= LARGEST_VALUE) & (y >= 0) & (y <= LARGEST_VALUE)
    zero_twice = (tries[..., 4] == REVERSED_MINUS) & (y == 0)
    code = _expression_code(tries)
    seen = np.tril(code[:, :, None] == code[:, None, :], k=-1).any(axis=2)
    return y, in_range & ~zero_twice & ~seen, tries


def _candidate(a: Ints, b: Ints, c: Ints, first: int, second: int) -> Ints:
    if first == MINUS:
        a, b = np.maximum(a, b), np.minimum(a, b)
    left, right = np.full_like(a, first), np.full_like(a, second)
    x = apply_operator(a, left, b)
    y = apply_operator(x, right, c)
    blank = np.zeros_like(a)
    return np.stack([a, left, b, x, right, c, y, blank, blank], axis=1)


def apply_operator(left: Ints, operator: Ints, right: Ints) -> Ints:
    """Returns ``left operator right`` elementwise; the result may leave 0..99.

    Tokens that are no operator act like ``~``: check them before.
    """
    return np.select(
        [operator == PLUS, operator == MINUS, operator == TIMES],
        [left + right, left - right, left * right],
        right - left,
    )


def _expression_code(tries: Ints) -> Ints:
    """Packs the five free tokens of each try, ``[..., 9] -> [...]``, into one integer."""
    code = tries[..., 0]
    for slot in (1, 2, 4, 5):
        code = code * len(VOCABULARY) + tries[..., slot]
    return code


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
    slots = answers.shape[1] // TRY_TOKENS
    tries = answers[:, : slots * TRY_TOKENS].reshape(len(batch), slots, TRY_TOKENS)
    try_ends = np.arange(1, slots + 1, dtype=np.int64) * TRY_TOKENS
    complete: Bools = np.less_equal(try_ends, lengths[:, None])
    formed = np.logical_and.accumulate(complete & _well_formed(tries), axis=1)
    count = formed.sum(axis=1)

    sound = _sound(tries)
    true = _reaches_target(batch, tries)
    claimed = tries[..., 8] == YES
    code = np.where(formed, _expression_code(tries), -1 - np.arange(slots, dtype=np.int64))
    repeated = np.tril(code[:, :, None] == code[:, None, :], k=-1).any(axis=2)

    return Grades(
        outcomes=_outcomes(ended, count, lengths, _last(claimed, count), _last(sound, count),
                           _last(sound & true, count)),
        tries=count,
        repeats=(repeated & formed).sum(axis=1),
        wrong_computations=(~sound & formed).sum(axis=1),
        wrong_verdicts=(((sound & true) != claimed) & formed).sum(axis=1),
    )  # fmt: skip


def _ends(answers: Ints) -> tuple[Bools, Ints]:
    """Returns whether each answer ended, and its tokens before the end or the limit."""
    ends = np.equal(answers, END)
    fenced = np.concatenate([ends, np.ones((len(answers), 1), dtype=np.bool_)], axis=1)
    lengths = np.argmax(fenced, axis=1).astype(np.int64)
    return lengths < answers.shape[1], lengths


def _outcomes(
    ended: Bools, count: Ints, lengths: Ints, claimed: Bools, sound: Bools, right: Bools
) -> Ints:
    whole = (count > 0) & (count * TRY_TOKENS == lengths)
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
    """``[N, S, 9] -> [N, S]``: each slot holds a token of its kind."""
    numbers = (tries[..., (0, 2, 3, 5, 6, 7)] <= LARGEST_VALUE).all(axis=-1)
    operators = tries[..., (1, 4)]
    known = ((operators >= PLUS) & (operators <= REVERSED_MINUS)).all(axis=-1)
    verdicts = (tries[..., 8] == YES) | (tries[..., 8] == NO)
    return numbers & known & verdicts


def _sound(tries: Ints) -> Bools:
    """``[N, S, 9] -> [N, S]``: both computations are right."""
    a, o, b, x, p, c, y = (tries[..., slot] for slot in range(7))
    return (apply_operator(a, o, b) == x) & (apply_operator(x, p, c) == y)


def _reaches_target(batch: Problems, tries: Ints) -> Bools:
    """``[N, S, 9] -> [N, S]``: uses each given number once and ends at the target."""
    used = np.sort(tries[..., (0, 2, 5)], axis=-1) == np.sort(batch.numbers, axis=1)[:, None]
    target = batch.targets[:, None]
    return used.all(axis=-1) & (tries[..., 6] == target) & (tries[..., 7] == target)
