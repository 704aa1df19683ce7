"""LMRL-Gym's actors: trajectories (data), players (environment) and judges (evaluation)."""

from __future__ import annotations

from algorithms.lmrl.games import Playing, make_game
from algorithms.lmrl.model import agent
from algorithms.lmrl.player import Player
from algorithms.lmrl.rows import Rows, recording
from algorithms.lmrl.workload import LmrlRecipe
from envs.text.game import Bools, Game, Recording
from heliostat import Member
from heliostat.actors.data import Reader, share
from heliostat.actors.environment import EnvironmentActor, Episodes
from heliostat.actors.evaluation import EvaluationActor
from heliostat.seeding import numpy_generator


def best(played: Recording, goal: float, keep: float) -> Bools:
    """Tells which episodes a filtered method imitates, [episodes].

    Args:
        played: the episodes.
        goal: the last reward of an episode that succeeds.
        keep: share of the best by return, the first of equals; 0 keeps those that succeed.
    """
    if keep == 0:
        return successes(played, goal)
    order = (-played.returns).argsort(kind="stable")
    kept = played.ended & False
    kept[order[: max(1, round(keep * len(order)))]] = True
    return kept


def successes(played: Recording, goal: float) -> Bools:
    """Tells which episodes ended with the game's goal, [episodes]."""
    lengths = played.lengths
    last = played.rewards[lengths - 1, range(len(lengths))]
    return played.ended & (last == goal)


class Trajectories(Reader[Rows]):
    """The data of the paper's behaviour policies, in chunks."""

    def __init__(self, recipe: LmrlRecipe, member: Member) -> None:
        played = make_game(recipe).behave(
            numpy_generator(recipe.data_seed, recipe.game), recipe.episodes
        )
        rows = Rows.of(played, recipe.discount)
        if recipe.method == "filtered_bc":
            rows = rows.part(best(played, make_game(recipe).goal, recipe.keep))
        chunks = list(rows.chunks(recipe.rows_per_chunk))
        mine = share(len(chunks), member)
        super().__init__(chunks[mine.start : mine.stop])


class Players(EnvironmentActor):
    """Plays the rollouts of the online methods."""

    def __init__(self, recipe: LmrlRecipe, member: Member) -> None:
        del member
        game = make_game(recipe)
        super().__init__(Playing(game), _player(recipe, game))


class Judges(EvaluationActor):
    """Scores weights on the game's cases."""

    def __init__(self, recipe: LmrlRecipe, member: Member) -> None:
        del member
        game = make_game(recipe)

        def score(episodes: Episodes) -> dict[str, float]:
            return _scores(episodes, game)

        super().__init__(Playing(game), _player(recipe, game), score)


def _player(recipe: LmrlRecipe, game: Game) -> Player:
    return Player(agent(recipe, len(game.words), seed=0), game)


def _scores(episodes: Episodes, game: Game) -> dict[str, float]:
    """Returns means over episodes; the normalised score follows from their mean return."""
    played = recording(episodes)
    return {
        "return": float(played.returns.mean()),
        "success": float(successes(played, game.goal).mean()),
        "invalid": float(episodes["invalid"][played.alive].mean()),
        "turns": float(played.lengths.mean()),
    }
