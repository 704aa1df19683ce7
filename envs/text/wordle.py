"""Wordle: six guesses at a word of five letters, each answered letter by letter.

A guess costs 1 unless it is the hidden word; one that is no word of the list costs 1 too and tells
nothing. Letters are words of their own: ``s t a r e`` is answered ``<b> <y> <g> <b> <b>``: absent,
elsewhere, in place. With ``duplicates="paper"`` every copy of a letter that occurs in the hidden
word counts as present, as in the paper's code; ``"true"`` marks as many as there are. The list is
our own, so that returns are not those of the paper's list; ``scripted_return`` is the counterpart
of its bound of -1.94.
"""

from __future__ import annotations

from functools import cache
from typing import Final, Literal

import numpy as np

from envs.text.game import (
    NEWLINE,
    Bools,
    Floats,
    Ints,
    Normaliser,
    Recording,
    Tokens,
    Turn,
    Words,
    record,
    widened,
)
from envs.text.wordle_words import WORDS

Duplicates = Literal["true", "paper"]
GUESSES: Final = 6
LETTERS: Final = 5
RANDOM_SHARE: Final = 0.66
"""Of the data's guesses; the others are drawn from the words that fit what is known."""
_COLOURS: Final = ("<b>", "<y>", "<g>")
_ALL_GREEN: Final = 3**LETTERS - 1
_PLAYED_AT_ONCE: Final = 2048


@cache
def letters() -> Ints:
    """Returns the letters of each word, 0..25, [words, 5]."""
    return np.array([[ord(letter) - ord("a") for letter in word] for word in WORDS])


@cache
def feedback(duplicates: Duplicates) -> Ints:
    """Returns the answer to each guess for each hidden word, [guess, hidden].

    Five digits of base 3, the first letter's the highest: 0 absent, 1 elsewhere, 2 in place.
    """
    guess, hidden = letters()[:, None, :], letters()[None, :, :]
    green = guess == hidden
    if duplicates == "paper":
        present = (guess[..., :, None] == hidden[..., None, :]).any(axis=-1)
        marks = np.where(green, 2, np.where(present, 1, 0))
    else:
        marks = np.where(green, 2, 0)
        free = ~green  # letters of the hidden word that no mark has used up
        for place in range(LETTERS):
            equal = free & (guess[..., place, None] == hidden) & ~green[..., place, None]
            first = equal & (equal.cumsum(axis=-1) == 1)
            marks[..., place] += first.any(axis=-1)
            free = free & ~first
    return marks @ (3 ** np.arange(LETTERS - 1, -1, -1))


@cache
def scripted_return(duplicates: Duplicates) -> float:
    """Returns the mean return over all hidden words of the scripted policy.

    It guesses the fitting word whose answer tells most (the largest entropy), the first of equals.
    """
    table = feedback(duplicates)

    def costs(words: Ints, guesses: int) -> int:
        if guesses == GUESSES:  # nothing was found: the last guess was paid for
            return 0
        answers = table[np.ix_(words, words)]
        entropies = [_entropy(np.bincount(row)) for row in answers]
        best = int(np.argmax(entropies))
        found = 0
        for answer in np.unique(answers[best]):
            if answer != _ALL_GREEN:
                rest = words[answers[best] == answer]
                found += len(rest) + costs(rest, guesses + 1)
        return found

    return -costs(np.arange(len(WORDS)), 0) / len(WORDS)


def _entropy(counts: Ints) -> float:
    odds = counts[counts > 0] / counts.sum()
    return float(-(odds * np.log(odds)).sum())


