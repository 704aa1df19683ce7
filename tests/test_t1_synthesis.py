"""Chain-of-thought synthesis: what a thought is made of, and the pipeline on a real Ray."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from algorithms.t1.answers import final_value
from algorithms.t1.dataset import Question, read_file
from algorithms.t1.model import ModelShape, scratch_model
from algorithms.t1.synthesis import SOLVER, Attempt, Plan, is_hard, judge, pass_rate, thought
from algorithms.t1.verifier import GRADERS, Reason, Verifier

PLAN = Plan(max_failures=3)
WRONG = [Attempt("a", f"I add them.\n#### {value}", Reason.WRONG) for value in (4, 6, 7)]
RIGHT = Attempt("b", "I count them.\n#### 5", Reason.OK)
EMPTY = Attempt("a", "I do not know.", Reason.NO_ANSWER)


def told(made: str, attempt: Attempt) -> int:
    """Where an attempt's words stand, -1 where they do not."""
    return made.find(attempt.text.replace("#### ", ""))


@given(st.lists(st.sampled_from([*WRONG, RIGHT, EMPTY]), max_size=12), st.integers(0, 50))
def test_a_thought_is_some_failures_each_criticised_and_then_one_success(
    attempts: list[Attempt], place: int
) -> None:
    made = thought(attempts, PLAN, place)
    if RIGHT not in attempts:
        assert made is None
        return
    assert made is not None
    assert made == thought(attempts, PLAN, place)
    shown = [one for one in (*WRONG, EMPTY) if told(made.solution, one) >= 0]
    assert len(shown) == made.failures <= PLAN.max_failures
    assert all(one in attempts for one in shown)
    assert all(told(made.solution, one) < told(made.solution, RIGHT) for one in shown)
    assert made.solution.count("Let me try another way.") == made.failures
    assert made.solution.endswith("#### 5".removeprefix("#### ") + "\nCheck: 5 is right.")
    assert final_value(f"{made.solution}\n#### 5") == "5"
    assert "####" not in made.solution


def test_every_number_of_failures_up_to_the_limit_occurs() -> None:
    counts = {thought([*WRONG, RIGHT], PLAN, place).failures for place in range(60)}  # type: ignore[union-attr]
    assert counts == {0, 1, 2, 3}
    none = replace(PLAN, max_failures=0)
    assert {thought([*WRONG, RIGHT], none, place).failures for place in range(20)} == {0}  # type: ignore[union-attr]


def test_failures_with_one_value_are_told_once() -> None:
    same = [Attempt("a", f"Way {way}.\n#### 9", Reason.WRONG) for way in range(5)]
    assert max(thought([*same, RIGHT], PLAN, at).failures for at in range(30)) == 1  # type: ignore[union-attr]


def test_the_filter_counts_what_models_solved_and_the_verifier_could_judge() -> None:
    unjudged = Attempt("a", "#### x", Reason.GOLD_UNPARSED)
    solver = Attempt(SOLVER, "#### 5", Reason.OK)
    assert pass_rate([solver]) is None
    assert is_hard([solver], PLAN)
    assert pass_rate([RIGHT, *WRONG, unjudged, solver]) == 0.25
    assert is_hard([RIGHT, *WRONG], PLAN)
    assert not is_hard([RIGHT, *WRONG[:2]], PLAN)


def test_attempts_are_judged_by_their_last_value() -> None:
    questions = [Question("2+3?", "5"), Question("1+1?", "2")]
    texts = [["#### 4 no, #### 5\n#### 5", "nothing"], ["\\boxed{3}"]]
    found = judge(Verifier(GRADERS["exact"]), "a", questions, texts)
    reasons = [[one.reason for one in row] for row in found]
    assert reasons == [[Reason.OK, Reason.NO_ANSWER], [Reason.WRONG]]


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (["--attempts", "0"], "answers_per_prompt ≥ 1, found 0"),
        (["--max-failures", "-1"], "max_failures ≥ 0"),
        (["--max-pass-rate", "30"], "0 ≤ max_pass_rate ≤ 1"),
        (["--out", "nowhere/traces.jsonl"], "found no nowhere"),
        (["--policy", "nowhere"], "found no config.json in 'nowhere'"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(
    given: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from cluster.synthesis import main

    source = tmp_path / "questions.jsonl"
    source.write_text(json.dumps({"question": "2+3?", "answer": "5", "solution": "It is 5."}))
    fine = ["--policy", SOLVER, "--out", str(tmp_path / "traces.jsonl")]
    assert main([str(source), *fine, *given]) == 2
    assert complaint in capsys.readouterr().err


def a_model(folder: Path) -> None:
    """Writes a model of single letters that has learned nothing."""
    letters = dict.fromkeys([*map(chr, range(32, 127)), "\n", "</s>", "?"])
    words = {letter: place for place, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="?")
    fast.save_pretrained(folder)
    shape = ModelShape(hidden=32, layers=1, heads=1, feed_forward=32)
    scratch_model(shape, len(words), words["</s>"], 0).save_pretrained(folder)


@pytest.mark.ray
def test_a_file_becomes_traces_that_t1_reads_whatever_the_number_of_hosts(
    ray_cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from cluster.synthesis import main

    a_model(tmp_path / "model")
    rows = [
        {"question": f"{n}+{n}?", "answer": str(2 * n), "solution": f"Twice {n} is {2 * n}."}
        for n in range(20)
    ]
    rows.append({"question": "Why?", "answer": "42"})
    source = tmp_path / "questions.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    outputs: list[str] = []
    for hosts in ("1", "2"):
        out = tmp_path / f"traces-{hosts}.jsonl"
        given = ["--policy", str(tmp_path / "model"), "--policy", SOLVER, "--hosts", hosts]
        given += ["--attempts", "4", "--max-new-tokens", "40", "--out", str(out)]
        assert main([str(source), *given]) == 0
        outputs.append(out.read_text())
    assert outputs[0] == outputs[1]
    assert "20 written, 0 too easy, 1 unsolved of 21 questions" in capsys.readouterr().out
    read = read_file(tmp_path / "traces-1.jsonl").questions
    assert [one.question for one in read] == [row["question"] for row in rows[:20]]
    assert all(f"Check: {one.answer} is right." in one.solution for one in read)
    assert {json.loads(line)["pass_rate"] for line in outputs[0].splitlines()} == {0.0}
    assert main([str(source), "--policy", str(tmp_path), "--out", str(out)]) == 2
    assert "found no config.json" in capsys.readouterr().err
