"""The double-T maze, fully (FO) or partially (PO) observed.

A player on a 10 x 13 grid of 26 free cells looks for the goal at (8, 6) from one of the 25 others.
A move costs 1, the one that reaches the goal nothing, an action that is no move 4; after 100 moves
the next one ends the game. FO tells goal, position and walls, and every turn is a context of its
own; PO tells the walls alone, and the context holds the moves so far. The paper's PO keeps the last
20 turns; here the context is cut to its last ``history`` turns whenever it reached twice as many,
so that most turns only append.
"""

from __future__ import annotations

from collections import deque
from functools import cache
from typing import Final, cast

import numpy as np

from envs.text.game import (
    Bools,
    Floats,
    Ints,
    Normaliser,
    Recording,
    Tokens,
    Turn,
    Words,
    match,
    record,
    squeeze,
    widened,
)

GRID: Final = (
    "#############",
    "#.....#.....#",
    "###.#####.###",
    "###.#####.###",
    "###.#####.###",
    "###.......###",
    "######.######",
    "######.######",
    "######.######",
    "#############",
)
CELLS: Final = tuple(
    (row, column)
    for row, line in enumerate(GRID)
    for column, mark in enumerate(line)
    if mark == "."
)
"""Free cells by number, row by row."""
GOAL: Final = CELLS.index((8, 6))
JUNCTION: Final = CELLS.index((5, 6))
ACTIONS: Final = ("move left\n", "move right\n", "move up\n", "move down\n")
_STEPS: Final = ((0, -1), (0, 1), (-1, 0), (1, 0))
MAX_MOVES: Final = 100
SOLVER_SHARE: Final = 0.15
"""Of the data's moves; the others are random."""


@cache
def next_cells() -> Ints:
    """Returns where each move leads from each cell, [26, 4]; a wall keeps the player in place."""
    places = {cell: number for number, cell in enumerate(CELLS)}
    return np.array(
        [
            [places.get((r + dr, c + dc), here) for dr, dc in _STEPS]
            for (r, c), here in places.items()
        ]
    )


@cache
def distances() -> Ints:
    """Returns moves to the goal from each cell, [26]."""
    found = {GOAL: 0}
    queue = deque([GOAL])
    while queue:
        cell = queue.popleft()
        for neighbour in cast("list[int]", next_cells()[cell].tolist()):
            if neighbour not in found:  # every move can be taken back
                found[neighbour] = found[cell] + 1
                queue.append(neighbour)
    return np.array([found[cell] for cell in range(len(CELLS))])


@cache
def solution() -> Ints:
    """Returns the move of a shortest way from each cell, [26]."""
    return distances()[next_cells()].argmin(axis=1)


def _walls(cell: int) -> str:
    names = ("to your right", "to your left", "above you", "below you")
    found = [
        name
        for name, move in zip(names, (1, 0, 2, 3), strict=True)
        if next_cells()[cell, move] == cell
    ]
    if not found:
        return "There are no walls near you."
    if len(found) == 1:
        return f"There is a wall {found[0]}."
    return f"There are walls {', '.join(found)}."


def _place(cell: int) -> str:
    row, column = CELLS[cell]
    return f"{' '.join(str(row))}, {' '.join(str(column))}."


def message(cell: int, partial: bool) -> str:
    """Returns what a player is told in a cell."""
    if partial:
        return f"{_walls(cell)}\n"
    goal, place = _place(GOAL), _place(cell)
    return (
        f"The goal is at position {goal} Your current position is at position {place} "
        f"{_walls(cell)}\n"
    )


