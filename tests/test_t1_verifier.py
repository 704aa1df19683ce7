"""The verifier: every answer gets one outcome, in time, whatever the answer or the workers do."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.t1.answers import final_value
from algorithms.t1.tasks import Grades
from algorithms.t1.verifier import GRADERS, Grader, Reason, Verifier, reason_shares
from heliostat.errors import UsageError

MOODY = Grader("graders:moody", exact=False)
LIMIT_S = 1.0


@pytest.fixture(scope="module")
def moody() -> Iterator[Verifier]:
    verifier = Verifier(MOODY, LIMIT_S, workers=2)
    yield verifier
    verifier.close()


@pytest.fixture(scope="module")
def mathematical() -> Iterator[Verifier]:
    verifier = Verifier(GRADERS["math"], limit_s=60.0)
    yield verifier
    verifier.close()


# ---------------------------------------------------------------------------- outcomes


def test_only_faults_that_are_not_the_policys_go_unscored() -> None:
    assert {reason for reason in Reason if reason.score is None} == {
        Reason.GOLD_UNPARSED,
        Reason.ERROR,
    }
    assert [reason for reason in Reason if reason.score == 1] == [Reason.OK]


@given(st.lists(st.sampled_from([*Reason]), min_size=1))
def test_grades_follow_from_the_reasons(reasons: list[Reason]) -> None:
    grades = Grades.of(np.array([reasons], np.uint8))
    assert grades.solved[0].tolist() == [reason.score == 1 for reason in reasons]
    assert grades.graded[0].tolist() == [reason.score is not None for reason in reasons]
    assert not (grades.solved & ~grades.graded).any()
    shares = reason_shares(grades.reasons)
    assert [*shares] == [reason.name.lower() for reason in Reason]
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["wrong"] == pytest.approx(grades.false_claims.mean())


def test_exact_comparison_starts_no_process() -> None:
    verifier = Verifier(GRADERS["exact"])
    pairs = [("1/2", "0.5"), ("1/2", "0.51"), ("x+1", "x + 1"), ("x+1", "x+1"), ("5", "\x00")]
    ok, wrong = Reason.OK, Reason.WRONG
    assert verifier(pairs) == [ok, wrong, wrong, ok, wrong]
    assert verifier([("5", "5" * 600)]) == [Reason.TIMEOUT]
    assert verifier([]) == []
    assert verifier.process is None


# ---------------------------------------------------------------------------- misbehaving workers


@pytest.mark.parametrize(
    ("gold", "answer", "reason"),
    [
        ("a", "a", Reason.OK),
        ("a", "b", Reason.WRONG),
        ("a", "raise", Reason.WRONG),
        ("a", "memory", Reason.TIMEOUT),
        ("unreadable", "a", Reason.GOLD_UNPARSED),
        ("raise", "a", Reason.GOLD_UNPARSED),
        ("a", "die", Reason.ERROR),
    ],
)
def test_every_fault_has_its_reason(
    moody: Verifier, gold: str, answer: str, reason: Reason
) -> None:
    assert moody([(gold, answer)]) == [reason]


def test_a_verifier_that_sleeps_for_an_hour_ends_in_time(moody: Verifier) -> None:
    moody([("a", "a")])
    start = time.monotonic()
    pairs = [("a", "sleep"), ("a", "loop"), ("sleep", "a"), ("b", "b")]
    reasons = [Reason.TIMEOUT, Reason.TIMEOUT, Reason.GOLD_UNPARSED, Reason.OK]
    assert moody(pairs) == reasons
    assert time.monotonic() - start < 2 * LIMIT_S + 15  # two rounds on two workers
    assert moody(pairs * 20) == reasons * 20  # from memory


def test_one_fault_costs_no_other_answer_of_the_group(moody: Verifier) -> None:
    pairs = [("g", "g")] * 3 + [("g", "die"), ("g", "raise")] + [("g", f"h{i}") for i in range(9)]
    reasons = moody(pairs)
    assert len(reasons) == len(pairs)
    assert reasons.count(Reason.ERROR) == 1
    assert reasons[:3] == [Reason.OK] * 3
    assert reasons[4:] == [Reason.WRONG] * 10


def test_a_worker_that_died_by_chance_costs_nothing(moody: Verifier, tmp_path: Path) -> None:
    assert moody([("g", f"die once {tmp_path / 'mark'}")]) == [Reason.OK]


def children(process: int) -> list[int]:
    path = Path(f"/proc/{process}/task/{process}/children")
    return [int(child) for child in path.read_text().split()]


@pytest.mark.parametrize("whom", ["workers", "host"])
def test_killed_processes_lose_no_answer_and_count_none_twice(whom: str) -> None:
    verifier = Verifier(MOODY, 20.0, workers=2)
    verifier([("a", "a")])
    host = verifier.process
    assert host is not None
    workers = children(host)
    assert len(workers) == 2
    pairs = [(f"v{i}", f"v{i % 150}") for i in range(300)]

    def kill() -> None:
        for process in workers if whom == "workers" else [host]:
            os.kill(process, signal.SIGKILL)

    killer = threading.Timer(0.3, kill)
    killer.start()
    expected = [Reason.OK if i < 150 else Reason.WRONG for i in range(300)]
    assert verifier(pairs) == expected
    killer.join()
    assert verifier(pairs) == expected
    assert (verifier.process == host) is (whom == "workers")
    last = verifier.process
    assert last is not None
    workers = children(last)
    verifier.close()
    assert not any(Path(f"/proc/{process}").exists() for process in (last, *workers))


def test_a_missing_grader_is_refused_with_what_to_install() -> None:
    verifier = Verifier(Grader("no_such_module:prepare", "math"))
    with pytest.raises(UsageError, match=r"No module named 'no_such_module'.*heliostat\[math\]"):
        verifier([("a", "b")])


# ---------------------------------------------------------------------------- math-verify


@pytest.mark.parametrize(
    ("gold", "text", "reason"),
    [
        (r"\frac12", r"\boxed{0.5}", Reason.OK),
        ("3/4", r"\boxed{6/8}", Reason.OK),
        ("1000", "#### 1,000", Reason.OK),
        ("1024", r"\boxed{2^{10}}", Reason.OK),
        ("5", r"\boxed{7} wait, no: \boxed{5}", Reason.OK),
        ("5", r"the answer is 7 or \boxed{5} hmm so 7", Reason.OK),
        (r"10\%", r"\boxed{0.1}", Reason.OK),  # a percentage may mean either
        (r"10\%", r"\boxed{10}", Reason.OK),
        (r"5\text{ cm}", r"\boxed{5\text{ m}}", Reason.OK),  # units are dropped
        ("1<x<2", r"\boxed{(1,2)}", Reason.OK),
        ("(1,2)", r"\boxed{1<x<2}", Reason.WRONG),
        (r"\{1,2\}", r"\boxed{1,2}", Reason.OK),
        ("(3,4)", r"\boxed{(4,3)}", Reason.WRONG),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{(1,2)}", Reason.WRONG),
        (r"\frac{1}{2}", "#### 1/2", Reason.OK),
        ("1", r"\boxed{x=1}", Reason.OK),
        (r"\text{Tuesday}", r"\boxed{Tuesday}", Reason.OK),
        (r"\text{Tuesday}", r"\boxed{Monday}", Reason.WRONG),
        ("A", "#### A", Reason.OK),
        (r"\$18", "#### 18", Reason.OK),
        ("1000", "#### 1e3", Reason.OK),
        ("3.14", r"\boxed{\pi}", Reason.WRONG),
        (r"\pi", r"\boxed{3.14159265}", Reason.OK),  # floats are rounded to six digits
        (r"90^\circ", r"\boxed{\pi/2}", Reason.WRONG),  # degrees are dropped
        ("72", "#### 72", Reason.OK),
        (r"2\sqrt{2}", r"\boxed{\sqrt{8}}", Reason.OK),
        (r"\foo{", r"\boxed{7}", Reason.GOLD_UNPARSED),
        ("@@", r"\boxed{@@}", Reason.GOLD_UNPARSED),  # not even for the same text
    ],
)
def test_answers_of_the_table_of_pitfalls(
    mathematical: Verifier, gold: str, text: str, reason: Reason
) -> None:
    value = final_value(text)
    assert value is not None
    assert mathematical([(gold, value)]) == [reason]


BOMBS = {
    "9^{9^{9^9}}": {Reason.TIMEOUT},
    "2^{2^{2^{2^{2^2}}}}": {Reason.TIMEOUT},
    "(" * 200 + "1" + ")" * 200: {Reason.TIMEOUT, Reason.WRONG},
    "+".join(["1"] * 3000): {Reason.TIMEOUT},
    "100000!": {Reason.TIMEOUT, Reason.WRONG},
}


def test_answer_bombs_end_in_time_and_score_nothing() -> None:
    mathematical = Verifier(GRADERS["math"], LIMIT_S)
    mathematical([("2", "x")])
    start = time.monotonic()
    reasons = mathematical([("5", bomb) for bomb in BOMBS])
    assert time.monotonic() - start < len(BOMBS) * LIMIT_S + 15
    assert all(reason in allowed for reason, allowed in zip(reasons, BOMBS.values(), strict=True))
    assert {reason.score for reason in reasons} == {0}
    mathematical.close()
