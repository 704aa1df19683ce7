"""The countdown environment against hand-written answers and a slow, independent grader."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs import countdown
from envs.countdown import LEVELS, Outcome, Problems

WORDS = {word: token for token, word in enumerate(countdown.VOCABULARY)}
OPERATORS = {
    "+": lambda u, v: u + v,
    "-": lambda u, v: u - v,
    "*": lambda u, v: u * v,
    "~": lambda u, v: v - u,
}


def tokens(text: str) -> np.ndarray:
    return np.array([[WORDS[word] for word in text.split()]], dtype=np.int64)


def grade(text: str, numbers: tuple[int, ...] = (4, 7, 2), target: int = 26) -> countdown.Grades:
    problem = Problems(np.array([numbers], dtype=np.int64), np.array([target], dtype=np.int64))
    return countdown.grade(problem, tokens(text))


def slow_outcome(numbers: list[int], target: int, answer: list[int]) -> Outcome:
    """Grades one answer word by word, the way one would read it."""
    words = [countdown.VOCABULARY[token] for token in answer]
    if "E" not in words:
        return Outcome.OVERLONG
    words = words[: words.index("E")]
    size = 3 * len(numbers)
    tries = [words[i : i + size] for i in range(0, len(words), size)]
    for one in tries:
        signs = range(1, size - 2, 3)
        if len(one) != size or any(one[i] not in OPERATORS for i in signs) or one[-1] not in "YN":
            return Outcome.MALFORMED
        if not all(one[i].isdigit() for i in range(size - 1) if i not in signs):
            return Outcome.MALFORMED
    return slow_outcome_of_last(numbers, target, tries[-1]) if tries else Outcome.MALFORMED


def slow_outcome_of_last(numbers: list[int], target: int, last: list[str]) -> Outcome:
    first, *chain, claimed, verdict = last
    if verdict == "N":
        return Outcome.GAVE_UP
    value, used = int(first), [int(first)]
    for sign, right, result in zip(chain[::3], chain[1::3], chain[2::3], strict=True):
        if OPERATORS[sign](value, int(right)) != int(result):
            return Outcome.WRONG_ARITHMETIC
        value = int(result)
        used.append(int(right))
    right = sorted(used) == sorted(numbers) and value == int(claimed) == target
    return Outcome.SOLVED if right else Outcome.FALSE_CLAIM


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ("4 * 7 28 - 2 26 26 Y E", Outcome.SOLVED),
        ("7 * 4 28 - 2 26 26 Y E", Outcome.SOLVED),
        ("4 + 7 11 * 2 22 26 N 4 * 7 28 - 2 26 26 Y E", Outcome.SOLVED),
        ("4 + 7 11 * 2 22 26 Y E", Outcome.FALSE_CLAIM),
        ("4 + 7 11 * 2 22 22 Y E", Outcome.FALSE_CLAIM),
        ("4 * 7 28 - 2 26 27 Y E", Outcome.FALSE_CLAIM),
        ("4 * 4 16 + 10 26 26 Y E", Outcome.FALSE_CLAIM),
        ("4 + 7 13 * 2 26 26 Y E", Outcome.WRONG_ARITHMETIC),
        ("4 * 7 28 ~ 2 26 26 Y E", Outcome.WRONG_ARITHMETIC),
        ("4 + 7 11 * 2 22 26 N E", Outcome.GAVE_UP),
        ("4 * 7 28 - 2 26 26 Y", Outcome.OVERLONG),
        ("4 + 7 11 * 2 22 26 N 4 * 7", Outcome.OVERLONG),
        ("E", Outcome.MALFORMED),
        ("4 * 7 28 - 2 26 Y E", Outcome.MALFORMED),
        ("4 7 * 28 - 2 26 26 Y E", Outcome.MALFORMED),
        ("4 * 7 28 - 2 26 26 _ E", Outcome.MALFORMED),
        ("4 * 7 28 - 2 26 26 Y Y E", Outcome.MALFORMED),
    ],
)
def test_an_answer_gets_the_outcome_it_deserves(answer: str, outcome: Outcome) -> None:
    assert Outcome(grade(answer).outcomes[0]) is outcome


def test_what_follows_the_end_does_not_count() -> None:
    assert grade("4 * 7 28 - 2 26 26 Y E 4 + 7 _ _").solved.tolist() == [True]


def test_counts_of_a_hand_written_answer() -> None:
    grades = grade(
        "4 + 7 11 * 2 22 26 N "  # fine
        "4 + 7 11 * 2 23 26 N "  # the same expression, miscalculated
        "4 * 7 28 - 2 26 26 N "  # right, but called a failure
        "4 + 7 11 * 2 22 26 Y E"  # the first again, called a solution
    )
    assert grades.tries.tolist() == [4]
    assert grades.repeats.tolist() == [2]
    assert grades.wrong_computations.tolist() == [1]
    assert grades.wrong_verdicts.tolist() == [2]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), damage=st.integers(0, 3), name=st.sampled_from([*LEVELS]))
def test_grading_equals_a_word_by_word_reading(seed: int, damage: int, name: str) -> None:
    rng = np.random.default_rng(seed)
    pool = countdown.problems("train", LEVELS[name])
    batch = pool.take(rng.integers(len(pool), size=20))
    answers = countdown.traces(rng, batch)[0][:, LEVELS[name].prompt_tokens :]
    for _ in range(damage):
        columns = rng.integers(answers.shape[1], size=len(batch))
        answers[np.arange(len(batch)), columns] = rng.integers(len(WORDS), size=len(batch))
    expected = [
        slow_outcome(batch.numbers[i].tolist(), int(batch.targets[i]), answers[i].tolist())
        for i in range(len(batch))
    ]
    assert countdown.grade(batch, answers).outcomes.tolist() == expected


@pytest.mark.parametrize("name", LEVELS)
def test_splits_share_no_problem_in_any_order_of_its_numbers(name: str) -> None:
    keys = []
    for split in ("train", "validation", "test"):
        pool = countdown.problems(split, LEVELS[name])
        rows = zip(np.sort(pool.numbers, axis=1).tolist(), pool.targets.tolist(), strict=True)
        keys.append({(*numbers, target) for numbers, target in rows})
    assert all(not left & right for left, right in itertools.combinations(keys, 2))
    shares = np.array([len(key) for key in keys]) / sum(map(len, keys))
    np.testing.assert_allclose(shares, [0.75, 0.125, 0.125], atol=0.02)


def test_a_problem_is_as_likely_as_it_has_solutions() -> None:
    batch = countdown.draw(np.random.default_rng(0), "test", 200_000)
    rows = np.column_stack([batch.numbers, batch.targets])
    pool = countdown.problems("test")
    found, counts = np.unique(rows, axis=0, return_counts=True)
    assert len(found) == len(pool) > 1024
    solutions = []
    for *numbers, target in found.tolist():
        texts = set()
        for (i, j, k), first, second in itertools.product(
            [(0, 1, 2), (0, 2, 1), (1, 2, 0)], "+-*", OPERATORS
        ):
            a, b, c = (numbers[index] for index in (i, j, k))
            a, b = (max(a, b), min(a, b)) if first == "-" else (a, b)
            x = OPERATORS[first](a, b)
            if x <= 99 and OPERATORS[second](x, c) == target:
                texts.add((a, first, b, second, c))
        solutions.append(len(texts))
    expected = np.array(solutions) / sum(solutions)
    np.testing.assert_allclose(counts / 200_000, expected, rtol=0.5, atol=5e-4)


def test_the_problems_are_exactly_the_solvable_ones() -> None:
    solvable = set()
    for numbers in itertools.product(range(1, 10), repeat=3):
        for a, b, c in itertools.permutations(numbers):
            for first, second in itertools.product(OPERATORS.values(), repeat=2):
                x = first(a, b)
                y = second(x, c)
                if 0 <= x <= 99 and 1 <= y <= 99:
                    solvable.add((*numbers, y))
    found = set()
    for split in ("train", "validation", "test"):
        pool = countdown.problems(split)
        found |= set(map(tuple, np.column_stack([pool.numbers, pool.targets]).tolist()))
    assert found == solvable


@pytest.mark.parametrize(("name", "count"), [("three", 2000), ("wide", 400), ("four", 100)])
def test_traces_are_sound_true_distinct_and_solved(name: str, count: int) -> None:
    rng, level = np.random.default_rng(3), LEVELS[name]
    pool = countdown.problems("train", level)
    batch = pool.take(rng.integers(len(pool), size=count))
    sequences, lengths = countdown.traces(rng, batch, max_failures=5)
    start = level.prompt_tokens
    assert sequences.shape == (count, start + level.trace_tokens(5))
    np.testing.assert_array_equal(sequences[:, :start], countdown.prompts(batch))
    grades = countdown.grade(batch, sequences[:, start:])
    assert grades.solved.all()
    assert not (grades.repeats + grades.wrong_computations + grades.wrong_verdicts).any()
    np.testing.assert_array_equal(lengths, start + level.try_tokens * grades.tries + 1)
    np.testing.assert_array_equal((sequences != countdown.PAD).sum(axis=1), lengths)
    shares = np.bincount(grades.tries, minlength=7)[1:] / count
    np.testing.assert_allclose(shares, 1 / 6, atol=2.5 / count**0.5)


def test_four_numbers_of_a_hand_written_answer() -> None:
    right = "8 + 4 12 * 5 60 + 9 69 69 Y E"
    assert grade(right, (8, 4, 5, 9), 69).solved.tolist() == [True]
    cases = {
        "8 + 4 12 * 5 60 + 8 68 69 Y E": Outcome.FALSE_CLAIM,
        "8 + 4 12 * 5 61 + 9 70 69 Y E": Outcome.WRONG_ARITHMETIC,
        "8 + 4 12 * 5 60 60 Y E": Outcome.MALFORMED,  # a try of three numbers
    }
    for text, outcome in cases.items():
        assert Outcome(grade(text, (8, 4, 5, 9), 69).outcomes[0]) is outcome


def test_a_prompt_reads_as_documented() -> None:
    problem = Problems(np.array([[4, 7, 2]]), np.array([26]))
    np.testing.assert_array_equal(countdown.prompts(problem), tokens("Q 4 7 2 = 26 :"))


def test_the_same_generator_gives_the_same_problems_and_traces() -> None:
    first, second = (
        countdown.traces(rng, countdown.draw(rng, "train", 64))[0]
        for rng in (np.random.default_rng(5), np.random.default_rng(5))
    )
    np.testing.assert_array_equal(first, second)


def test_unsolvable_problems_and_misfits_are_refused() -> None:
    rng = np.random.default_rng(0)
    hopeless = Problems(np.array([[1, 1, 1]]), np.array([99]))
    with pytest.raises(ValueError, match=r"solvable problems, found \[1, 1, 1\]"):
        countdown.traces(rng, hopeless)
    with pytest.raises(ValueError, match=r"shape \[1, L\]"):
        countdown.grade(hopeless, np.zeros((2, 9), dtype=np.int64))
