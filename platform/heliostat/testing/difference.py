"""Where two values differ, to the last bit and through everything that a role may return."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch


def difference(one: object, other: object, where: str = "value") -> str | None:
    """Says where two values first differ in type, shape, dtype or content; NaN equals NaN.

    Args:
        one: scalars, arrays, tensors, dataclasses, and mappings and sequences of them; any other
            object is compared by what it holds.
        other: the same.
        where: what to call the values in the answer.

    Returns:
        Such as ``value[0].tokens: 3 of 64 entries differ``, or None where there is no difference.
    """
    if type(one) is not type(other):
        return f"{where}: {type(one).__name__} and {type(other).__name__}"
    match one:
        case np.ndarray() | torch.Tensor():
            return _array(one, cast("Any", other), where)
        case Mapping():
            return _mapping(cast("Mapping[Any, Any]", one), cast("Any", other), where)
        case list() | tuple():
            return _sequence(cast("Sequence[Any]", one), cast("Any", other), where)
        case _ if dataclasses.is_dataclass(one):
            names = [field.name for field in dataclasses.fields(one) if field.compare]
            pairs = ((f".{name}", getattr(one, name), getattr(other, name)) for name in names)
            return _first(pairs, where)
        case _:
            return None if _same(one, other) else f"{where}: {one!r:.80} and {other!r:.80}"


def _array(one: Any, other: Any, where: str) -> str | None:  # noqa: ANN401 - arrays and tensors
    for trait in ("dtype", "shape"):
        if getattr(one, trait) != getattr(other, trait):
            return f"{where}: {trait} {getattr(one, trait)} and {getattr(other, trait)}"
    if one.dtype == object:
        return _sequence(one.ravel().tolist(), other.ravel().tolist(), where)
    unequal = (one != other) & ~((one != one) & (other != other))  # noqa: PLR0124 - NaN
    count = int(unequal.sum())
    if not count:
        return None
    size = int(np.prod(one.shape, dtype=np.int64))
    return (
        f"{where}: {count} of {size} entries differ" if size > 1 else f"{where}: {one} and {other}"
    )


def _mapping(one: Mapping[Any, Any], other: Mapping[Any, Any], where: str) -> str | None:
    if odd := [key for key in (*one, *other) if (key in one) != (key in other)]:
        return f"{where}: the key {odd[0]!r} is in one only"
    return _first(((f"[{key!r}]", one[key], other[key]) for key in one), where)


def _sequence(one: Sequence[Any], other: Sequence[Any], where: str) -> str | None:
    if len(one) != len(other):
        return f"{where}: {len(one)} and {len(other)} items"
    pairs = zip(one, other, strict=True)
    return _first(((f"[{place}]", *pair) for place, pair in enumerate(pairs)), where)


def _first(parts: Any, where: str) -> str | None:  # noqa: ANN401 - an iterable of any pairs
    found = (difference(one, other, where + name) for name, one, other in parts)
    return next((text for text in found if text), None)


def _same(one: object, other: object) -> bool:
    if one is other or one == other:
        return True
    if isinstance(one, float):
        return one != one and other != other  # noqa: PLR0124 - NaN
    by_identity = type(one).__eq__ is object.__eq__
    return by_identity and pickle.dumps(one) == pickle.dumps(other)
