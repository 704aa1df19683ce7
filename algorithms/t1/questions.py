r"""The user's own questions: a JSONL file of ``question``, ``answer`` and, for SFT, ``solution``.

An answer ends with ``#### value`` or holds ``\boxed{value}``; the last one counts. Values are
compared as exact fractions where both are numbers, else as text without case.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import numpy as np

from algorithms.t1.tasks import PADDING, Bools, Grades, Ints, Split
from algorithms.t1.verifier import Reason
from heliostat.errors import UsageError

_MARK = "\n#### "
_SHARES: dict[Split, range] = {
    "train": range(80),
    "validation": range(80, 90),
    "test": range(90, 100),
}
_VALUE = re.compile(r"####([^\n]*)|\\boxed\{([^{}]*)\}")
_NUMBER = re.compile(r"[+-]?(\d{1,3}(,\d{3}){1,12}|\d{1,40})?(\.\d{0,40})?(/\d{1,40})?")


@dataclass(frozen=True, slots=True)
class Question:
    """One line of the file."""

    question: str
    answer: str
    solution: str = ""
    """A worked solution for supervised training; without one only the answer is taught."""


def read_questions(path: Path) -> list[Question]:
    """Reads and checks the whole file.

    Raises:
        UsageError: names the file, the line and what it lacks.
    """
    found: list[Question] = []
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except ValueError as error:
        raise UsageError(f"{path}: expected UTF-8 text: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row: object = json.loads(line)
            json.dumps(row, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}:{number}: expected a JSON object a line: {error}") from error
        if not isinstance(row, dict):
            raise UsageError(f"{path}:{number}: expected a JSON object a line, found {row!r}")
        texts = {
            key: cast("dict[str, Any]", row).get(key, "")
            for key in ("question", "answer", "solution")
        }
        if not all(isinstance(text, str) for text in texts.values()):
            raise UsageError(f"{path}:{number}: expected texts, found {texts}; quote numbers")
        if not texts["question"].strip() or not texts["answer"].strip():
            raise UsageError(f"{path}:{number}: expected a question and an answer, found {row}")
        texts["answer"] = final_value(texts["answer"]) or texts["answer"]
        found.append(Question(**texts))
    for split in _SHARES:
        if not any(split_of(one.question) == split for one in found):
            raise UsageError(
                f"{path}: expected questions in each split, found none for {split} among "
                f"{len(found)}; give more questions"
            )
    return found


def split_of(question: str) -> Split:
    """Returns the split of a question: a hash of its text, so that a repeat stays on its side."""
    place = int.from_bytes(hashlib.blake2b(question.strip().encode(), digest_size=4).digest())
    return next(name for name, share in _SHARES.items() if place % 100 in share)


def final_value(answer: str) -> str | None:
    r"""Returns what the last ``####`` or ``\boxed{}`` of an answer holds, None without one."""
    marks = list(_VALUE.finditer(answer))
    if not marks:
        return None
    return (marks[-1].group(1) or marks[-1].group(2) or "").strip() or None


def same_value(given: str, gold: str) -> bool:
    """Whether two values are equal: as exact numbers, else as texts without case."""
    numbers = _number(given), _number(gold)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return " ".join(given.split()).casefold() == " ".join(gold.split()).casefold()


def _number(text: str) -> Fraction | None:
    plain = text.strip().strip("$").strip()
    if not _NUMBER.fullmatch(plain) or not any(character.isdigit() for character in plain):
        return None  # longer numbers are compared as text: an answer must not cost memory or time
    whole, _, below = plain.replace(",", "").partition("/")
    if not any(character.isdigit() for character in whole) or (below and not int(below)):
        return None
    return Fraction(whole) / int(below or 1)


