"""The recipe's game, as an environment whose observations are tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from algorithms.lmrl.workload import GameName, LmrlRecipe
from envs.text.endgames import Endgames
from envs.text.game import Game, Ints, Turn
from envs.text.maze import Maze
from envs.text.text_nav import TextNav
from envs.text.wordle import Wordle
from heliostat.actors.environment import Step

_GAMES: Mapping[GameName, Callable[[LmrlRecipe], Game]] = {
    "maze_fo": lambda _: Maze(),
    "maze_po": lambda recipe: Maze(partial=True, history=recipe.history),
    "text_nav_fo": lambda _: TextNav(),
    "text_nav_po": lambda _: TextNav(partial=True),
    "wordle": lambda _: Wordle(),
    "endgames": lambda _: Endgames(),
}


def make_game(recipe: LmrlRecipe) -> Game:
    """Returns the recipe's game."""
    return _GAMES[recipe.game](recipe)


class Playing:
    """A game for the shared actors: the first column of an observation tells a fresh context."""

    def __init__(self, game: Game) -> None:
        self._game = game

    def reset(self, task: Ints, seed: int) -> np.ndarray:
        """Begins an episode of each case of ``task``; returns int16 [B, 1 + S]."""
        return _observed(self._game.reset(task, seed))

    def step(self, actions: Mapping[str, np.ndarray]) -> Step:
        """Takes ``actions["action"]``, int16 [B, A]."""
        turn = self._game.step(actions["action"])
        return Step(_observed(turn), turn.rewards, turn.done, {"invalid": turn.invalid})


def _observed(turn: Turn) -> np.ndarray:
    return np.pad(turn.messages, ((0, 0), (1, 0)), constant_values=int(turn.fresh))
