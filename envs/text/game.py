"""What the text games share: words as tokens, a batch of episodes, recordings, the normaliser.

A game steps ``B`` episodes that begin together. An episode's *context*, what its player has read,
grows by messages and actions, each a row of tokens; where ``Turn.fresh`` holds, the context is
forgotten and begins anew with the message. Tokens never become text on the way: what a player said
is what the game reads.

Shapes: ``T`` turns, ``B`` episodes, ``S`` and ``A`` tokens of the longest message and action.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int16]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]

PAD = 0
"""Stands behind the tokens of a short message or action; never said."""
UNKNOWN = 1
"""Stands for a word that the game does not know."""
NEWLINE = 2
"""Ends every message and every action."""


class Words:
    r"""A vocabulary whose tokens are words between single spaces; a line's end is one too.

    Example:
        ``Words(["move", "up"]).encode("move up\n")`` is ``[3, 4, 2]``.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words: tuple[str, ...] = ("", "?", "\n", *dict.fromkeys(words))
        """The word of each token."""
        self._places = {word: place for place, word in enumerate(self.words)}

    def __len__(self) -> int:
        """Returns the size of the vocabulary."""
        return len(self.words)

    def encode(self, text: str) -> Tokens:
        """Returns a text's tokens, [length]; words that are not known become ``UNKNOWN``."""
        found = cast("list[str]", re.findall(r"\n|[^ \n]+", text))
        return np.array([self._places.get(word, UNKNOWN) for word in found], np.int16)

    def table(self, texts: Sequence[str]) -> Tokens:
        """Returns the tokens of several texts, [texts, longest], ``PAD`` on the right."""
        rows = [self.encode(text) for text in texts]
        table = np.full((len(rows), max(map(len, rows))), PAD, np.int16)
        for row, tokens in zip(table, rows, strict=True):
            row[: len(tokens)] = tokens
        return table

    def decode(self, tokens: npt.NDArray[Any]) -> str:
        """Returns the text of a row of tokens; inverts ``encode`` where every word is known."""
        text = " ".join(self.words[int(token)] for token in tokens if token != PAD)
        return text.replace(" \n", "\n").replace("\n ", "\n")


@dataclass(frozen=True, slots=True)
class Normaliser:
    """Table 5 of the paper: raw returns that count as 0, 50 and 100."""

    least: float
    average: float
    """Mean return of the paper's data."""
    best: float

    def __call__(self, raw: float) -> float:
        """Returns 50 at the data's average, linear on either side of it."""
        if raw < self.average:
            return 50 * (raw - self.least) / (self.average - self.least)
        return 50 + 50 * (raw - self.average) / (self.best - self.average)


@dataclass(frozen=True, slots=True)
class Turn:
    """What a batch of games says after an action, or at the start."""

    messages: Tokens
    """[B, S], ``PAD`` on the right; empty for an episode that has ended."""
    fresh: bool
    """Whether the context begins anew with these messages; equal for the whole batch."""
    rewards: Floats
    """[B]; 0 for an episode that had ended before."""
    done: Bools
    """[B]: has ended, by itself or by its limit of turns."""
    invalid: Bools
    """[B]: the action was none of the game's."""


@runtime_checkable
class Game(Protocol):
    """A batch of episodes of one text game. A *case* is how an episode begins, as a number."""

    words: Words
    message_tokens: int
    """S."""
    action_tokens: int
    """A; an action that is longer is cut, and then invalid."""
    max_turns: int
    goal: float
    """The last reward of an episode that succeeds."""
    normaliser: Normaliser

    def cases(self) -> Ints:
        """Returns every case on which players are scored."""
        ...

    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        """Draws cases to train on, [count]."""
        ...

    def reset(self, cases: Ints, seed: int) -> Turn:
        """Begins an episode of each case; the rest follows from the seed and the actions."""
        ...

    def step(self, actions: Tokens) -> Turn:
        """Takes actions [B, A], ``PAD`` on the right; those of ended episodes are not read."""
        ...

    def behave(self, rng: np.random.Generator, count: int) -> Recording:
        """Plays ``count`` episodes as the paper's data were made."""
        ...


