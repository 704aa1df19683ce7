"""Says what a file of questions holds: ``python -m algorithms.t1.audit FILE [--test FILE]``."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from algorithms.t1.dataset import Question, QuestionFile, leaks, read_file
from algorithms.t1.verifier import GRADERS, Reason, Verifier
from heliostat.errors import UsageError

_EXAMPLES = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the audit; returns 0, 1 where something needs mending, 2 for an unreadable file."""
    parser = argparse.ArgumentParser(prog="python -m algorithms.t1.audit", description=__doc__)
    parser.add_argument("file", type=Path, help="JSONL in the form of GSM8K, MATH or AIME")
    parser.add_argument("--test", type=Path, help="look for its questions among those of FILE")
    parser.add_argument("--verifier", choices=("exact", "math"), default="exact")
    parser.add_argument("--seconds", type=float, default=5.0, help="that one answer may take")
    options = parser.parse_args(arguments)
    verifier = Verifier(GRADERS[options.verifier], options.seconds)
    try:
        train = read_file(options.file)
        lines = [*_contents(options.file, train), *_golds(train.questions, verifier)]
        if options.test is not None:
            test = read_file(options.test)
            lines += [*_contents(options.test, test), *_golds(test.questions, verifier)]
            lines += _leaks(train.questions, test.questions)
    except UsageError as error:
        print(error, file=sys.stderr)  # noqa: T201 - a command's output
        return 2
    finally:
        verifier.close()
    print("\n".join(lines))  # noqa: T201 - a command's output
    return int(any(line.startswith("!") for line in lines))


def _contents(path: Path, file: QuestionFile) -> list[str]:
    """Returns lines about a file; those that need mending begin with ``!``."""
    worked = sum(bool(one.solution) for one in file.questions)
    found = [f"{path}: {len(file.questions)} questions, {worked} with a solution"]
    if file.duplicates:
        found.append(f"  {file.duplicates} repeated lines are left out")
    if file.conflicts:
        found.append(
            f"! {len(file.conflicts)} questions are left out, since their lines disagree about "
            f"the answer, such as {file.conflicts[0]!r}"
        )
    if file.garbled:
        found.append(f"! {file.garbled} questions hold U+FFFD, lost in a wrong decoding")
    return found


def _golds(questions: Sequence[Question], verifier: Verifier) -> list[str]:
    reasons = verifier([(one.gold, one.answer) for one in questions])
    counts = Counter(reason.name.lower() for reason in reasons)
    found = ["  gold answers judged: " + ", ".join(f"{n} {name}" for name, n in counts.items())]
    bad = [one for one, reason in zip(questions, reasons, strict=True) if reason is not Reason.OK]
    return found + [f"! gold answer {one.answer!r} of {one.question!r}" for one in bad[:_EXAMPLES]]


def _leaks(train: Sequence[Question], test: Sequence[Question]) -> list[str]:
    leaked = leaks(train, test)
    exact = sum(leak.overlap == 1.0 for leak in leaked)
    if not leaked:
        return ["  no test question is among them"]
    return [
        f"! {len(leaked)} test questions are trained on, {exact} word for word",
        *(f"!   {leak.overlap:.0%} {leak.test.question!r}" for leak in leaked[:_EXAMPLES]),
    ]


if __name__ == "__main__":
    sys.exit(main())
