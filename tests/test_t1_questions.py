"""The user's own questions: read strictly, split by their text, graded exactly."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.t1 import audit
from algorithms.t1.answers import final_value, same_value
from algorithms.t1.batches import Batch
from algorithms.t1.dataset import Question, leaks, read_file, split_of
from algorithms.t1.questions import Questions, load_splits
from algorithms.t1.roles import Answering, score_answers
from algorithms.t1.tasks import PADDING
from algorithms.t1.verifier import Reason
from algorithms.t1.workload import WORKLOAD
from heliostat.actors.environment import Episodes
from heliostat.errors import UsageError

RECIPE = WORKLOAD.recipe("smoke")


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
        (
            '{"problem": "1+1?", "solution": "two"}',
            r"bad\.jsonl:2: expected an answer, or a .boxed",
        ),
        ('{"problem": "1+1?", "answer": 2.5}', r"bad\.jsonl:2: expected texts"),
        ('{"problem": "1+1?", "answer": true}', r"bad\.jsonl:2: expected texts"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"question": "1+1?", "answer": "2"}\n' + line + "\n")
    with pytest.raises(UsageError, match=words):
        read_file(path)


def test_a_missing_file_is_refused_before_a_run() -> None:
    with pytest.raises(UsageError, match=r"questions: expected a JSONL file, found none at 'no'"):
        WORKLOAD.recipe("smoke").override("questions=no").check()


@given(st.text(min_size=1))
def test_a_repeated_question_never_crosses_splits(text: str) -> None:
    assert split_of(text) == split_of(f" {text.strip()}\n")


def test_splits_are_disjoint_and_cover_the_file(tmp_path: Path) -> None:
    task = Questions(replace(RECIPE, questions=str(written(tmp_path))))
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
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\boxed{3}} done", "3"),
        (r"\boxed{5} and then \boxed{6", "5"),
        (r"so $\boxed 2$.", "2"),
        (r"#### \boxed{7}", "7"),
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
        ("1e3", "1000", True),
        ("1e99", "1", False),
        (r"\$18", "18", True),
        (r"\frac{3}{4}", "0.75", True),
        (r"-\frac34", "-.75", True),
        ("1{,}000", "1000", True),
        (r"\text{Tuesday}", "tuesday", True),
        ("Monday", "Tuesday", False),
        ("3.14", "3.1400000001", False),
        ("", "0", False),
        ("34", "3,4", False),
        ("12", "1 2", False),
        ("1,234.5", "1234.50", True),
        ("-3/6", "-0.5", True),
    ],
)
def test_values_are_compared_exactly(given_text: str, gold: str, equal: bool) -> None:
    assert bool(same_value(given_text, gold)) is equal


def test_a_hostile_answer_ends_in_time_and_earns_nothing() -> None:
    start = time.process_time()
    for bomb in ("9" * 99_999, "9^" * 50_000, "####" * 50_000, "1/" * 50_000, r"\boxed{" * 50_000):
        value = final_value("#### " + bomb)
        assert value is None or not same_value(value, "5")
    assert time.process_time() - start < 5


def test_a_taught_trace_is_graded_right_and_a_cut_one_is_not(tmp_path: Path) -> None:
    task = Questions(replace(RECIPE, questions=str(written(tmp_path))))
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
    task = Questions(replace(RECIPE, questions=str(written(tmp_path))))
    prompts = task.prompts([Question("short", "1"), Question("rather longer", "2")])
    assert prompts[0, 0] == PADDING
    assert (prompts[:, -1] == ord("\n")).all()
    assert task.text(prompts[0]) == "short\n"


@pytest.mark.parametrize(
    ("line", "answer", "solution"),
    [
        ({"question": "Q?", "answer": "3 + 4 = 7\n#### 7"}, "7", "3 + 4 = 7"),
        ({"problem": "Q?", "solution": r"so $\boxed{\frac{1}{2}}$."}, r"\frac{1}{2}", None),
        ({"Problem": "Q?", "Answer": 204, "ID": "2024-I-1"}, "204", ""),
        ({"problem": "Q?", "answer": "204", "solution": "work"}, "204", "work"),
    ],
)
def test_the_forms_of_gsm8k_math_and_aime_are_known_by_their_keys(
    tmp_path: Path, line: dict[str, object], answer: str, solution: str | None
) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(line))
    (found,) = read_file(path).questions
    assert found.question == "Q?"
    assert found.answer == answer
    assert found.solution == (line["solution"] if solution is None else solution)


def test_a_wrong_encoding_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"question": "1+1?", "answer": "2"}\n{"question": "\xe9", "answer": "2"}')
    with pytest.raises(UsageError, match=r"bad\.jsonl:2: expected UTF-8 text"):
        read_file(path)


def lines(path: Path, *rows: tuple[str, str]) -> Path:
    path.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows))
    return path


def test_a_repeated_question_is_kept_once_and_a_disputed_one_not_at_all(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "a.jsonl",
        ("a half?", "1/2"),
        ("a  half?\n", "0.5"),
        ("disputed?", "1"),
        ("disputed?", "2"),
        ("disputed?", "1"),
        ("lost \ufffd?", "3"),
    )
    found = read_file(path)
    assert [one.question for one in found.questions] == ["a half?", "lost \ufffd?"]
    assert (found.duplicates, found.conflicts, found.garbled) == (1, ("disputed?",), 1)


STORY = "Ann has 3 red apples and 4 green pears in a very big basket made of old wood, how many?"
NEARLY = STORY.replace("wood", "straw")
OTHER = "Ben walks 5 miles to the market every day but rides back home by bus, how many per week?"


@pytest.mark.parametrize(
    ("test", "overlap"),
    [(STORY.upper().replace(",", ""), 1.0), (NEARLY, 10 / 16), (OTHER, 0.0), ("Short?", 1.0)],
)
def test_leaks_are_exact_or_share_most_phrases(test: str, overlap: float) -> None:
    train = [Question(STORY, "7"), Question("short", "1"), Question("1 - 2 = ?", "-1")]
    found = leaks(train, [Question(test, "7")], least=0.5)
    assert [leak.overlap for leak in found] == ([pytest.approx(overlap)] if overlap else [])
    assert leaks(train, [Question("1 + 2 = ?", "3")]) == []


def test_wording_that_a_whole_set_shares_is_no_leak() -> None:
    text = "Work out the sum of these two numbers and give it as one number in digits: {} + {}"
    train = [Question(text.format(a, 1), str(a + 1)) for a in range(30)]
    test = [Question(text.format(a, 2), str(a + 2)) for a in range(30)]
    assert leaks(train, test) == []
    assert len(leaks(train, [*test, train[4]])) == 1


def test_leaked_test_questions_are_dropped_refused_or_reported(tmp_path: Path) -> None:
    train = written(tmp_path)
    test = lines(tmp_path / "test.jsonl", ("7 + 8?", "15"), ("What is 100 + 1?", "101"))
    recipe = replace(RECIPE, questions=str(train), test_questions=str(test))
    whole = load_splits(recipe)
    assert [one.question for one in whole.test] == ["What is 100 + 1?"]
    assert [leak.test.question for leak in whole.leaked] == ["7 + 8?"]
    assert len(whole.train) + len(whole.validation) == 60
    assert len(load_splits(replace(recipe, leaks="report")).test) == 2
    with pytest.raises(UsageError, match=r"leaks=refuse: .*found 1 of 2, such as '7 \+ 8\?'"):
        replace(recipe, leaks="refuse").check()
    lines(test, ("7 + 8?", "15"))
    with pytest.raises(UsageError, match="found none for test"):
        recipe.check()


def test_any_change_to_a_training_question_changes_the_fingerprint(tmp_path: Path) -> None:
    path = written(tmp_path)
    recipe = replace(RECIPE, questions=str(path))
    before = load_splits(recipe)
    assert load_splits(recipe).fingerprint == before.fingerprint
    one = before.train[3]
    path.write_text(path.read_text().replace(json.dumps(one.answer), '"0"', 1))
    assert load_splits(recipe).fingerprint != before.fingerprint


def test_files_and_reasoning_gym_exclude_each_other(tmp_path: Path) -> None:
    path = written(tmp_path)
    with pytest.raises(UsageError, match="gym: expected no file beside it"):
        replace(RECIPE, questions=str(path), gym="chain_sum").check()
    with pytest.raises(UsageError, match="test_questions: expected questions to train on too"):
        replace(RECIPE, test_questions=str(path)).check()


def test_an_audit_tells_what_needs_mending(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = lines(tmp_path / "a.jsonl", ("1 + 1?", "2"), ("1 + 1?", "2"), ("a?", "1"), ("a?", "2"))
    test = lines(tmp_path / "b.jsonl", ("1 + 1", "2"), ("2 + 3?", "5"))
    assert audit.main([str(train), "--test", str(test)]) == 1
    said = capsys.readouterr().out
    assert "a.jsonl: 1 questions, 0 with a solution" in said
    assert "1 repeated lines" in said
    assert "! 1 questions are left out, since their lines disagree" in said
    assert "! 1 test questions are trained on, 1 word for word" in said
    assert audit.main([str(test)]) == 0
    train.write_text("{")
    assert audit.main([str(train)]) == 2
    assert "a.jsonl:1: expected a JSON object" in capsys.readouterr().err


def test_unreadable_gold_answers_are_refused_masked_or_allowed(tmp_path: Path) -> None:
    rows = [(f"{a} + 1?", str(a + 1) if a % 4 else "@@") for a in range(60)]
    path = lines(tmp_path / "a.jsonl", *rows)
    recipe = replace(RECIPE, questions=str(path), verifier="math")
    with pytest.raises(UsageError, match=r"found 15 of 60 that are not, such as '@@' \(gold_unpa"):
        recipe.check()
    replace(recipe, min_gold_parsed=0.7).check()
    replace(recipe, verifier="exact").check()  # which compares texts
    task = Questions(recipe)
    answers = np.array([[[*b"#### @@", task.end_token], [*b"#### 13", task.end_token]]])
    grades = task.grade([Question("0 + 1?", "@@")], answers, np.array([[8, 8]]))
    assert not grades.graded.any()
    assert not (grades.solved | grades.false_claims).any()
    assert (grades.reasons == Reason.GOLD_UNPARSED).all()


def test_an_answer_without_a_verdict_is_neither_learned_from_nor_scored(tmp_path: Path) -> None:
    task = Questions(replace(RECIPE, questions=str(written(tmp_path)), verifier="math"))
    world = Answering(task)
    prompts = world.reset([Question("0 + 1?", "@@"), Question("6 + 7?", "13")], 0)
    right = [*b"#### 13", task.end_token]
    answers = np.array([[right, right], [right, [*b"#### 12", task.end_token]]])
    lengths = np.full((2, 2), 8)
    fields = {
        "action": answers,
        "lengths": lengths,
        "finished": lengths > 0,
        "log_probs": np.zeros(answers.shape, np.float32),
        "versions": np.zeros(answers.shape, np.int32),
    }
    step = world.step(fields)
    whole = {"observation": prompts, "reward": step.rewards, **fields, **step.info}
    episodes = Episodes(0, 0, {name: value[None] for name, value in whole.items()})
    batch = Batch.of([episodes])
    assert batch.graded.tolist() == [False, False, True, True]
    assert batch.reasons.tolist() == [Reason.GOLD_UNPARSED] * 2 + [Reason.OK, Reason.WRONG]
    scores = score_answers(episodes)
    assert (scores["accuracy"], scores["pass_at_k"], scores["ungraded"]) == (0.5, 1.0, 0.5)


@pytest.mark.long
def test_a_task_of_reasoning_gym_is_graded_by_its_own_scorer() -> None:
    pytest.importorskip("reasoning_gym")
    recipe = replace(RECIPE, gym="countdown", gym_size=100)
    recipe.check()
    with pytest.raises(UsageError, match="did you mean 'chain_sum'"):
        replace(RECIPE, gym="chain_sums").check()
    task = Questions(recipe)
    assert task.fingerprint == Questions(recipe).fingerprint
    rows = task.rows("train")[:8]
    tokens, chosen = task.traces(rows, 0)
    written = [row[mask] for row, mask in zip(tokens, chosen, strict=True)]
    swapped = " + ".join(map(str, range(3)))
    wrong = np.array([*f"#### {swapped}".encode(), task.end_token])
    longest = max(map(len, [*written, wrong]))
    answers = np.full((8, 2, longest), task.end_token)
    for place, right in enumerate(written):
        answers[place, 0, : len(right)] = right
        answers[place, 1, : len(wrong)] = wrong
    lengths = np.array([[len(right), len(wrong)] for right in written])
    grades = task.grade(rows, answers, lengths)
    assert grades.solved.tolist() == [[True, False]] * 8
    assert grades.graded.all()
