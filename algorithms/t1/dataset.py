r"""Questions from files and from reasoning-gym: read strictly, split by their text, kept apart.

A file holds one JSON object a line, in the form of

- ``question``, ``answer`` and perhaps ``solution``; GSM8K is one of these, its answer is a worked
  solution that ends with ``#### value``;
- ``problem``, ``solution``, whose last ``\boxed{}`` is the answer (MATH);
- ``problem``, ``answer``, text or whole number, and perhaps ``solution`` (AIME).

Keys are read without case, others are ignored.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Literal, cast

from algorithms.t1.answers import final_value, same_value
from heliostat.errors import UsageError, nearest

Split = Literal["train", "validation", "test"]

_SHARES: dict[Split, range] = {
    "train": range(80),
    "validation": range(80, 90),
    "test": range(90, 100),
}
_TOKENS = re.compile(r"\d+(?:[.,]\d+)*|\w+|[^\w\s.,?!;:$\"'`]")
GYM_SEED = 0
"""Of reasoning-gym's generators: a task is the same data set in every run."""


@dataclass(frozen=True, slots=True)
class Question:
    """One problem with a known answer."""

    question: str
    answer: str
    solution: str = ""
    """A worked solution for supervised training; without one only the answer is taught."""
    place: str = ""
    """Where reasoning-gym finds the problem and its scorer; empty: the answer says it all."""

    @property
    def gold(self) -> str:
        """What a verifier compares answers with."""
        return self.place or self.answer


@dataclass(frozen=True, slots=True)
class QuestionFile:
    """What a file holds."""

    questions: tuple[Question, ...]
    """Each text once, in the order of the file."""
    duplicates: int
    """Lines left out because an earlier one asks the same and has the same answer."""
    conflicts: tuple[str, ...]
    """Texts left out because their lines disagree about the answer."""
    garbled: int
    """Questions that hold the mark of a character lost in a wrong decoding."""


def read_file(path: Path) -> QuestionFile:
    """Reads and checks a whole file.

    Raises:
        UsageError: names the file, the line and what it lacks.
    """
    found: dict[str, Question] = {}
    conflicts: dict[str, None] = {}
    duplicates = 0
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            one = _question(text) if text.strip() else None
        except UnicodeDecodeError as error:
            raise UsageError(f"{path}:{number}: expected UTF-8 text: {error}") from error
        except ValueError as error:
            raise UsageError(f"{path}:{number}: {error}") from error
        if one is None:
            continue
        key = " ".join(one.question.split())
        if key in conflicts:
            continue
        known = found.setdefault(key, one)
        if known is not one and same_value(one.answer, known.answer):
            duplicates += 1
        elif known is not one:
            conflicts[key] = None
            del found[key]
    garbled = sum("\ufffd" in one.question + one.solution for one in found.values())
    return QuestionFile(tuple(found.values()), duplicates, tuple(conflicts), garbled)


def _question(line: str) -> Question:
    """Reads one line; a ValueError says what it lacks."""
    try:
        parsed: object = json.loads(line)
        json.dumps(parsed, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected a JSON object a line: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"expected a JSON object a line, found {parsed!r}")
    row = {key.lower(): value for key, value in cast("dict[str, Any]", parsed).items()}
    if "question" not in row and "problem" in row:
        whole = type(row.get("answer")) is int
        row["question"] = row["problem"]
        row["answer"] = str(row["answer"]) if whole else row.get("answer", row.get("solution", ""))
    texts = {key: row.get(key, "") for key in ("question", "answer", "solution")}
    if not all(isinstance(text, str) for text in texts.values()):
        raise ValueError(f"expected texts, found {texts}; quote numbers")
    if not texts["question"].strip() or not texts["answer"].strip():
        raise ValueError(f"expected a question and an answer, found {parsed}")
    answer = final_value(texts["answer"])
    if answer is None and texts["answer"] == texts["solution"]:
        raise ValueError(rf"expected an answer, or a \boxed{{}} in the solution, found {parsed}")
    worked, mark, _ = texts["answer"].rpartition("####")
    if mark and not texts["solution"].strip():
        texts["solution"] = worked.strip()
    return Question(texts["question"], answer or texts["answer"].strip(), texts["solution"])


def normal(question: str) -> str:
    """Returns a question's words, numbers and operators: equal for texts that ask the same."""
    return " ".join(_TOKENS.findall(question.casefold())) or question.strip()


def split_of(question: str) -> Split:
    """Returns the split of a question: a hash of its text, so that a repeat stays on its side."""
    place = int.from_bytes(hashlib.blake2b(question.strip().encode(), digest_size=4).digest())
    return next(name for name, share in _SHARES.items() if place % 100 in share)


@dataclass(frozen=True, slots=True)
class Leak:
    """A test question that training would show."""

    test: Question
    train: Question
    overlap: float
    """Jaccard index of their sets of phrases; 1 for equal texts."""


_PHRASE = 8
"""Consecutive words that are compared; a shorter question only leaks as a whole."""
_COMMON = 20
"""A phrase of more test questions than this is the set's own wording and says nothing."""


