"""Foreign nested state as what a checkpoint holds: trees of arrays and JSON values."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

_LONG = 64
"""Rows of at least so many numbers become arrays."""


def to_plain(value: object) -> object:
    """Returns nested state as a tree of arrays, tuples, lists, dicts and JSON values.

    NumPy scalars become Python's; sets and deques become lists; long rows of numbers, or of tuples
    of integers, become arrays, which a checkpoint holds at a fraction of the size.
    """
    found: Any = value
    if isinstance(value, np.ndarray) and found.dtype.kind in "OUS":
        found = found.tolist()
    if isinstance(found, np.generic):
        return cast("object", found.item())
    if isinstance(found, Mapping):
        entries = cast("Mapping[Any, object]", found)
        return {key: to_plain(item) for key, item in entries.items()}
    if isinstance(found, tuple):
        return tuple(to_plain(item) for item in cast("tuple[object, ...]", found))
    if isinstance(found, list | deque | set):
        items = list(cast("Sequence[object]", found))
        return _packed(items) or [to_plain(item) for item in items]
    return cast("object", found)


def _packed(items: list[object]) -> dict[str, Any] | None:
    kinds = {type(item) for item in items}
    if len(items) < _LONG or len(kinds) > 1:
        return None
    if kinds <= {int, float}:
        return {"packed": "numbers", "array": np.array(items)}
    if kinds == {tuple} and len({len(cast("tuple[int]", item)) for item in items}) == 1:
        array = np.array(items)
        return {"packed": "tuples", "array": array} if array.dtype.kind == "i" else None
    return None


def to_live(value: object) -> object:
    """Turns back what ``to_plain`` made, and the tensors of a checkpoint into arrays."""
    if isinstance(value, torch.Tensor):
        return cast("object", value.numpy())
    if isinstance(value, Mapping):
        entries = cast("Mapping[Any, Any]", value)
        if set(entries) == {"packed", "array"}:
            rows = entries["array"].tolist()
            return rows if entries["packed"] == "numbers" else [tuple(row) for row in rows]
        return {key: to_live(item) for key, item in entries.items()}
    if isinstance(value, list | tuple):
        items = [to_live(item) for item in cast("Sequence[object]", value)]
        return tuple(items) if isinstance(value, tuple) else items
    return value
