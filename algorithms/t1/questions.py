"""Questions as a task: files of the user's own, or problems of reasoning-gym."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np

from algorithms.t1.answers import final_value, number, plain
from algorithms.t1.dataset import Question, Split, Splits, gym_questions, read_file, split
from algorithms.t1.tasks import PADDING, Bools, Grades, Ints
from algorithms.t1.verifier import GRADERS, Reason, Verifier
from algorithms.t1.workload import T1Recipe
from heliostat.errors import UsageError

_MARK = "\n#### "
_AUDITED = 512
"""Gold answers that are looked at before a run; the command ``algorithms.t1.audit`` reads all."""


def load_splits(recipe: T1Recipe) -> Splits:
    """Returns the questions that a recipe names.

    Raises:
        UsageError: says which file, line or task, and what it lacks.
    """
    if recipe.gym:
        questions = gym_questions(recipe.gym, recipe.gym_size)
        return split(questions, None, recipe.leaks, f"gym={recipe.gym}")
    questions = read_file(Path(recipe.questions)).questions
    test = read_file(Path(recipe.test_questions)).questions if recipe.test_questions else None
    return split(questions, test, recipe.leaks, recipe.questions)


def make_verifier(recipe: T1Recipe) -> Verifier:
    """Returns the recipe's verifier; it starts no process before it needs one."""
    grader = GRADERS["gym" if recipe.gym else recipe.verifier]
    return Verifier(grader, recipe.verifier_s, recipe.verifier_workers)


def check_questions(recipe: T1Recipe) -> None:
    """Reads the questions and has the verifier read their gold answers, as a run would.

    Raises:
        UsageError: the questions cannot be read or leak, or too few gold answers can be judged.
    """
    splits = load_splits(recipe)
    every = [*splits.train, *splits.validation, *splits.test]
    some = every[:: -(-len(every) // _AUDITED)]
    verifier = make_verifier(recipe)
    reasons = verifier([(one.gold, one.answer) for one in some])
    verifier.close()
    bad = [
        f"{one.answer!r} ({reason.name.lower()})"
        for one, reason in zip(some, reasons, strict=True)
        if reason is not Reason.OK
    ]
    if len(bad) > (1 - recipe.min_gold_parsed) * len(some):
        raise UsageError(
            f"min_gold_parsed: expected {recipe.min_gold_parsed:.0%} of the gold answers to be "
            f"judged right by verifier={recipe.verifier}, found {len(bad)} of {len(some)} that are "
            f"not, such as {', '.join(bad[:3])}; mend them, or lower min_gold_parsed: they then "
            "teach nothing"
        )


class Questions:
    """A task made from questions; rows are ``Question``s.

    The questions are read when they are first asked for: an actor that only grades does not.
    """

    answer_tokens = 32
    """Longest value that a summariser may give."""

    def __init__(self, recipe: T1Recipe) -> None:
        self._recipe = recipe
        self._verifier = make_verifier(recipe)
        self._value = gym_value if recipe.gym else final_value
        self._encode, self._decode, self.vocabulary, self.end_token = _tokenizer(recipe.model)
        self.cue = tuple(self._encode(_MARK))

    @cached_property
    def _splits(self) -> Splits:
        return load_splits(self._recipe)

    @property
    def fingerprint(self) -> str:
        """Tells training sets apart by their content."""
        return self._splits.fingerprint

    def rows(self, split: Split) -> Sequence[Question]:
        """Returns the questions of one split, in the order of the file."""
        whole = self._splits
        return {"train": whole.train, "validation": whole.validation, "test": whole.test}[split]

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
        """Has the verifier judge the last marked value of each finished answer."""
        reasons = np.full(lengths.shape, Reason.NO_ANSWER, np.uint8)
        places: list[tuple[int, int]] = []
        pairs: list[tuple[str, str]] = []
        for place, row, answer in self._finished(rows, answers, lengths):
            value = self._value(self._decode(answer))
            if value is not None:
                places.append(place)
                pairs.append((row.gold, value))
        for place, reason in zip(places, self._verifier(pairs), strict=True):
            reasons[place] = reason
        return Grades.of(reasons)

    def votes(self, answers: Ints, lengths: Ints) -> Ints:
        """Tells final values apart as ``grade`` does; an unfinished answer has no vote."""
        votes = np.full(lengths.shape, -1, np.int64)
        seen: dict[Fraction | str, int] = {}
        for place in np.ndindex(*lengths.shape):
            answer = answers[place][: lengths[place]].tolist()
            value = self._value(self._decode(answer[:-1]))
            if value is not None and answer[-1] == self.end_token:
                exact = number(value)
                votes[place] = seen.setdefault(plain(value) if exact is None else exact, len(seen))
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


def gym_value(text: str) -> str | None:
    """Returns what stands behind the last ``####``, over several lines; else a marked value."""
    _, mark, value = text.rpartition("####")
    return (value.strip() or None) if mark else final_value(text)


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
