"""Samplers on a real Ray: killed ones lose nothing, failed syncs are told, buckets stay small."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import psutil
import pytest
import ray
import torch

from algorithms.t1.model import TokenScorer
from algorithms.t1.roles import Ask, Samplers
from algorithms.t1.sampler import Pause
from algorithms.t1.tasks import Countdown, make_policy
from algorithms.t1.workload import WORKLOAD, T1Recipe
from heliostat import launch
from heliostat.actors.environment import Episodes, Job
from heliostat.errors import RoleFailed
from heliostat.events import EventLog
from heliostat.folder import RunFolder
from heliostat.launch import Order
from heliostat.layout import Hosts, Layout
from heliostat.pool import LocalPool, Member, idempotent
from heliostat.ray_pool import RayPool
from heliostat.tracker import read_metrics
from heliostat.weights import Weights

pytestmark = pytest.mark.ray

RECIPE = replace(
    WORKLOAD.recipe("smoke"),
    hidden=64,
    layers=2,
    answers_per_prompt=16,
    max_new_tokens=60,
    layout=replace(Layout.in_process(), call_deadline_s=120.0),
)
MEGABYTES, BUCKET = 64, 4 * 2**20


class Watched(Samplers):
    """A sampler that can also take larger weights and watch its private memory meanwhile."""

    def __init__(self, recipe: T1Recipe, member: Member) -> None:
        super().__init__(recipe, member)
        self._module = torch.nn.Linear(1024, MEGABYTES * 256, bias=False)
        self._memory = psutil.Process()

    def private(self) -> int:
        """Bytes of this process alone: its anonymous and its mapped but unshared pages."""
        return int(self._memory.memory_full_info().uss)

    @idempotent
    def take(self, given: Weights) -> tuple[int, int]:
        """Returns (most private bytes beyond those before, bytes of the largest bucket)."""
        before, most, over = self.private(), 0, threading.Event()

        def watch() -> None:
            nonlocal most
            while not over.wait(0.0005):
                most = max(most, self.private() - before)

        watcher = threading.Thread(target=watch)
        watcher.start()
        given.load_into(self._module)
        over.set()
        watcher.join()
        return most, max(len(bucket.read()) for bucket in given.buckets)


@pytest.fixture(scope="module")
def pool(ray_cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayPool[Watched]]:
    """One host, for a start costs seconds."""
    events = EventLog(tmp_path_factory.mktemp("pool") / "events.jsonl")
    pool = RayPool("samplers", Watched, RECIPE, Hosts(hosts=1, members=2, cpus=0.5), events)
    pool.ready()
    yield pool
    pool.close()


def asks(pause: Pause) -> list[Ask]:
    rows = Countdown(3).rows("train")[:48]
    return [Ask(Job(rows[at : at + 8], at), pause=pause) for at in range(0, 48, 8)]


def weights(version: int) -> Weights:
    scorer = TokenScorer(make_policy(replace(RECIPE, seed=version), Countdown(3)))
    return Weights.of_tensors(scorer.state_dict(), version, bucket_bytes=64 * 1024)


def assert_equal(ours: list[Episodes], expected: list[Episodes]) -> None:
    for one, other in zip(ours, expected, strict=True):
        assert one.fields.keys() == other.fields.keys()
        for name, value in other.fields.items():
            np.testing.assert_allclose(one[name], value, atol=1e-5, err_msg=name)


def test_a_killed_sampler_changes_no_answer_and_loses_none(pool: RayPool[Watched]) -> None:
    local = LocalPool("samplers", Samplers, RECIPE, 1)
    first, second = weights(1), weights(2)
    assert len(first.buckets) > 2
    begun = pool.map(Samplers.answer, asks(Pause(tokens=20)), first)
    assert_equal(begun, local.map(Samplers.answer, asks(Pause(tokens=20)), first))
    rest = [Ask(ask.job, part) for ask, part in zip(asks(Pause()), begun, strict=True)]
    called = pool.start(Samplers.answer, rest, second)
    time.sleep(0.05)
    (process,) = re.findall(r"process (\d+)", pool.places[0])
    os.kill(int(process), signal.SIGKILL)
    assert_equal(called.result(), local.map(Samplers.answer, rest, second))
    (again,) = re.findall(r"process (\d+)", pool.places[0])
    assert again != process


def test_a_receiver_that_raises_is_heard_and_the_next_sync_heals_it(
    pool: RayPool[Watched],
) -> None:
    first = weights(1)
    before = pool.map(Samplers.answer, asks(Pause(tokens=20)), first)
    arrays = dict(first.arrays())
    name = next(iter(arrays))
    odd = Weights.of({**arrays, name: arrays[name][:1]}, 3, bucket_bytes=64 * 1024)
    start = time.monotonic()
    with pytest.raises(RoleFailed, match=re.escape(f"{name}: expected shape")):
        pool.map(Samplers.answer, asks(Pause(tokens=20)), odd)
    assert time.monotonic() - start < 60
    assert_equal(pool.map(Samplers.answer, asks(Pause(tokens=20)), first), before)


def test_a_sync_needs_no_more_than_one_bucket_beside_the_model(pool: RayPool[Watched]) -> None:
    given = Weights.of(
        {"weight": np.random.default_rng(0).random((MEGABYTES * 256, 1024), np.float32)},
        1,
        bucket_bytes=BUCKET,
    )
    assert given.nbytes == MEGABYTES * 2**20
    for most, largest in pool.each(Watched.take, given):
        assert largest == BUCKET
        assert most <= largest + 0.1 * given.nbytes


@pytest.mark.long
def test_the_launching_process_moves_no_data_with_2048_samples_a_step(
    ray_cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner rank calls the actors itself; the driver starts and watches."""
    moved: list[int] = []
    submit, get = RayPool._submit, ray.get

    def submitting(self: Any, method: Any, calls: Any, shared: Any, named: Any) -> Any:
        moved.append(len(cloudpickle.dumps((calls, shared, named))))
        return submit(self, method, calls, shared, named)

    def getting(refs: Any, *, timeout: float | None = None) -> Any:
        found = get(refs, timeout=timeout)
        moved.append(len(cloudpickle.dumps(found)))
        return found

    monkeypatch.setattr(RayPool, "_submit", submitting)
    monkeypatch.setattr(ray, "get", getting)
    layout = Layout(
        learners=1, learner_cpus=0.5, data=Hosts(hosts=1, cpus=0.1), environment=Hosts(hosts=1)
    )
    recipe = replace(
        RECIPE,
        layout=replace(layout, evaluation=Hosts(hosts=1, cpus=0.1)),
        sft_steps=2,
        steps=3,
        prompts_per_step=32,
        answers_per_prompt=64,
        max_new_tokens=28,
        eval_prompts=8,
        test_prompts=8,
        checkpoint_every=10,
    )
    order = Order(workload=WORKLOAD, spec="t1", recipe=recipe, folder=RunFolder(tmp_path / "a"))
    launch.create(order)
    rows = [row for row in read_metrics(tmp_path / "a") if "train/kl" in row]
    assert [round(row["perf/samples_per_s"] * row["perf/step_s"]) for row in rows] == [2048] * 3
    assert sum(moved) / recipe.steps < 1_000_000