def leaks(train: Iterable[Question], test: Sequence[Question], least: float = 0.8) -> list[Leak]:
    """Finds test questions whose text is in the training set, exactly or nearly.

    Words are compared without case and punctuation, numbers and operators as they are.

    Args:
        train: what is trained on.
        test: what is scored.
        least: overlap of their phrases of 8 words from which two texts are nearly the same.

    Returns:
        One leak for each such question, with the training question nearest to it.
    """
    whole = {normal(one.question): place for place, one in enumerate(test)}
    owners: dict[str, list[int]] = {}
    for place, one in enumerate(test):
        for phrase in _phrases(one.question):
            owners.setdefault(phrase, []).append(place)
    common = {phrase for phrase, places in owners.items() if len(places) > _COMMON}
    sizes = [len(_phrases(one.question) - common) for one in test]
    found: dict[int, Leak] = {}
    for one in train:
        theirs = _phrases(one.question) - common
        shared = Counter(place for phrase in theirs for place in owners.get(phrase, ()))
        overlaps = {
            place: count / (sizes[place] + len(theirs) - count) for place, count in shared.items()
        }
        if (same := whole.get(normal(one.question))) is not None:
            overlaps[same] = 1.0
        for place, overlap in overlaps.items():
            if overlap >= least and (place not in found or overlap > found[place].overlap):
                found[place] = Leak(test[place], one, overlap)
    return [found[place] for place in sorted(found)]


def _phrases(question: str) -> set[str]:
    words = normal(question).split()
    starts = range(len(words) - _PHRASE + 1)
    return {" ".join(words[start : start + _PHRASE]) for start in starts}


@dataclass(frozen=True, slots=True)
class Splits:
    """The questions of a run; no text is in two splits."""

    train: tuple[Question, ...]
    validation: tuple[Question, ...]
    test: tuple[Question, ...]
    leaked: tuple[Leak, ...]
    """What the test questions share with the training ones."""

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that any change to a training question changes."""
        texts = json.dumps([astuple(one) for one in self.train])
        return hashlib.blake2b(texts.encode(), digest_size=8).hexdigest()


def split(
    questions: Sequence[Question],
    test: Sequence[Question] | None,
    leaking: Literal["drop", "refuse", "report"],
    source: str,
) -> Splits:
    """Splits questions by their text, 80 : 10 : 10, or 90 : 10 where the test set is given.

    Args:
        questions: what there is to train and validate on, each text once.
        test: a test set of its own, or None.
        leaking: what to do with test questions that training would show.
        source: where the questions come from, for messages.

    Raises:
        UsageError: a split is empty, or questions leak and ``leaking`` is ``refuse``.
    """
    parts: dict[Split, list[Question]] = {"train": [], "validation": [], "test": []}
    for one in questions:
        name = split_of(one.question)
        parts["train" if test is not None and name == "test" else name].append(one)
    parts["test"] = list(test) if test is not None else parts["test"]
    leaked = leaks(parts["train"] + parts["validation"], parts["test"])
    if leaked and leaking == "refuse":
        raise UsageError(
            f"leaks=refuse: expected no test question among those of {source}, found {len(leaked)} "
            f"of {len(parts['test'])}, such as {leaked[0].test.question!r} (overlap "
            f"{leaked[0].overlap:.0%}); remove them, or take leaks=drop"
        )
    if leaking == "drop":
        gone = {leak.test.question for leak in leaked}
        parts["test"] = [one for one in parts["test"] if one.question not in gone]
    for name, part in parts.items():
        if not part:
            raise UsageError(
                f"{source}: expected questions in each split, found none for {name} among "
                f"{len(questions)}, {len(leaked)} test questions of which leak; give more questions"
            )
    whole = (tuple(parts[name]) for name in _SHARES)
    return Splits(*whole, leaked=tuple(leaked))


def gym_questions(name: str, size: int) -> list[Question]:
    """Returns ``size`` problems of a reasoning-gym task, less those asked before.

    Raises:
        UsageError: the package is missing, or has no such task, or the task ships no answers.
    """
    try:
        from algorithms.t1 import gym_grader
    except ImportError as error:
        raise UsageError(
            f"gym: expected the package reasoning-gym, found {error}; "
            "pip install 'heliostat[reasoning]'"
        ) from error
    if name not in gym_grader.names():
        raise UsageError(f"gym: {nearest(name, gym_grader.names(), 'task')}")
    found: dict[str, Question] = {}
    for place, entry in enumerate(gym_grader.entries(name, GYM_SEED, size)):
        if not isinstance(entry["answer"], str) or not entry["answer"].strip():
            raise UsageError(
                f"gym: expected answers to the problems of {name!r}, found "
                f"{entry['answer']!r} for problem {place}; take another task"
            )
        where = f"{name}:{GYM_SEED}:{size}:{place}"
        one = Question(entry["question"], entry["answer"].strip(), place=where)
        found.setdefault(one.question.strip(), one)
    return list(found.values())