class Wordle:
    """A batch of episodes; a case is the number of the hidden word."""

    message_tokens = LETTERS + 1
    action_tokens = LETTERS + 1
    max_turns = GUESSES
    goal = 0.0
    normaliser = Normaliser(least=-6, average=-4.12, best=-1.94)

    def __init__(self, duplicates: Duplicates = "true") -> None:
        self.words = Words([*map(chr, range(ord("a"), ord("z") + 1)), *_COLOURS, "Wordle:"])
        self._table = feedback(duplicates)
        self._guesses = self.words.table([f"{' '.join(word)}\n" for word in WORDS])
        self._codes = _code(self._guesses)
        self._order = np.argsort(self._codes)
        answers = np.arange(3**LETTERS)[:, None] // 3 ** np.arange(LETTERS - 1, -1, -1) % 3
        colours = self.words.encode(" ".join(_COLOURS))[answers]
        self._answers = np.pad(colours, ((0, 0), (0, 1)), constant_values=NEWLINE)

    def cases(self) -> Ints:
        """Returns every hidden word."""
        return np.arange(len(WORDS))

    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        """Draws hidden words evenly."""
        return rng.integers(len(WORDS), size=count)

    def reset(self, cases: Ints, seed: int) -> Turn:
        """Hides the words; nothing is random."""
        del seed
        self._hidden = cases
        self._done = np.zeros(len(cases), np.bool_)
        self._turns = 0
        self.fitting: Bools = np.ones((len(cases), len(WORDS)), np.bool_)
        """Which words fit all answers so far, [B, words]."""
        greeting = np.tile(self.words.encode("Wordle:\n"), (len(cases), 1))
        nothing = np.zeros(len(cases), np.float32)
        return self._turn(greeting, nothing, self._done)

    def step(self, actions: Tokens) -> Turn:
        """Answers the guesses."""
        guesses = self.guessed(actions)
        invalid = np.less(guesses, 0)
        answers = self._table[np.maximum(guesses, 0), self._hidden]
        told = self._answers[answers]
        told[invalid, 0], told[invalid, 1:] = NEWLINE, 0
        tells = ~(invalid | self._done)
        self.fitting[tells] &= self._table[guesses[tells]] == answers[tells, None]
        right = (guesses == self._hidden) & ~invalid
        rewards = np.where(right | self._done, 0.0, -1.0).astype(np.float32)
        self._turns += 1
        self._done = self._done | right | (self._turns == GUESSES)
        return self._turn(told, rewards, invalid)

    def guessed(self, actions: Tokens) -> Ints:
        """Returns the number of each guessed word, [B]; -1 for none of the list."""
        codes = _code(actions)
        places = np.searchsorted(self._codes, codes, sorter=self._order)
        found = self._order[np.minimum(places, len(WORDS) - 1)]
        return np.where(self._codes[found] == codes, found, -1)

    def _turn(self, told: Tokens, rewards: Floats, invalid: Bools) -> Turn:
        messages = widened(np.where(self._done[:, None], 0, told), self.message_tokens)
        return Turn(messages, self._turns == 0, rewards, self._done.copy(), invalid)

    def behave(self, rng: np.random.Generator, count: int) -> Recording:
        """Guesses any word with a chance of 66 %, else one that fits what is known."""
        parts = [
            self._behave(rng, min(_PLAYED_AT_ONCE, count - start))
            for start in range(0, count, _PLAYED_AT_ONCE)
        ]
        return Recording.join(parts)

    def _behave(self, rng: np.random.Generator, count: int) -> Recording:
        def act(turn: Turn) -> Tokens:
            del turn
            anything = rng.integers(len(WORDS), size=count)
            places = (rng.random(count) * self.fitting.sum(axis=1)).astype(np.int64)
            fits = (self.fitting.cumsum(axis=1) == places[:, None] + 1).argmax(axis=1)
            return self._guesses[np.where(rng.random(count) < RANDOM_SHARE, anything, fits)]

        return record(self, self.draw(rng, count), 0, act)


def _code(actions: Tokens) -> Ints:
    """Returns one number for each row of tokens; rows of 6 tokens below 64 keep apart."""
    code = np.zeros(len(actions), np.int64)
    for column in actions.T:
        code = 64 * code + column
    return code
