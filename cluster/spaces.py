"""Search spaces: distributions as text, read without running it, and points drawn from them."""

from __future__ import annotations

import ast
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import yaml

from heliostat.errors import UsageError, nearest
from heliostat.recipe import Recipe
from heliostat.seeding import numpy_generator
from heliostat.workload import Workload

Value = float | int | str | bool | None | list["Value"]
"""A value of one key of a recipe."""
Point = Mapping[str, Value]
"""One value for each key of a space."""

_ARGUMENTS = {
    "uniform": 2,
    "loguniform": 2,
    "quniform": 3,
    "randint": 2,
    "lograndint": 2,
    "choice": None,
}
"""Distribution -> how many arguments it takes; None: any number."""
_WHOLE = ("randint", "lograndint")


@dataclass(frozen=True, slots=True)
class Distribution:
    """What one key is drawn from.

    ``uniform(low, high)``, ``loguniform(low, high)``, ``quniform(low, high, q)`` in multiples of q,
    ``randint(low, high)`` and ``lograndint(low, high)`` for whole numbers below high, and
    ``choice(a, b, ...)``.
    """

    name: str
    arguments: tuple[Value, ...]

    @classmethod
    def parse(cls, key: str, text: str) -> Distribution:
        """Reads a distribution's text; only literals may be its arguments.

        Args:
            key: the recipe's key, for messages.
            text: such as ``loguniform(1e-5, 1e-3)``.

        Raises:
            UsageError: it is no such text, or its range is impossible.
        """
        try:
            tree = ast.parse(text.strip(), mode="eval").body
            if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name):
                raise ValueError
            arguments = [cast("Value", ast.literal_eval(item)) for item in tree.args]
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            raise UsageError(
                f"{key}: expected a distribution such as loguniform(1e-5, 1e-3) or choice(1, 2), "
                f"found {text!r}"
            ) from None
        name = tree.func.id
        if name not in _ARGUMENTS:
            raise UsageError(f"{key}: {nearest(name, list(_ARGUMENTS), 'distribution')}")
        if tree.keywords:
            raise UsageError(f"{key}: {name} takes its arguments by place, found {text!r}")
        if name == "choice" and len(arguments) == 1 and isinstance(arguments[0], list):
            arguments = arguments[0]
        found = cls(name, tuple(arguments))
        found._check(key, text)
        return found

    def _check(self, key: str, text: str) -> None:
        """Refuses what nothing can be drawn from."""
        wanted, values = _ARGUMENTS[self.name], self.arguments
        if wanted is None:
            if not values or len({_text(value) for value in values}) < len(values):
                raise UsageError(f"{key}: expected different choices, found {text!r}")
            return
        kind = int if self.name in _WHOLE else (int, float)
        if len(values) != wanted or not all(
            isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)
            for value in values
        ):
            numbers = "whole numbers" if self.name in _WHOLE else "numbers"
            raise UsageError(f"{key}: expected {self.name} of {wanted} {numbers}, found {text!r}")
        if not self.low < self.high:
            raise UsageError(f"{key}: expected low < high, found {text!r}")
        if self._log and self.low <= 0:
            raise UsageError(f"{key}: expected low > 0 for {self.name}, found {text!r}")
        if self.name == "quniform" and not 0 < self.quantum <= self.high - self.low:
            raise UsageError(f"{key}: expected 0 < q <= high - low, found {text!r}")

    @property
    def low(self) -> float:
        """The least value; not for choices."""
        return cast("float", self.arguments[0])

    @property
    def high(self) -> float:
        """The upper end, which whole numbers do not reach; not for choices."""
        return cast("float", self.arguments[1])

    @property
    def quantum(self) -> float:
        """The step of ``quniform``."""
        return cast("float", self.arguments[2])

    @property
    def _log(self) -> bool:
        return self.name.startswith("log")

    def at(self, share: float) -> Value:
        """Returns the value below which ``share`` in [0, 1] of the probability lies."""
        if self.name == "choice":
            return self.arguments[min(int(share * len(self.arguments)), len(self.arguments) - 1)]
        low, high = self.low, self.high
        number = low * (high / low) ** share if self._log else low + (high - low) * share
        return self.clip(math.floor(number) if self.name in _WHOLE else number)

    def clip(self, value: Value) -> Value:
        """Returns the nearest value that can be drawn."""
        if self.name == "choice":
            return value if value in self.arguments else self.arguments[0]
        number = cast("float", value)
        if self.name in _WHOLE:
            return min(max(round(number), int(self.low)), int(self.high) - 1)
        if self.name == "quniform":
            number = round(number / self.quantum) * self.quantum
        return min(max(float(number), float(self.low)), float(self.high))

    def grid(self, levels: int) -> list[Value]:
        """Returns all choices, or ``levels`` values from end to end (fewer where there are)."""
        if self.name == "choice":
            return list(self.arguments)
        values = [self.at(share) for share in np.linspace(0, 1, levels).tolist()]
        return list(dict.fromkeys(values))

    @property
    def text(self) -> str:
        """The distribution as it is written."""
        return f"{self.name}({', '.join(repr(value) for value in self.arguments)})"


