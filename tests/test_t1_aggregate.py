"""Scores of several answers, against enumeration; how the tasks vote and commit."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.t1.aggregate import NO_VOTE, best_of_n, majority, pass_at_k
from algorithms.t1.questions import Questions
from algorithms.t1.scaling import Summarising
from algorithms.t1.tasks import Countdown
from algorithms.t1.workload import WORKLOAD
from envs import countdown

FLAGS = st.lists(st.booleans(), min_size=1, max_size=7)
TASK = Countdown(3)
ROW = np.array([2, 3, 4, 20])
WORDS = {word: token for token, word in enumerate(countdown.VOCABULARY)}
RIGHT = "2 + 3 5 * 4 20 20 Y E"
SAME = "3 + 2 5 * 4 20 20 Y E"
WRONG = "2 + 3 5 + 4 9 20 N"


def answers(*texts: str) -> tuple[np.ndarray, np.ndarray]:
    rows = [[WORDS[word] for word in text.split()] for text in texts]
    lengths = np.array([len(row) for row in rows])
    width = int(lengths.max())
    tokens = [row + [countdown.END] * (width - len(row)) for row in rows]
    return np.array(tokens, np.int64), lengths.astype(np.int64)


@given(FLAGS, st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(solved, data):
    k = data.draw(st.integers(1, len(solved)))
    subsets = list(combinations(solved, k))
    expected = sum(any(one) for one in subsets) / len(subsets)
    assert pass_at_k(np.array([solved]), k) == pytest.approx(expected)


@given(FLAGS)
def test_pass_at_k_grows_from_accuracy_to_any(solved):
    scores = [pass_at_k(np.array([solved]), k) for k in range(1, len(solved) + 1)]
    assert scores == sorted(scores)
    assert scores[0] == pytest.approx(np.mean(solved))
    assert scores[-1] == any(solved)


def test_prompts_count_equally():
    solved = np.array([[True, False, False, False], [False] * 4])
    assert pass_at_k(solved, 2) == pytest.approx((1 - 3 / 6) / 2)


@pytest.mark.parametrize("k", [0, 3])
def test_more_answers_than_there_are_is_refused(k):
    with pytest.raises(ValueError, match=f"k={k}; sample more answers"):
        pass_at_k(np.ones((1, 2), np.bool_), k)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), min_size=1, max_size=7), st.data())
def test_best_of_n_is_the_mean_over_subsets_of_the_highest_valued(pairs, data):
    n = data.draw(st.integers(1, len(pairs)))
    total = Fraction(0)
    subsets = list(combinations(pairs, n))
    for subset in subsets:
        # the lot is drawn among all answers of that value: places within a value are exchangeable
        top = max(value for _, value in subset)
        equal = [right for right, value in pairs if value == top]
        total += Fraction(sum(equal), len(equal))
    solved = np.array([[right for right, _ in pairs]])
    values = np.array([[float(value) for _, value in pairs]])
    assert best_of_n(solved, values, n) == pytest.approx(float(total / len(subsets)))


@given(FLAGS)
def test_best_of_n_by_the_truth_is_pass_at_n_and_of_one_is_accuracy(solved):
    flags = np.array([solved])
    for n in range(1, len(solved) + 1):
        assert best_of_n(flags, flags.astype(np.float64), n) == pytest.approx(pass_at_k(flags, n))
    assert best_of_n(flags, np.arange(len(solved))[None] * 1.0, 1) == pytest.approx(flags.mean())


@given(st.lists(st.integers(NO_VOTE, 3), min_size=1, max_size=7), st.sets(st.integers(0, 3)))
def test_majority_draws_among_the_most_frequent_final_answers(votes, right):
    cast = [vote for vote in votes if vote != NO_VOTE]
    most = max((cast.count(vote) for vote in cast), default=0)
    leaders = {vote for vote in cast if cast.count(vote) == most}
    expected = sum(vote in right for vote in leaders) / len(leaders) if leaders else 0.0
    solved = np.array([[vote in right for vote in votes]])
    assert majority(solved, np.array([votes])) == pytest.approx(expected)


def test_a_vote_is_the_claimed_expression_and_nothing_else():
    tokens, lengths = answers(
        RIGHT, f"{WRONG} {RIGHT}", SAME, f"{WRONG} E", WRONG, "E", "2 + 3 5 + 4 9 20 Y E"
    )
    votes = TASK.votes(tokens[None], lengths[None])[0].tolist()
    assert votes[0] == votes[1] >= 0
    assert votes[3] == votes[4] == votes[5] == -1
    assert len({votes[0], votes[2], votes[6]}) == 3


@pytest.mark.parametrize(
    ("text", "solved"),
    [
        (RIGHT, True),
        (RIGHT.replace("Y E", "N"), True),  # it must stand by its last try, whatever it thought
        (f"{WRONG} {RIGHT}", True),
        (f"{RIGHT.replace('Y E', 'N')} {WRONG}", False),
        (f"{RIGHT.replace(' E', '')} 2 + 3", True),  # a try that was not finished is no answer
        ("2 + 3 5 *", False),
        ("E", False),
    ],
)
def test_a_committed_answer_is_the_last_whole_try(text, solved):
    committed, lengths = TASK.commit(*answers(text))
    grades = TASK.grade([ROW], committed[None], lengths[None])
    assert bool(grades.solved[0, 0]) is solved
    assert committed[0, lengths[0] - 1] == countdown.END


def test_questions_vote_by_value_and_commit_to_what_they_stopped_in(tmp_path: Path):
    path = tmp_path / "q.jsonl"
    rows = [{"question": f"{n}+{n}", "answer": str(2 * n)} for n in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = Questions(replace(WORKLOAD.recipe("smoke"), questions=str(path)))
    assert isinstance(task, Summarising)
    assert isinstance(TASK, Summarising)
    texts = ["#### 1.50", "so\n#### 3/2", "#### Two", "#### two ", "none"]
    encoded = [[*text.encode(), task.end_token] for text in texts] + [list(b"#### 7")]
    lengths = np.array([len(one) for one in encoded])
    tokens = np.array([one + [task.end_token] * (20 - len(one)) for one in encoded])
    votes = task.votes(tokens[None], lengths[None])[0].tolist()
    assert votes[0] == votes[1] != votes[2] == votes[3]
    assert votes[4] == votes[5] == -1
    committed, ends = task.commit(tokens, lengths)
    assert ends.tolist() == [*lengths[:5], lengths[5] + 1]
    assert task.votes(committed[None], ends[None])[0, 5] >= 0