class Questions:
    """A task made from a file of questions; rows are ``Question``s."""

    answer_tokens = 32
    """Longest value that a summariser may give."""

    def __init__(self, path: str, model: str) -> None:
        self._questions = read_questions(Path(path))
        self._encode, self._decode, self.vocabulary, self.end_token = _tokenizer(model)
        self.cue = tuple(self._encode(_MARK))

    def rows(self, split: Split) -> Sequence[Question]:
        """Returns the questions of one split, in the order of the file."""
        return [one for one in self._questions if split_of(one.question) == split]

    def prompts(self, rows: Sequence[Question]) -> Ints:
        """Returns the questions' tokens, each followed by a line break."""
        encoded = [self._encode(row.question.strip() + "\n") for row in rows]
        longest = max(map(len, encoded))
        return np.array([[PADDING] * (longest - len(one)) + one for one in encoded], np.int64)

    def traces(self, rows: Sequence[Question], seed: int) -> tuple[Ints, Bools]:
        """Returns question, solution and marked answer."""
        del seed
        pairs = [
            (
                self._encode(row.question.strip() + "\n"),
                [*self._encode(row.solution.strip() + _MARK + row.answer), self.end_token],
            )
            for row in rows
        ]
        longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
        tokens = np.full((len(pairs), longest), PADDING, np.int64)
        chosen = np.zeros((len(pairs), longest), np.bool_)
        for row, (prompt, answer) in enumerate(pairs):
            end = len(prompt) + len(answer)
            tokens[row, :end] = prompt + answer
            chosen[row, len(prompt) : end] = True
        return tokens, chosen

    def grade(self, rows: Sequence[Question], answers: Ints, lengths: Ints) -> Grades:
        """Compares the last marked value of each finished answer with the gold one."""
        reasons = np.full(lengths.shape, Reason.NO_ANSWER, np.uint8)
        for place, row, answer in self._finished(rows, answers, lengths):
            value = final_value(self._decode(answer))
            if value is not None:
                reasons[place] = Reason.OK if same_value(value, row.answer) else Reason.WRONG
        return Grades.of(reasons)

    def votes(self, answers: Ints, lengths: Ints) -> Ints:
        """Tells final values apart as ``grade`` does; an unfinished answer has no vote."""
        votes = np.full(lengths.shape, -1, np.int64)
        seen: dict[Fraction | str, int] = {}
        for place in np.ndindex(*lengths.shape):
            answer = answers[place][: lengths[place]].tolist()
            value = final_value(self._decode(answer[:-1]))
            if value is not None and answer[-1] == self.end_token:
                number = _number(value)
                same = " ".join(value.split()).casefold() if number is None else number
                votes[place] = seen.setdefault(same, len(seen))
        return votes

    def commit(self, answers: Ints, lengths: Ints) -> tuple[Ints, Ints]:
        """Ends answers [N, L] that have not ended, so that the value they stopped in counts."""
        fenced = np.pad(answers, ((0, 0), (0, 1)), constant_values=self.end_token)
        rows = np.arange(len(answers))
        open_ = fenced[rows, np.maximum(lengths - 1, 0)] != self.end_token
        fenced[rows[open_], lengths[open_]] = self.end_token
        return fenced, lengths + open_

    def text(self, tokens: Ints) -> str:
        """Writes the text up to the end token."""
        real = [int(token) for token in tokens if token != PADDING]
        if self.end_token in real:
            real = real[: real.index(self.end_token)]
        return self._decode(real)

    def _finished(
        self, rows: Sequence[Question], answers: Ints, lengths: Ints
    ) -> Iterator[tuple[tuple[int, int], Question, list[int]]]:
        for prompt, copy in np.ndindex(*lengths.shape):
            answer = answers[prompt, copy, : lengths[prompt, copy]].tolist()
            if answer and answer[-1] == self.end_token:
                yield (prompt, copy), rows[prompt], answer[:-1]


def _tokenizer(
    model: str,
) -> tuple[Callable[[str], list[int]], Callable[[Sequence[int]], str], int, int]:
    """Returns (encode, decode, vocabulary, end token): the model's own, or bytes without one."""
    if not model:
        end = 256
        return (
            lambda text: list(text.encode()),
            lambda tokens: bytes(token for token in tokens if token < end).decode(errors="replace"),
            end + 1,
            end,
        )
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = cast("Any", AutoTokenizer).from_pretrained(model, local_files_only=True)
    if tokenizer.eos_token_id is None:
        raise UsageError(f"model: expected a tokenizer with an end token in {model!r}, found none")
    return (
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        lambda tokens: tokenizer.decode(list(tokens), skip_special_tokens=True),
        cast("Any", AutoConfig).from_pretrained(model, local_files_only=True).vocab_size,
        tokenizer.eos_token_id,
    )
