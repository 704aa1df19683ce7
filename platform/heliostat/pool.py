"""Pools: N identical copies of a plain class, called by its unbound methods.

A role is any class whose constructor takes ``(recipe, member)``. ``pool.map(Sampler.answer,
prompts, weights)`` reads like a loop over members and is typed like one; whether the members live
in this process or in Ray actors changes neither the call nor the numbers.

A role must not change its arguments, and a method marked ``idempotent`` must answer from its
arguments and its constructor alone, so that a call lost with a host can be repeated.
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, runtime_checkable

from heliostat.errors import RoleFailed
from heliostat.layout import Family
from heliostat.recipe import Recipe
from heliostat.seeding import derive

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
RoleT = TypeVar("RoleT")
Item = TypeVar("Item")
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Member:
    """One logical copy of a role: its place in the pool and its own random streams."""

    role: str
    """The pool's name."""
    index: int
    count: int
    run_seed: int

    def seed(self, *path: str | int) -> int:
        """Returns a seed in [0, 2**63) for this member's stream ``path``."""
        return derive(self.run_seed, self.role, self.index, *path)


@runtime_checkable
class Role(Protocol):
    """A class that a pool can carry."""

    family: Family

    def __init__(self, recipe: Any, member: Member) -> None: ...  # noqa: ANN401 - a method's recipe


def idempotent(method: Function) -> Function:
    """Marks a role's method as repeatable after its host died."""
    method.__idempotent__ = True  # pyright: ignore[reportFunctionMemberAccess]
    return method


def is_idempotent(method: Callable[..., Any]) -> bool:
    """Whether ``idempotent`` marked the method."""
    return getattr(method, "__idempotent__", False)


@runtime_checkable
class Pending(Protocol[R_co]):
    """An answer under way."""

    def done(self) -> bool:
        """Whether ``result`` would return at once."""
        ...

    def result(self, deadline_s: float | None = None) -> R_co:
        """Waits for the answer.

        Args:
            deadline_s: longest wait in seconds; None takes the layout's ``call_deadline_s``.

        Raises:
            DeadlineExceeded: names the role, method and members that did not answer.
            RoleFailed: a member's method raised.
            ActorLost: a host died and the call may not be, or could not be, repeated.
        """
        ...


class Pool(ABC, Generic[RoleT]):
    """N members of one role. ``each``, ``map`` and ``start`` raise what ``Pending.result`` does."""

    name: str
    num_members: int

    @abstractmethod
    def _submit(
        self,
        method: Callable[..., R],
        calls: Sequence[tuple[int, tuple[object, ...]]],
        shared: tuple[object, ...],
        named: dict[str, object],
    ) -> Pending[list[R]]:
        """Starts ``method(member, *own, *shared, **named)`` for each (member, own) of ``calls``."""

    def each(
        self, method: Callable[Concatenate[RoleT, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Calls the method once on every member; answers in the order of members."""
        return self.start_each(method, *args, **kwargs).result()

    def start_each(
        self, method: Callable[Concatenate[RoleT, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> Pending[list[R]]:
        """Starts ``each`` and returns at once."""
        calls = [(member, ()) for member in range(self.num_members)]
        return self._submit(method, calls, args, kwargs)

    def map(
        self,
        method: Callable[Concatenate[RoleT, Item, P], R],
        items: Sequence[Item],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R]:
        """Calls the method once an item, item i on member i mod N; answers in the items' order."""
        return self.start(method, items, *args, **kwargs).result()

    def start(
        self,
        method: Callable[Concatenate[RoleT, Item, P], R],
        items: Sequence[Item],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Pending[list[R]]:
        """Starts ``map`` and returns at once."""
        calls = [(i % self.num_members, (item,)) for i, item in enumerate(items)]
        return self._submit(method, calls, args, kwargs)


@dataclass(frozen=True, slots=True)
class Ready(Generic[R]):
    """A ``Pending`` whose answer is there already."""

    value: R

    def done(self) -> bool:
        """Always True."""
        return True

    def result(self, deadline_s: float | None = None) -> R:  # noqa: ARG002 - nothing to wait for
        """Returns the answer at once."""
        return self.value


class LocalPool(Pool[RoleT]):
    """Members in this process, called one after the other when the call is made."""

    def __init__(
        self, name: str, role: Callable[[Any, Member], RoleT], recipe: Recipe, num_members: int
    ) -> None:
        self.name = name
        self.num_members = num_members
        self._members = [
            role(recipe, Member(name, index, num_members, recipe.seed))
            for index in range(num_members)
        ]

    def _submit(
        self,
        method: Callable[..., R],
        calls: Sequence[tuple[int, tuple[object, ...]]],
        shared: tuple[object, ...],
        named: dict[str, object],
    ) -> Pending[list[R]]:
        answers: list[R] = []
        for member, own in calls:
            function = getattr(self._members[member], method.__name__)
            try:
                answers.append(function(*own, *shared, **named))
            except Exception as error:
                here = "this process"
                raise role_failed(self.name, member, method.__name__, here, error) from error
        return Ready(answers)


def role_failed(pool: str, member: int, method: str, node: str, error: Exception) -> RoleFailed:
    """Describes an exception of a role's method: who, where, and the original traceback."""
    text = "".join(traceback.format_exception(error)).rstrip()
    return RoleFailed(
        f"{pool}[{member}].{method} on {node} raised {type(error).__name__}: {error}\n{text}"
    )
