"""The contract of roles: the same numbers in any pool, here, on Ray, and after a death."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, cast

import numpy as np
import torch

from heliostat.actors.data import Reader, Stream
from heliostat.pool import LocalPool, Member, is_idempotent
from heliostat.recipe import Recipe
from heliostat.testing.difference import difference
from heliostat.testing.law import demand

Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A role's unbound method and its arguments, such as ``(Sampler.play, (job, weights))``."""

_MEMBERS = 3
_ROWS = 7


def check_role(role: type[Any], recipe: Recipe, calls: Sequence[Call]) -> None:
    """Checks that a role gives the same numbers in any pool.

    Args:
        role: the class; members are built from it as pools do.
        recipe: small enough that each of a dozen members is built within moments.
        calls: at least one call of each method that ``train`` uses; they are made in this order.

    Raises:
        ContractBroken: a law is broken.
    """
    _check_class(role, recipe, calls)
    member = _member(role, recipe)
    trials = [_Trial(role, call) for call in calls]
    for trial in trials:
        trial.make(member)
    for trial in trials:
        trial.check_kept()
    twin = _member(role, recipe)
    for trial in trials:
        trial.check_seeded(twin)
    for trial in reversed(trials):
        trial.check_repeats(member, _member(role, recipe))
    for method, arguments in calls:
        _check_members(role, recipe, method, arguments)
    if issubclass(role, Reader):
        _check_reader(cast("type[Reader[Any]]", role), recipe)


def _member(role: type[Any], recipe: Recipe, index: int = 0, count: int = 1) -> Any:  # noqa: ANN401
    return role(recipe, Member("contract", index, count, recipe.seed))


def _check_class(role: type[Any], recipe: Recipe, calls: Sequence[Call]) -> None:
    family = getattr(role, "family", None)
    families = [name for name, _ in recipe.layout.families()]
    demand(
        None if family in families else f"{role.__name__}.family is {family!r}",
        f"a role's family is one of {', '.join(families)}",
        "it does not say which hosts carry it; set family on the class",
    )
    for method, _ in calls:
        own = getattr(role, method.__name__, None)
        demand(
            None if own is method else f"{method.__qualname__} is not {role.__name__}'s",
            "a pool calls the method that its role has under that name",
            "the method of a parent was given, which the role replaces; give the role's own",
        )


class _Trial:
    """One call and what came of it."""

    def __init__(self, role: type[Any], call: Call) -> None:
        self._method, self._arguments = call
        self._name = f"{role.__name__}.{self._method.__name__}"
        self._repeatable = is_idempotent(self._method)
        self._returned: Any = None
        self._answer: Any = None

    def make(self, member: object) -> None:
        """Calls the member and checks what the call alone can show."""
        given, chance = deepcopy(self._arguments), _global_chance()
        self._returned = self._method(member, *given)
        self._answer = deepcopy(self._returned)
        demand(
            difference(self._arguments, given, f"arguments of {self._name}"),
            "a role leaves its arguments as they are",
            "it writes into an array in place, which on Ray is shared and read-only; copy it first",
        )
        demand(
            difference(chance, _global_chance(), f"global random state after {self._name}"),
            "a role draws from generators of its own",
            "it uses random, np.random or torch without a generator, and so changes what a learner "
            "in the same process draws; make a generator with heliostat.seeding",
        )
        demand(
            _lost_in_pickling(self._returned, f"answer of {self._name}"),
            "answers travel between processes by pickle",
            "it holds a function, an open file or a live model; return arrays and plain values",
        )

    def check_kept(self) -> None:
        """Checks, after other calls, that the answer has stayed what it was."""
        demand(
            difference(self._answer, self._returned, f"answer of {self._name} after later calls"),
            "an answer belongs to its caller",
            "it returns a buffer that the next call fills anew, which Ray would have copied; "
            "return a copy",
        )

    def check_seeded(self, twin: object) -> None:
        """Checks the call on a member that was built alike and has had the same calls before."""
        found = difference(self._answer, self._again(twin), f"answer of {self._name}")
        demand(
            None if self._repeatable or not found else f"two equal members: {found}",
            "what a role draws follows from the run's seed",
            "its generator has no seed, or it looks at the clock; seed it with member.seed(...)",
        )

    def check_repeats(self, used: object, fresh: object) -> None:
        """Checks an idempotent call on a member that did other work, and on one just built."""
        if not self._repeatable:
            return
        for member, which in ((used, "used"), (fresh, "fresh")):
            found = difference(self._answer, self._again(member), f"answer of {self._name}")
            demand(
                found and f"the call again, on a {which} member: {found}",
                "an idempotent method answers from its arguments and its constructor alone",
                "it draws from a generator that moves on, or from what another call left behind; "
                "take a seed as an argument, or do not mark it idempotent",
            )

    def _again(self, member: object) -> Any:  # noqa: ANN401 - whatever the role answers
        return self._method(member, *deepcopy(self._arguments))


def _lost_in_pickling(answer: object, what: str) -> str | None:
    try:
        travelled = pickle.loads(pickle.dumps(answer))
    except Exception as error:  # noqa: BLE001 - whatever a value's own pickling raises
        return f"{what}: {type(error).__name__}: {error}"
    return difference(answer, travelled, what)


def _global_chance() -> tuple[Any, ...]:
    return random.getstate(), cast("Any", np.random.get_state()), torch.get_rng_state()


def _check_members(
    role: type[Any], recipe: Recipe, method: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    def answer(index: int, count: int, seed: int = recipe.seed) -> Any:  # noqa: ANN401
        member = role(recipe.override(f"seed={seed}"), Member("contract", index, count, seed))
        return method(member, *deepcopy(arguments))

    name = f"answer of {role.__name__}.{method.__name__}"
    if not is_idempotent(method):
        first, second, reseeded = answer(0, 2), answer(1, 2), answer(0, 2, recipe.seed + 1)
        alike = not difference(first, second) and difference(first, reseeded)
        demand(
            f"{name}: alike on members 0 and 1, though it changes with the seed" if alike else None,
            "members draw different streams",
            "it seeds its generator from recipe.seed; use member.seed(...)",
        )
    elif arguments and role.family != "data":  # data actors hold shares of their own
        alone = answer(0, 1)
        for index in range(_MEMBERS):
            found = difference(alone, answer(index, _MEMBERS), name)
            demand(
                found and f"the only member and number {index} of {_MEMBERS}: {found}",
                "how many members a pool has changes no number",
                "it draws from member.seed or looks at member.index, though any member may get the "
                "item; take a seed with the item",
            )


def _check_reader(role: type[Reader[Any]], recipe: Recipe) -> None:
    def rows(members: int) -> list[Any]:
        pool = LocalPool("contract", cast("Any", role), recipe, members)
        stream = Stream(pool, role, seed=recipe.seed)
        return [*stream.next(_ROWS), *stream.next(_ROWS)]

    demand(
        difference(rows(1), rows(_MEMBERS), f"rows from 1 and from {_MEMBERS} readers"),
        "how many readers a data set has changes neither its rows nor their order",
        "the shares overlap, miss rows or are shuffled apart; cut one order with share(...)",
    )
