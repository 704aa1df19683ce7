"""The shared families: rows in their own order, episodes stamped, scores that name weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heliostat.actors.data import Reader, Stream, share
from heliostat.actors.environment import (
    EnvironmentActor,
    Episodes,
    GymnasiumEnvironment,
    Job,
    ParallelEnvironment,
    play,
)
from heliostat.actors.evaluation import EvaluationActor, Score, merge
from heliostat.errors import UsageError
from heliostat.pool import LocalPool, Member
from heliostat.recipe import Recipe
from heliostat.weights import Weights


class Numbers(Reader[int]):
    size_of_all = 0

    def __init__(self, recipe: Recipe, member: Member) -> None:
        super().__init__(list(share(recipe.steps, member)))


def stream(size: int, members: int, seed: int = 0) -> Stream[int]:
    pool = LocalPool("numbers", Numbers, Recipe(steps=size), members)
    return Stream(pool, Numbers, seed)


sizes = st.integers(1, 40)
counts = st.lists(st.integers(1, 25), min_size=1, max_size=8)


@given(sizes, st.integers(1, 9))
def test_shares_cover_a_data_set_once_in_order(size: int, members: int) -> None:
    parts = [share(size, Member("numbers", index, members, 0)) for index in range(members)]
    assert [row for part in parts for row in part] == list(range(size))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(sizes, counts, st.integers(1, 5), st.integers(0, 3))
def test_every_row_comes_once_an_epoch(
    size: int, batches: list[int], members: int, seed: int
) -> None:
    rows = stream(size, members, seed)
    seen = [row for count in batches for row in rows.next(count)]
    for start in range(0, len(seen) - size + 1, size):
        assert sorted(seen[start : start + size]) == list(range(size))


@given(sizes, counts, st.integers(1, 5))
def test_members_and_batches_do_not_change_the_order(
    size: int, batches: list[int], members: int
) -> None:
    rows = stream(size, members)
    seen = [row for count in batches for row in rows.next(count)]
    assert seen == stream(size, 1).next(sum(batches))


@given(sizes, counts, st.integers(1, 5))
def test_a_resumed_stream_repeats_nothing_and_skips_nothing(
    size: int, batches: list[int], members: int
) -> None:
    straight = stream(size, members)
    for count in batches:
        straight.next(count)
    resumed = stream(size, members + 1)
    resumed.load(straight.state())
    assert resumed.next(7) == straight.next(7)


def test_epochs_and_seeds_are_shuffled_apart() -> None:
    rows = stream(100, 2)
    first, second = rows.next(100), rows.next(100)
    assert first != second
    assert first != stream(100, 2, seed=1).next(100)
    assert first != sorted(first)


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(ValueError, match="pool 'numbers' has no rows"):
        stream(0, 1)


class Coin:
    """A policy with one weight: the probability of action 1."""

    def __init__(self) -> None:
        self.loads = 0
        self._key = ""
        self._chance = 0.0

    def load(self, weights: Weights) -> None:
        if weights.key != self._key:
            self._key = weights.key
            self._chance = float(dict(weights.arrays())["chance"])
            self.loads += 1

    def act(self, observations: np.ndarray, generator: torch.Generator) -> dict[str, np.ndarray]:
        draws = torch.rand(len(observations), generator=generator).numpy()
        return {"action": (draws < self._chance).astype(np.int64), "log_probs": np.log(draws)}


def weights(chance: float, version: int = 5) -> Weights:
    return Weights.of({"chance": np.array(chance)}, version)


def test_episodes_are_stamped_and_end_where_their_environment_says() -> None:
    environment = GymnasiumEnvironment("CartPole-v1", num_envs=4)
    episodes = play(environment, Coin(), Job(None, 3), weights(1.0))
    assert episodes.version == 5
    assert episodes["action"].shape == episodes["alive"].shape == episodes["reward"].shape
    assert episodes["observation"].shape == (*episodes["alive"].shape, 4)
    lengths = episodes["alive"].sum(axis=0)
    assert ((lengths >= 7) & (lengths <= 12)).all()  # a cart always pushed to the right
    np.testing.assert_array_equal(episodes.returns, lengths)


def test_equal_jobs_give_equal_episodes_and_others_do_not() -> None:
    def fields(seed: int) -> Mapping[str, np.ndarray]:
        actor = EnvironmentActor(GymnasiumEnvironment("CartPole-v1", num_envs=3), Coin())
        actor.play(Job(None, 99), weights(0.5))  # what came before must not matter
        return actor.play(Job(None, seed), weights(0.5)).fields

    one, same, other = fields(1), fields(1), fields(2)
    assert all(np.array_equal(one[name], same[name]) for name in one)
    assert not np.array_equal(one["observation"][0], other["observation"][0])


def test_a_time_limit_ends_an_episode_and_says_so() -> None:
    environment = GymnasiumEnvironment("Pendulum-v1", num_envs=2, max_episode_steps=5)

    class Still(Coin):
        def act(self, observations: np.ndarray, generator: torch.Generator) -> Any:
            return {"action": np.zeros((len(observations), 1), np.float32)}

    episodes = play(environment, Still(), Job(None, 0), weights(0.0))
    assert episodes["alive"].shape == (5, 2)
    assert episodes["truncated"][-1].all()


class Leaving:
    """A parallel environment of two agents; agent a leaves after 2 steps, b after 4."""

    possible_agents = ("a", "b")

    def reset(self, seed: int, options: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        self.agents = list(self.possible_agents)
        self.time = 0
        return self._look(), {}

    def step(self, actions: dict[str, int]) -> Any:
        assert set(actions) == set(self.agents)
        self.time += 1
        ended = {"a": self.time >= 2, "b": self.time >= 4}
        answer = (
            self._look(),
            {agent: float(actions[agent]) for agent in self.agents},
            {agent: ended[agent] for agent in self.agents},
            dict.fromkeys(self.agents, False),
            {},
        )
        self.agents = [agent for agent in self.agents if not ended[agent]]
        return answer

    def _look(self) -> dict[str, np.ndarray]:
        return {agent: np.full(2, self.time, np.float32) for agent in self.agents}


def test_agents_that_leave_earn_nothing_more() -> None:
    episodes = play(ParallelEnvironment(Leaving()), Coin(), Job(None, 0), weights(1.0))
    assert episodes["alive"].sum(axis=0).tolist() == [2, 4]
    assert episodes.returns.tolist() == [2.0, 4.0]


def test_episodes_survive_a_checkpoint(tmp_path: Any) -> None:
    from heliostat import checkpoint

    environment = GymnasiumEnvironment("CartPole-v1", num_envs=2)
    episodes = play(environment, Coin(), Job(None, 3), weights(0.5))
    _, state = checkpoint.load(checkpoint.save(tmp_path, 1, episodes.state()))
    back = Episodes.of(state)
    assert (back.version, back.seed) == (episodes.version, episodes.seed)
    for name, value in episodes.fields.items():
        np.testing.assert_array_equal(back[name], value)
        assert back[name].dtype == value.dtype


def test_a_score_names_the_weights_that_earned_it_and_loads_them_once() -> None:
    coin = Coin()
    environment = GymnasiumEnvironment("CartPole-v1", num_envs=4)
    actor = EvaluationActor(environment, coin, lambda e: {"return": float(e.returns.mean())})
    given = weights(1.0, version=7)
    scores = [actor.score(Job(None, seed), given) for seed in range(3)]
    assert {score.version for score in scores} == {7}
    assert {score.key for score in scores} == {given.key}
    assert {score.count for score in scores} == {4}
    assert coin.loads == 1


def test_scores_merge_by_count_and_only_within_a_version() -> None:
    merged = merge([Score(1, 1, {"x": 1.0}), Score(1, 3, {"x": 5.0})])
    assert merged == Score(1, 4, {"x": 4.0})
    with pytest.raises(ValueError, match=r"one version, found versions \[1, 2\]"):
        merge([Score(1, 1, {"x": 1.0}), Score(2, 1, {"x": 1.0})])
    with pytest.raises(ValueError, match=r"one set of weights, found digests \['a', 'b'\]"):
        merge([Score(1, 1, {"x": 1.0}, "a"), Score(1, 1, {"x": 1.0}, "b")])


def test_a_position_in_another_data_set_is_not_taken_up(caplog: pytest.LogCaptureFixture) -> None:
    pool = LocalPool("numbers", Numbers, Recipe(steps=10), 2)
    first = Stream(pool, Numbers, 0, "before")
    first.next(7)
    same, other = Stream(pool, Numbers, 0, "before"), Stream(pool, Numbers, 0, "after")
    for one in (same, other):
        one.load(first.state())
    assert "expected data before, found after" in caplog.text
    assert "row 7 -> 0" in caplog.text
    assert same.next(5) == first.next(5)
    assert same.reread(0, 7) == Stream(pool, Numbers, 0).next(7)
    with pytest.raises(UsageError, match=r"answers to rows 0…7 were under way"):
        other.reread(0, 7)
    assert other.next(7) == Stream(pool, Numbers, 0).next(7)
    old = {"position": 7}  # of a checkpoint that names no data set
    other.load(old)
    assert other.state()["position"] == 7
