"""Pools: the same calls and the same numbers in this process and on Ray; deaths are made good."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from heliostat.errors import ActorLost, DeadlineExceeded, RoleFailed
from heliostat.events import EventLog
from heliostat.layout import Hosts, Layout
from heliostat.pool import LocalPool, Member, Pool, idempotent
from heliostat.recipe import Recipe
from heliostat.weights import Weights

RECIPE = Recipe(steps=1, seed=3, layout=Layout(call_deadline_s=60, max_restarts=2))
MEMBERS = 5


class Echo:
    """A role with something of everything."""

    family = "environment"

    def __init__(self, recipe: Recipe, member: Member) -> None:
        self.member = member
        self.noise = np.random.default_rng(member.seed("noise"))
        self.calls = 0

    @idempotent
    def scaled(self, item: float, weights: Weights, *, offset: float = 0.0) -> np.ndarray:
        (_, array), *_ = weights.arrays()
        return np.asarray(array * item + offset + self.member.index)

    @idempotent
    def place(self) -> tuple[int, int]:
        return self.member.index, os.getpid()

    @idempotent
    def slow_square(self, item: int, folder: str) -> int:
        Path(folder, str(os.getpid())).touch()
        time.sleep(1.0)
        return item * item

    def count(self) -> int:
        self.calls += 1
        return self.calls

    def count_slowly(self) -> int:
        time.sleep(2.0)
        return self.count()

    def fail(self, item: int) -> int:
        if item == 2:
            raise LookupError(f"no answer for item {item}")
        return item


class Unbuildable(Echo):
    def __init__(self, recipe: Recipe, member: Member) -> None:
        raise OSError(f"no shard for member {member.index}")


def ray_pool(role: type[Echo], folder: Path, hosts: int, recipe: Recipe = RECIPE) -> Pool[Echo]:
    from heliostat.ray_pool import RayPool

    layout = Hosts(hosts=hosts, members=MEMBERS, cpus=0.5)
    return RayPool("echo", role, recipe, layout, EventLog(folder / "events.jsonl"))


@pytest.fixture
def pool(ray_cluster: str, tmp_path: Path) -> Iterator[Pool[Echo]]:
    pool = ray_pool(Echo, tmp_path, hosts=2)
    pool.ready()
    yield pool
    pool.close()


def local() -> LocalPool[Echo]:
    return LocalPool("echo", Echo, RECIPE, MEMBERS)


def kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)


def test_items_go_to_members_in_turn_and_answers_keep_their_order() -> None:
    weights = Weights.of({"w": np.zeros(2)}, 0)
    answers = local().map(Echo.scaled, [0.0] * 7, weights, offset=10.0)
    assert [answer[0] for answer in answers] == [10, 11, 12, 13, 14, 10, 11]


def test_a_member_is_told_its_place_and_draws_its_own_stream() -> None:
    first, second = Member("echo", 0, 2, 3), Member("echo", 1, 2, 3)
    assert first.seed("noise") != second.seed("noise")
    assert first.seed("noise") == Member("echo", 0, 9, 3).seed("noise")


def test_a_failure_names_role_member_and_cause() -> None:
    with pytest.raises(
        RoleFailed, match=r"echo\[2\]\.fail on this process raised LookupError"
    ) as e:
        local().map(Echo.fail, range(4))
    assert "no answer for item 2" in str(e.value)
    assert isinstance(e.value.__cause__, LookupError)


@pytest.mark.ray
@pytest.mark.parametrize("hosts", [1, 2, 5])
def test_ray_and_local_pools_give_equal_arrays(
    ray_cluster: str, tmp_path: Path, hosts: int
) -> None:
    pool = ray_pool(Echo, tmp_path, hosts)
    pool.ready()
    weights = Weights.of({"w": np.random.default_rng(0).normal(size=(300, 300))}, 7)
    items = [0.5, 1.5, -2.0, 3.0, 4.0, 5.5, 6.0]
    ours = pool.map(Echo.scaled, items, weights, offset=1.0)
    theirs = local().map(Echo.scaled, items, weights, offset=1.0)
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert len({process for _, process in pool.each(Echo.place)}) == hosts
    assert [index for index, _ in pool.each(Echo.place)] == list(range(MEMBERS))
    pool.close()


@pytest.mark.ray
def test_a_pool_survives_pickling_and_speaks_to_the_same_actors(pool: Pool[Echo]) -> None:
    copy = pickle.loads(pickle.dumps(pool))
    assert copy.each(Echo.place) == pool.each(Echo.place)


@pytest.mark.ray
def test_a_failure_on_ray_carries_the_original_traceback(pool: Pool[Echo]) -> None:
    with pytest.raises(
        RoleFailed, match=r"echo\[2\]\.fail on node .* raised LookupError"
    ) as caught:
        pool.map(Echo.fail, range(4))
    assert 'raise LookupError(f"no answer for item {item}")' in str(caught.value)
    assert pool.map(Echo.fail, [0, 1]) == [0, 1]


@pytest.mark.ray
def test_a_host_that_cannot_be_built_says_why(ray_cluster: str, tmp_path: Path) -> None:
    pool = ray_pool(Unbuildable, tmp_path, hosts=1)
    with pytest.raises(RoleFailed, match="no shard for member 0"):
        pool.ready()


@pytest.mark.ray
def test_a_wait_ends_at_its_deadline_and_says_what_for(pool: Pool[Echo]) -> None:
    pending = pool.start_each(Echo.count_slowly)
    with pytest.raises(DeadlineExceeded, match=r"waited 0\.3 s for echo\.count_slowly on host 0"):
        pending.result(deadline_s=0.3)
    assert pending.result(deadline_s=30) == [1] * MEMBERS


@pytest.mark.ray
def test_an_idempotent_call_outlives_its_host(pool: Pool[Echo], tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    pending = pool.start(Echo.slow_square, [2, 3, 4, 5], str(marks))
    while not list(marks.iterdir()):
        time.sleep(0.02)
    kill(int(next(marks.iterdir()).name))
    assert pending.result() == [4, 9, 16, 25]
    events = [event["event"] for event in EventLog(tmp_path / "events.jsonl").read()]
    assert events.count("host-lost") == 1
    assert events.count("host-started") == 3


@pytest.mark.ray
def test_a_lost_call_that_may_not_be_repeated_is_reported(pool: Pool[Echo]) -> None:
    victim = pool.each(Echo.place)[0][1]
    pending = pool.start_each(Echo.count_slowly)
    time.sleep(0.5)
    kill(victim)
    with pytest.raises(
        ActorLost, match=r"members \[0, 1, 2\]; the method is not marked idempotent"
    ):
        pending.result()
    assert pool.each(Echo.place)[0][1] != victim


@pytest.mark.ray
def test_a_host_that_keeps_dying_is_given_up(ray_cluster: str, tmp_path: Path) -> None:
    recipe = Recipe(steps=1, layout=Layout(call_deadline_s=60, max_restarts=1))
    pool = ray_pool(Echo, tmp_path, hosts=1, recipe=recipe)
    pool.ready()
    for _ in range(1):
        kill(pool.each(Echo.place)[0][1])
    kill(pool.each(Echo.place)[0][1])
    with pytest.raises(ActorLost, match="its restarts are used up"):
        pool.each(Echo.place)
