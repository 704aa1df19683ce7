"""Pools whose members live in Ray actors, one *host* actor carrying many members."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast
from weakref import WeakKeyDictionary

import numpy as np
import ray
from ray.exceptions import (
    ActorDiedError,
    GetTimeoutError,
    ObjectLostError,
    RayActorError,
    RayTaskError,
)

from heliostat.errors import ActorLost, DeadlineExceeded, RoleFailed
from heliostat.events import EventLog
from heliostat.layout import Hosts, Layout
from heliostat.pool import Member, Pending, Pool, is_idempotent, role_failed
from heliostat.recipe import Recipe
from heliostat.weights import Weights

R = TypeVar("R")
RoleT = TypeVar("RoleT")
_INLINE_BYTES = 64 * 1024  # smaller arguments travel inside the call
_RETRY_PAUSE_S = 0.2
_FETCH_S = 300.0
logger = logging.getLogger("heliostat")


class Host:
    """The actor: carries members and calls their methods by name."""

    def __init__(
        self, name: str, role: Callable[[Any, Member], Any], recipe: Recipe, members: list[Member]
    ) -> None:
        import torch

        torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
        self._name = name
        self._node = ray.util.get_node_ip_address()
        self._members = {member.index: role(recipe, member) for member in members}

    def describe(self) -> str:
        """Returns where this host runs, and proves that it is alive."""
        return f"node {self._node} (process {os.getpid()})"

    def call(
        self,
        method: str,
        members: list[int],
        own: list[tuple[object, ...]],
        named: dict[str, object],
        *shared: object,
    ) -> list[Any] | RoleFailed:
        """Calls the method on each member in turn; a failure is returned, not raised."""
        answers: list[Any] = []
        for member, arguments in zip(members, own, strict=True):
            function = getattr(self._members[member], method)
            try:
                answers.append(function(*arguments, *shared, **named))
            except Exception as error:  # noqa: BLE001 - travels to the caller, which raises it
                return role_failed(self._name, member, method, self.describe(), error)
        return answers


class RayPool(Pool[RoleT]):
    """Members spread over host actors. Picklable: learner ranks use the launcher's actors.

    A host that dies is restarted by Ray from its constructor, up to ``layout.max_restarts`` times.
    """

    def __init__(
        self,
        name: str,
        role: type[RoleT],
        recipe: Recipe,
        hosts: Hosts,
        events: EventLog,
        host_class: type[Host] = Host,
        **options: object,
    ) -> None:
        """Starts the host actors, with Ray's further ``options``; ``ready`` waits for them."""
        layout = recipe.layout
        count = hosts.num_members
        self.name = name
        self.num_members = count
        self.layout: Layout = layout
        self._events = events
        self._host_of = [member * hosts.hosts // count for member in range(count)]
        self._hosts: list[Any] = []
        threads = str(max(1, int(hosts.cpus)))
        actor = cast("Any", ray.remote(host_class))
        for host in range(hosts.hosts):
            members = [
                Member(name, index, count, recipe.seed)
                for index in range(count)
                if self._host_of[index] == host
            ]
            self._hosts.append(
                actor.options(
                    num_cpus=hosts.cpus,
                    num_gpus=hosts.gpus,
                    max_restarts=layout.max_restarts,
                    runtime_env={"env_vars": {"OMP_NUM_THREADS": threads}},
                    **options,
                ).remote(name, role, recipe, members)
            )
        self.places = ["not started"] * hosts.hosts

    def ready(self) -> None:
        """Waits until every host has built its members.

        Raises:
            RoleFailed: a constructor raised.
            DeadlineExceeded: a host did not start within ``layout.start_deadline_s``.
        """
        deadline = _Deadline(self.layout.start_deadline_s)
        for index, host in enumerate(self._hosts):
            waiting = f"host {index} of {len(self._hosts)} of pool {self.name!r} to start"
            try:
                self.places[index] = _get(host.describe.remote(), deadline, waiting)
            except (RayTaskError, RayActorError) as error:
                raise RoleFailed(f"{self.name}: a host could not start\n{error}") from error
            self._events.add("host-started", pool=self.name, host=index, place=self.places[index])

    def close(self) -> None:
        """Kills the hosts; their resources are free soon after."""
        for host in self._hosts:
            ray.kill(host)

    def _submit(
        self,
        method: Callable[..., R],
        calls: Sequence[tuple[int, tuple[object, ...]]],
        shared: tuple[object, ...],
        named: dict[str, object],
    ) -> Pending[list[R]]:
        arguments = tuple(_stored(argument) for argument in shared)
        positions: dict[int, list[int]] = {}
        for position, (member, _) in enumerate(calls):
            positions.setdefault(self._host_of[member], []).append(position)
        shares: list[Share] = []
        for host, where in positions.items():
            members = [calls[i][0] for i in where]
            own = [calls[i][1] for i in where]
            share = Share(host, where, (method.__name__, members, own, named, *arguments))
            self._send(share)
            shares.append(share)
        return _RayPending(self, method, shares, len(calls))

    def _send(self, share: Share) -> None:
        share.answer = self._hosts[share.host].call.remote(*share.arguments)

    def collect(
        self, share: Share, method: Callable[..., R], deadline: _Deadline
    ) -> list[R] | RoleFailed:
        """Waits for one host's share of a call, repeating it where the host died and it may."""
        where = f"{self.name}.{method.__name__} on host {share.host}, {self.places[share.host]}"
        while True:
            try:
                return _get(share.answer, deadline, where)
            except (RayActorError, ObjectLostError) as error:
                self._events.add("host-lost", pool=self.name, host=share.host, call=where)
                if isinstance(error, ActorDiedError) and not self._await_restart(share, deadline):
                    raise self._lost(share, where, "its restarts are used up", error) from error
                if not is_idempotent(method):
                    reason = "the method is not marked idempotent, so it was not repeated"
                    raise self._lost(share, where, reason, error) from error
                self._await_restart(share, deadline)
                self._send(share)

    def _await_restart(self, share: Share, deadline: _Deadline) -> bool:
        """Waits until the host answers again; False where Ray gave it up."""
        while True:
            waiting = f"host {share.host} of pool {self.name!r} to restart"
            try:
                place = _get(self._hosts[share.host].describe.remote(), deadline, waiting)
            except ActorDiedError:
                return False
            except RayActorError:
                if not deadline.left:
                    raise _late(deadline, waiting) from None
                time.sleep(_RETRY_PAUSE_S)
                continue
            if place != self.places[share.host]:
                self.places[share.host] = place
                self._events.add("host-started", pool=self.name, host=share.host, place=place)
            return True

    def _lost(self, share: Share, where: str, why: str, error: Exception) -> ActorLost:
        members = share.arguments[1]
        return ActorLost(f"{where} died during a call on members {members}; {why}\n{error}")


@dataclass(slots=True)
class Share:
    """The part of a call that one host carries."""

    host: int
    positions: list[int]
    arguments: tuple[Any, ...]
    answer: Any = None


@dataclass(frozen=True, slots=True)
class _RayPending(Generic[R]):
    pool: RayPool[Any]
    method: Callable[..., R]
    shares: list[Share]
    size: int

    def done(self) -> bool:
        refs: list[Any] = [share.answer for share in self.shares]
        return not refs or not ray.wait(refs, num_returns=len(refs), timeout=0)[1]

    def result(self, deadline_s: float | None = None) -> list[R]:
        deadline = _Deadline(self.pool.layout.call_deadline_s if deadline_s is None else deadline_s)
        refs: list[Any] = [share.answer for share in self.shares]
        try:
            parts: list[Any] = ray.get(refs, timeout=deadline.left)
        except (
            RayActorError,
            ObjectLostError,
            GetTimeoutError,
        ):  # one by one, to tell and repeat what is missing
            parts = [self.pool.collect(share, self.method, deadline) for share in self.shares]
        answers: list[Any] = [None] * self.size
        for share, part in zip(self.shares, parts, strict=True):
            if isinstance(part, RoleFailed):
                raise part
            for position, answer in zip(share.positions, part, strict=True):
                answers[position] = answer
        return answers


@dataclass(frozen=True, slots=True)
class _Deadline:
    """A number of seconds from now."""

    seconds: float
    start: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        return max(0.0, self.start + self.seconds - time.monotonic())


@dataclass(frozen=True, slots=True)
class _StoredBucket:
    """A bucket of weights in the object store, fetched to a node when first read there."""

    ref: Any

    def read(self) -> np.ndarray:
        return _get(self.ref, _Deadline(_FETCH_S), "a bucket of weights")


_in_store: WeakKeyDictionary[Weights, Weights] = WeakKeyDictionary()


def _stored(argument: object) -> object:
    """Puts a large argument into the object store, weights once for all calls that use them."""
    if isinstance(argument, Weights) and argument.nbytes > _INLINE_BYTES:
        if argument not in _in_store:
            _in_store[argument] = argument.moved(lambda data: _StoredBucket(ray.put(data)))
        return _in_store[argument]
    if isinstance(argument, np.ndarray):
        array = cast("np.ndarray", argument)
        return ray.put(array) if array.nbytes > _INLINE_BYTES else array
    return argument


def _get(ref: Any, deadline: _Deadline, waiting: str) -> Any:  # noqa: ANN401 - any role's answer
    try:
        return ray.get(ref, timeout=deadline.left)
    except GetTimeoutError:
        raise _late(deadline, waiting) from None


def _late(deadline: _Deadline, waiting: str) -> DeadlineExceeded:
    return DeadlineExceeded(f"waited {deadline.seconds:g} s for {waiting}; it did not answer")
