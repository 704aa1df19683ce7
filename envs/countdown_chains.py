"""Chains of operations on given numbers: what a try of countdown may compute.

A chain of ``n`` numbers is ``a o b x p c y …``: ``x = a o b``, ``y = x p c`` and so on, ``3n - 2``
tokens. Arrays: ``P`` problems, ``C`` candidates of each: 36 for three numbers, 576 for four.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations, permutations, product
from typing import Final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

LARGEST_VALUE: Final = 99
"""Targets lie in 1..99, intermediate values in 0..99; the token of a number is the number."""

PLUS: Final = 103
MINUS: Final = 104
TIMES: Final = 105
REVERSED_MINUS: Final = 106


def candidates(numbers: Ints) -> tuple[Ints, Bools, Ints]:
    """Lists the candidate chains of each problem.

    A candidate picks a pair of the numbers ``[P, n]`` and then the others in some order, one of
    ``+ - *`` for the pair (larger minus smaller, prompt order for the others) and one of the four
    operators for each other number. It is valid when all values lie in 0..99 and no earlier
    candidate of the problem reads the same.

    Returns:
        ``(values [P, C], valid [P, C], tries [P, C, 3n])``; the last two tokens of a try are left
        to the caller.
    """
    columns = [_chain(numbers, order, signs) for order, signs in _plans(numbers.shape[1])]
    tries = np.stack(columns, axis=1)
    results = tries[..., 3:-2:3]
    valid = ((results >= 0) & (results <= LARGEST_VALUE)).all(axis=-1)
    valid &= ~((tries[..., 4:-2:3] == REVERSED_MINUS) & (results[..., 1:] == 0)).any(axis=-1)
    return tries[..., -3], valid & ~repeats(expression_code(tries)), tries


@cache
def _plans(count: int) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """Lists (order of the numbers, operators) of all candidates."""
    orders = [
        (*pair, *rest)
        for pair in combinations(range(count), 2)
        for rest in permutations([i for i in range(count) if i not in pair])
    ]
    later = (PLUS, MINUS, TIMES, REVERSED_MINUS)
    signs = list(product((PLUS, MINUS, TIMES), *[later] * (count - 2)))
    return tuple(product(orders, signs))


def _chain(numbers: Ints, order: tuple[int, ...], signs: tuple[int, ...]) -> Ints:
    a, b = numbers[:, order[0]], numbers[:, order[1]]
    if signs[0] == MINUS:
        a, b = np.maximum(a, b), np.minimum(a, b)
    words, value = [a], a
    for sign, right in zip(signs, [b, *(numbers[:, i] for i in order[2:])], strict=True):
        operator = np.full_like(a, sign)
        value = apply_operator(value, operator, right)
        words += [operator, right, value]
    blank = np.zeros_like(a)
    return np.stack([*words, blank, blank], axis=1)


def apply_operator(left: Ints, operator: Ints, right: Ints) -> Ints:
    """Returns ``left operator right`` elementwise; the result may leave 0..99.

    Tokens that are no operator act like ``~``: check them before.
    """
    return np.select(
        [operator == PLUS, operator == MINUS, operator == TIMES],
        [left + right, left - right, left * right],
        right - left,
    )


def expression_code(tries: Ints) -> Ints:
    """Packs the free tokens of each try, ``[..., 3n] -> [...]``, into one integer; n is 3 or 4."""
    code = tries[..., 0]
    for start in range(1, tries.shape[-1] - 2, 3):
        code = (code << 14) | (tries[..., start] << 7) | tries[..., start + 1]
    return code


def repeats(codes: Ints) -> Bools:
    """``[P, C] -> [P, C]``: whether an earlier code of the row is the same."""
    order = np.argsort(codes, axis=1, kind="stable")
    ordered = np.take_along_axis(codes, order, axis=1)
    same = np.zeros(codes.shape, np.bool_)
    np.put_along_axis(same, order[:, 1:], ordered[:, 1:] == ordered[:, :-1], axis=1)
    return same
