"""Pools that several trials use at once: hosts that carry members of each, and share out turns.

A host builds a trial's members at its first call, from the recipe that travels with every call,
so that a restarted host rebuilds them; it drops them when the trial ends. One item runs at a time.
The next turn goes to the waiting trial that has had the least of the host's time.
"""

from __future__ import annotations

import copy
import itertools
import threading
import time
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import ray

from heliostat.errors import RoleFailed
from heliostat.events import EventLog
from heliostat.layout import Hosts
from heliostat.pool import Member, role_failed
from heliostat.ray_pool import Host, RayPool, Share
from heliostat.recipe import Recipe
from heliostat.workload import Workload, pool_hosts, resolve

RoleT = TypeVar("RoleT")

_CALLS_PER_TRIAL = 4
"""Calls of one trial that may wait in a host; more wait in Ray's own queue."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """One trial as the hosts know it, from its start or resumption to its end or pause."""

    key: str
    recipe: Recipe


class Turns:
    """Gives one item at a time its turn, and keeps the calls of each caller in their order."""

    def __init__(self, restarted: bool = False) -> None:
        self._restarted = restarted
        self._changed = threading.Condition()
        self._busy = False
        self._waiting: Counter[str] = Counter()
        self._served: dict[str, float] = {}
        self._next: dict[tuple[str, str], int] = {}

    @contextmanager
    def call(self, tenant: str, caller: str, number: int | None) -> Generator[None]:
        """Waits for the caller's earlier calls; a repeated call has no number and no order."""
        if number is None:
            yield
            return
        line = tenant, caller
        with self._changed:
            self._next.setdefault(line, number if self._restarted else 0)
            self._changed.wait_for(lambda: number <= self._next.get(line, number))
        try:
            yield
        finally:
            with self._changed:
                self._next[line] = max(self._next.get(line, 0), number + 1)
                self._changed.notify_all()

    @contextmanager
    def turn(self, tenant: str) -> Generator[None]:
        """Waits for the tenant's turn; a new tenant begins level with the least served one."""
        with self._changed:
            self._served.setdefault(tenant, min(self._served.values(), default=0.0))
            self._waiting[tenant] += 1
            self._changed.wait_for(lambda: not self._busy and self._first() == tenant)
            self._waiting[tenant] -= 1
            self._busy = True
        start = time.perf_counter()
        try:
            yield
        finally:
            with self._changed:
                self._busy = False
                spent = time.perf_counter() - start
                self._served[tenant] = self._served.get(tenant, 0.0) + spent
                self._changed.notify_all()

    def _first(self) -> str:
        waiting = [tenant for tenant, count in self._waiting.items() if count]
        return min(waiting, key=lambda tenant: self._served.get(tenant, 0.0))

    def forget(self, tenant: str) -> None:
        """Drops what is known of a tenant that has left."""
        with self._changed:
            self._served.pop(tenant, None)
            self._waiting.pop(tenant, None)
            for line in [line for line in self._next if line[0] == tenant]:
                del self._next[line]


class SharedHost(Host):
    """The actor: carries the members of several trials and calls them in turn."""

    def __init__(
        self, name: str, role: Callable[[Any, Member], Any], recipe: Recipe, members: list[Member]
    ) -> None:
        super().__init__(name, role, recipe, [])  # members are built for each trial
        self._role = role
        self._places = members
        self._carried: dict[str, Host] = {}
        self._left: set[str] = set()
        context = cast("Any", ray.get_runtime_context())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's own property asks a deprecated one
            self._turns = Turns(restarted=bool(context.was_current_actor_reconstructed))

    def serve(
        self,
        tenant: Tenant,
        caller: str,
        number: int | None,
        call: tuple[str, list[int], list[tuple[object, ...]], dict[str, object]],
        *shared: object,
    ) -> list[Any] | RoleFailed:
        """Calls the method on each of the trial's members; a failure is returned, not raised."""
        method, members, own, named = call
        answers: list[Any] = []
        with self._turns.call(tenant.key, caller, number):
            for member, arguments in zip(members, own, strict=True):
                with self._turns.turn(tenant.key):
                    if tenant.key in self._left:
                        return answers  # nobody waits for them
                    host = self._host_of(tenant)
                    if isinstance(host, RoleFailed):
                        return host
                    answer = host.call(method, [member], [arguments], named, *shared)
                if isinstance(answer, RoleFailed):
                    return answer
                answers += answer
        return answers

    def _host_of(self, tenant: Tenant) -> Host | RoleFailed:
        if tenant.key not in self._carried:
            seed = tenant.recipe.seed
            members = [replace(member, run_seed=seed) for member in self._places]
            try:
                host = Host(self._name, self._role, tenant.recipe, members)
            except Exception as error:  # noqa: BLE001 - travels to the caller, which raises it
                first = members[0].index
                return role_failed(self._name, first, "__init__", self.describe(), error)
            self._carried[tenant.key] = host
        return self._carried[tenant.key]

    def forget(self, key: str) -> None:
        """Drops the members of a trial that has ended, and its calls under way."""
        self._left.add(key)
        self._carried.pop(key, None)
        self._turns.forget(key)

    def tenants(self) -> list[str]:
        """Returns the keys of the trials whose members are carried now."""
        return list(self._carried)


class SharedPool(RayPool[RoleT]):
    """Hosts for several trials; ``view`` gives each trial a pool like one of its own."""

    def __init__(
        self,
        name: str,
        role: type[RoleT],
        recipe: Recipe,
        hosts: Hosts,
        events: EventLog,
        trials: int,
    ) -> None:
        """Starts the host actors for ``trials`` trials at a time, without waiting for them."""
        threads = _CALLS_PER_TRIAL * (trials + 1)
        super().__init__(name, role, recipe, hosts, events, SharedHost, max_concurrency=threads)
        self._tenant = Tenant("", recipe)
        self._begin_line()

    def _begin_line(self) -> None:
        self._caller = uuid.uuid4().hex
        self._numbers = [itertools.count() for _ in self._hosts]

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin_line()  # another process is another caller

    def view(self, recipe: Recipe, events: EventLog) -> SharedPool[RoleT]:
        """Returns the pool of one trial, whose hosts' deaths are written into ``events``."""
        pool = copy.copy(self)
        pool._tenant = Tenant(uuid.uuid4().hex, recipe)
        pool._events = events
        pool._begin_line()
        return pool

    def leave(self) -> None:
        """Drops the trial's members on every host."""
        for host in self._hosts:
            host.forget.remote(self._tenant.key)

    def _send(self, share: Share) -> None:
        number = next(self._numbers[share.host]) if share.answer is None else None
        method, members, own, named, *shared = share.arguments
        share.answer = self._hosts[share.host].serve.remote(
            self._tenant, self._caller, number, (method, members, own, named), *shared
        )


@contextmanager
def shared_pools(
    workload: Workload, recipe: Recipe, events: EventLog, trials: int
) -> Generator[Mapping[str, SharedPool[Any]]]:
    """Starts the hosts of all the workload's pools that the layout puts into actors; ends them.

    Args:
        workload: names the roles.
        recipe: gives the layout.
        events: told where hosts start.
        trials: how many trials use them at a time.
    """
    pools: dict[str, SharedPool[Any]] = {}
    try:
        for name, asked in pool_hosts(workload, recipe.layout).items():
            if asked.hosts:
                role = resolve(workload.roles[name])
                pools[name] = SharedPool(name, role, recipe, asked, events, trials)
        for pool in pools.values():
            pool.ready()
        yield pools
    finally:
        for pool in pools.values():
            pool.close()
