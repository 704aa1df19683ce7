"""The user's own questions: read strictly, split by their text, graded exactly."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.t1.questions import (
    Question,
    Questions,
    final_value,
    read_questions,
    same_value,
    split_of,
)
from algorithms.t1.tasks import PADDING
from algorithms.t1.workload import WORKLOAD
from heliostat.errors import UsageError


def written(folder: Path, count: int = 60) -> Path:
    path = folder / "sums.jsonl"
    rows = [
        {"question": f"{a} + {a + 1}?", "answer": str(2 * a + 1), "solution": f"{a}+{a + 1}"}
        for a in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", r"bad\.jsonl:2: expected a JSON object"),
        ('{"question": "1+1?"}', r"bad\.jsonl:2: expected a question and an answer"),
        ('{"question": "1+1?", "answer": 2}', r"bad\.jsonl:2: expected texts.*quote numbers"),
        ('{"question": " ", "answer": "2"}', r"bad\.jsonl:2: expected a question and an answer"),
        ("[]", r"bad\.jsonl:2: expected a JSON object"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"question": "1+1?", "answer": "2"}\n' + line + "\n")
    with pytest.raises(UsageError, match=words):
        read_questions(path)


def test_a_missing_file_is_refused_before_a_run() -> None:
    with pytest.raises(UsageError, match=r"questions: expected a JSONL file, found none at 'no'"):
        WORKLOAD.recipe("smoke").override("questions=no").check()


@given(st.text(min_size=1))
def test_a_repeated_question_never_crosses_splits(text: str) -> None:
    assert split_of(text) == split_of(f" {text.strip()}\n")


def test_splits_are_disjoint_and_cover_the_file(tmp_path: Path) -> None:
    task = Questions(str(written(tmp_path)), "")
    parts = [task.rows(split) for split in ("train", "validation", "test")]
    assert sum(map(len, parts)) == 60
    assert len({row.question for part in parts for row in part}) == 60
    assert len(parts[0]) > len(parts[1])


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("so #### 5", "5"),
        (r"\boxed{7} wait, no: \boxed{5}", "5"),
        ("#### 4\nno, #### 5 ", "5"),
        ("the answer is 5", None),
        ("#### ", None),
    ],
)
def test_the_last_marked_value_counts(answer: str, value: str | None) -> None:
    assert final_value(answer) == value


@pytest.mark.parametrize(
    ("given_text", "gold", "equal"),
    [
        ("6/8", "3/4", True),
        ("0.5", "1/2", True),
        ("1,000", "1000", True),
        ("$18", "18", True),
        ("1/0", "1/0", True),
        ("5  CM", "5 cm", True),
        ("1e3", "1000", False),
        ("3.14", "3.1400000001", False),
        ("", "0", False),
        ("34", "3,4", False),
        ("12", "1 2", False),
        ("1,234.5", "1234.50", True),
        ("-3/6", "-0.5", True),
    ],
)
def test_values_are_compared_exactly(given_text: str, gold: str, equal: bool) -> None:
    assert same_value(given_text, gold) is equal


def test_a_hostile_answer_ends_in_time_and_earns_nothing() -> None:
    start = time.process_time()
    for bomb in ("9" * 100_000, "9^" * 50_000, "####" * 50_000, "1/" * 50_000, "(" * 100_000):
        value = final_value("#### " + bomb)
        assert value is None or not same_value(value, "5")
    assert time.process_time() - start < 5


def test_a_taught_trace_is_graded_right_and_a_cut_one_is_not(tmp_path: Path) -> None:
    task = Questions(str(written(tmp_path)), "")
    rows = task.rows("train")[:4]
    tokens, chosen = task.traces(rows, 0)
    answers = [row[mask] for row, mask in zip(tokens, chosen, strict=True)]
    longest = max(map(len, answers))
    whole = np.full((4, 1, longest), task.end_token)
    for place, answer in enumerate(answers):
        whole[place, 0, : len(answer)] = answer
    lengths = np.array([[len(answer)] for answer in answers])
    assert task.grade(rows, whole, lengths).solved.all()
    assert not task.grade(rows, whole, lengths - 1).solved.any()
    other = task.grade([rows[1], rows[0], *rows[2:]], whole, lengths)
    assert other.false_claims[:, 0].tolist() == [True, True, False, False]


def test_prompts_are_padded_on_the_left_and_read_back(tmp_path: Path) -> None:
    task = Questions(str(written(tmp_path)), "")
    prompts = task.prompts([Question("short", "1"), Question("rather longer", "2")])
    assert prompts[0, 0] == PADDING
    assert (prompts[:, -1] == ord("\n")).all()
    assert task.text(prompts[0]) == "short\n"