class Maze:
    """A batch of episodes; a case is the cell in which one starts."""

    action_tokens = 3
    max_turns = MAX_MOVES + 1
    goal = 0.0

    def __init__(self, *, partial: bool = False, history: int = 10) -> None:
        self.partial = partial
        self.history = history
        best = -25.75 if partial else -6.84
        self.normaliser = Normaliser(least=-101, average=-83, best=best)
        texts = [message(cell, partial) for cell in range(len(CELLS))]
        spoken = [word for text in (*texts, *ACTIONS) for word in text.split()]
        self.words = Words(spoken)
        self._messages = self.words.table(texts)
        self.actions = self.words.table(ACTIONS)
        """Tokens of the four moves, [4, 3]."""
        turns = history if partial else 0
        width = self._messages.shape[1]
        self.message_tokens = width + turns * (width + self.action_tokens)

    def cases(self) -> Ints:
        """Returns all cells but the goal."""
        return np.array([cell for cell in range(len(CELLS)) if cell != GOAL])

    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        """Draws starting cells evenly."""
        return rng.choice(self.cases(), count)

    def reset(self, cases: Ints, seed: int) -> Turn:
        """Puts a player into each cell; nothing is random."""
        del seed
        self.cells = cases.copy()
        """Where the players are, [B]."""
        self._done = cases == GOAL
        self._moves = 0
        self._log: list[Tokens] = []
        nothing = np.zeros(len(cases), np.float32)
        return self._turn(nothing, np.zeros(len(cases), np.bool_))

    def step(self, actions: Tokens) -> Turn:
        """Moves the players."""
        moves = match(actions, self.actions)
        invalid = np.less(moves, 0)
        over = self._moves >= MAX_MOVES
        if not over:
            moved = next_cells()[self.cells, np.maximum(moves, 0)]
            self.cells = np.where(self._done | invalid, self.cells, moved)
        there = self.cells == GOAL
        rewards = np.where(invalid, -4.0, -1.0) if not over else np.full(len(moves), -1.0)
        rewards = np.where(there, 0.0, rewards)
        paid = np.where(self._done, 0.0, rewards).astype(np.float32)
        self._done = self._done | there | over
        self._moves += 1
        self._log.append(actions)
        return self._turn(paid, invalid)

    def _turn(self, rewards: Floats, invalid: Bools) -> Turn:
        here = self._messages[self.cells]
        self._log.append(here)
        fresh = self._moves == 0 or not self.partial
        told = here
        if self.partial and self._moves >= 2 * self.history and self._moves % self.history == 0:
            fresh = True
            recent = self._log[-2 * self.history - 1 :]
            (told,) = squeeze(np.concatenate(recent, axis=1))
        messages = widened(np.where(self._done[:, None], 0, told), self.message_tokens)
        return Turn(messages, fresh, rewards, self._done.copy(), invalid)

    def behave(self, rng: np.random.Generator, count: int) -> Recording:
        """Plays inside one of three parts: 15 % of moves are the solver's, the others random.

        The left and the right arm end at the junction, the stem at the goal; no episode of the
        data crosses from an arm to the goal, so that a good player must stitch.
        """
        parts = _parts()
        chosen = rng.integers(len(parts), size=count)
        inside = parts[chosen]
        starts = np.array([rng.choice(np.flatnonzero(row)) for row in inside])
        lengths = np.full(count, self.max_turns)
        arms = np.less(chosen, 2)

        def act(turn: Turn) -> Tokens:
            del turn
            ahead = next_cells()[self.cells]
            # a random move never leaves the part
            allowed = np.take_along_axis(inside, ahead, axis=1)
            allowed |= (ahead == JUNCTION) | (ahead == GOAL)
            odds = rng.random((count, 4)) * allowed
            moves = np.where(
                rng.random(count) < SOLVER_SHARE, solution()[self.cells], odds.argmax(1)
            )
            arrives = arms & (ahead[np.arange(count), moves] == JUNCTION)
            reached = arrives & (lengths == self.max_turns)
            lengths[reached] = self._moves + 1
            return self.actions[moves]

        played = record(self, starts, 0, act)
        return Recording(
            played.messages, played.fresh, played.actions, played.rewards, played.alive, lengths
        )


@cache
def _parts() -> Bools:
    """Returns which cells belong to the left arm, the right arm and the stem, [3, 26]."""
    stem = [row > 5 or cell == JUNCTION for cell, (row, _) in enumerate(CELLS)]
    left = [row <= 5 and column < 6 for row, column in CELLS]
    right = [row <= 5 and column > 6 for row, column in CELLS]
    whole = np.array([left, right, stem])
    whole[:, GOAL] = False
    return whole