@dataclass(frozen=True, slots=True)
class Recording:
    """Episodes as arrays over time."""

    messages: Tokens
    """[T, B, S], what each action answered."""
    fresh: Bools
    """[T]."""
    actions: Tokens
    """[T, B, A]."""
    rewards: Floats
    """[T, B]."""
    alive: Bools
    """[T, B]: the episode had not ended before this turn."""
    cut: Ints | None = None
    """[B]: turns of each episode that belong to the data, if not all that were played."""

    @classmethod
    def join(cls, parts: Sequence[Recording]) -> Recording:
        """Puts whole episodes of one game, none of them cut, side by side."""
        turns = max(len(part.fresh) for part in parts)

        def joined(arrays: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
            tails = [[(0, turns - len(one))] + [(0, 0)] * (one.ndim - 1) for one in arrays]
            padded = [np.pad(one, tail) for one, tail in zip(arrays, tails, strict=True)]
            return np.concatenate(padded, axis=1)

        return cls(
            messages=joined([part.messages for part in parts]),
            fresh=max((part.fresh for part in parts), key=len),
            actions=joined([part.actions for part in parts]),
            rewards=joined([part.rewards for part in parts]),
            alive=joined([part.alive for part in parts]),
        )

    @property
    def lengths(self) -> Ints:
        """Turns of each episode, [B]."""
        whole = self.alive.sum(axis=0)
        return whole if self.cut is None else np.minimum(whole, self.cut)

    @property
    def ended(self) -> Bools:
        """[B]: whether the last turn of the data ended the game."""
        return self.lengths == self.alive.sum(axis=0)

    @property
    def returns(self) -> npt.NDArray[np.float64]:
        """Sum of the rewards of each episode's data, [B]."""
        inside = np.arange(len(self.rewards))[:, None] < self.lengths
        return np.where(inside, self.rewards, 0.0).sum(axis=0, dtype=np.float64)


def record(game: Game, cases: Ints, seed: int, act: Callable[[Turn], Tokens]) -> Recording:
    """Plays episodes to their end with ``act``, which may look into the game."""
    turn = game.reset(cases, seed)
    moments: list[tuple[Turn, Tokens, Turn, Bools]] = []
    alive = np.ones(len(cases), np.bool_)
    while alive.any():
        actions = act(turn)
        after = game.step(actions)
        moments.append((turn, actions, after, alive))
        alive = alive & ~after.done
        turn = after
    return Recording(
        messages=np.stack([before.messages for before, _, _, _ in moments]),
        fresh=np.array([before.fresh for before, _, _, _ in moments]),
        actions=np.stack([actions for _, actions, _, _ in moments]),
        rewards=np.stack([after.rewards for _, _, after, _ in moments]),
        alive=np.stack([alive for _, _, _, alive in moments]),
    )


def squeeze(tokens: npt.NDArray[Any], *others: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """Moves each row's ``PAD`` behind its tokens, and the entries of other arrays with them."""
    order = np.argsort(tokens == PAD, axis=1, kind="stable")
    width = int((tokens != PAD).sum(axis=1).max(initial=0))
    return [np.take_along_axis(array, order, axis=1)[:, :width] for array in (tokens, *others)]


def widened(tokens: Tokens, width: int) -> Tokens:
    """Returns rows of ``width`` tokens, ``PAD`` on the right, cut where they are longer."""
    wide = np.full((len(tokens), width), PAD, np.int16)
    columns = min(width, tokens.shape[1])
    wide[:, :columns] = tokens[:, :columns]
    return wide


def match(actions: Tokens, known: Tokens) -> Ints:
    """Returns which row of ``known`` [K, A] each action [B, A] is; -1 where it is none."""
    equal = (actions[:, None, :] == known[None, :, :]).all(axis=2)
    return np.where(equal.any(axis=1), equal.argmax(axis=1), -1)


class TextEpisode:
    r"""One episode for people and scripts: text in, text out.

    Example:
        ``episode = TextEpisode(Maze()); episode.reset(0); episode.step("move up\n")``.
    """

    def __init__(self, game: Game) -> None:
        self._game = game

    def reset(self, seed: int) -> str:
        """Begins an episode whose case is drawn from the seed; returns the first message."""
        rng = np.random.default_rng(seed)
        turn = self._game.reset(self._game.draw(rng, 1), seed)
        return self._game.words.decode(turn.messages[0])

    def step(self, text: str) -> tuple[str, float, bool]:
        """Takes an action, which ends with a line's end; returns (message, reward, done)."""
        tokens = self._game.words.encode(text)
        # one word more than an action may have, so that a long text stays a wrong one
        action = widened(tokens[None], self._game.action_tokens)
        if len(tokens) > self._game.action_tokens:
            action[0, -1] = UNKNOWN
        turn = self._game.step(action)
        return self._game.words.decode(turn.messages[0]), float(turn.rewards[0]), bool(turn.done[0])