Space = Mapping[str, Distribution]
"""Recipe key -> what it is drawn from."""


def read_space(workload: Workload, source: str | None) -> dict[str, str]:
    """Returns a space's distributions as text: of the workload, or of a YAML file.

    Args:
        workload: publishes spaces by name.
        source: a name, or a path that ends in .yaml or .yml; None takes the first one published.

    Raises:
        UsageError: there is no such space or file, or the file is no mapping of texts.
    """
    if source is None:
        return dict(next(iter(workload.spaces.values()))) if workload.spaces else {}
    if not source.endswith((".yaml", ".yml")):
        if source not in workload.spaces:
            what = f"space of workload {workload.name!r}"
            raise UsageError(nearest(source, list(workload.spaces), what) + "; or give FILE.yaml")
        return dict(workload.spaces[source])
    try:
        with open(source, encoding="utf-8") as file:  # noqa: PTH123 - as typed
            found: object = yaml.safe_load(file)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"--space: cannot read {source!r}: {error}") from None
    if not isinstance(found, dict):
        raise UsageError(f"--space: expected key: distribution lines in {source}, found {found!r}")
    return {str(key): str(text) for key, text in cast("dict[object, object]", found).items()}


def is_distribution(text: str) -> bool:
    """Whether the right side of ``key=...`` on a command line means a distribution."""
    name, parenthesis, _ = text.partition("(")
    return bool(parenthesis) and name.strip().isidentifier() and text.rstrip().endswith(")")


def build_space(recipe: Recipe, texts: Mapping[str, str]) -> dict[str, Distribution]:
    """Reads and checks a space against the recipe that its points will change.

    Raises:
        UsageError: a key is unknown or part of the layout, a range is impossible, or the recipe
            refuses an end of it or a choice.
    """
    if not texts:
        raise UsageError(
            "there is nothing to search over; give --space NAME or FILE.yaml, "
            "or key=loguniform(1e-5,1e-3) and the like"
        )
    space: dict[str, Distribution] = {}
    for key, text in texts.items():
        if key.startswith("layout."):
            raise UsageError(f"{key}: trials share their actors; fix the layout with {key}=VALUE")
        space[key] = Distribution.parse(key, text)
        for value in space[key].grid(2):
            try:
                recipe.override(*assignments({key: value}))
            except UsageError as error:
                raise UsageError(f"{key} is to be drawn from {text}, and {error}") from None
    return space


def assignments(point: Point) -> list[str]:
    """Returns the point as ``Recipe.override`` takes it."""
    return [f"{key}={_text(value)}" for key, value in point.items()]


def _text(value: Value) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value) if isinstance(value, list | bool | None) else repr(value)


def random_points(space: Space, seed: int, count: int) -> list[Point]:
    """Draws ``count`` points; point i depends on (seed, i) alone."""
    return [random_point(space, seed, index) for index in range(count)]


def random_point(space: Space, seed: int, index: int) -> Point:
    """Draws point ``index`` under ``seed``."""
    shares = numpy_generator(seed, "search", index).random(len(space)).tolist()
    return {key: space[key].at(share) for key, share in zip(space, shares, strict=True)}


def grid_points(space: Space, most: int) -> list[Point]:
    """Returns the finest grid of at most ``most`` points with equally many levels a range.

    Raises:
        UsageError: two levels a range already make too many points.
    """
    best: list[list[Value]] = []
    for levels in range(2, most + 2):  # choices and whole numbers have no more levels than these
        axes = [space[key].grid(levels) for key in space]
        size = math.prod(len(axis) for axis in axes)
        if size > most and not best:
            raise UsageError(f"the smallest grid has {size} points; raise --trials from {most}")
        if size > most:
            break
        best = axes
    return _product(space, best)


def _product(space: Space, axes: Sequence[Sequence[Value]]) -> list[Point]:
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*axes)]


def point_of(values: Mapping[str, Any], keys: Sequence[str]) -> Point:
    """Returns the values of some dotted keys of a recipe's plain values; None where missing."""
    point: dict[str, Value] = {}
    for key in keys:
        value: Any = values
        for part in key.split("."):
            value = cast("dict[str, Any]", value).get(part) if isinstance(value, dict) else None
        point[key] = value
    return point
