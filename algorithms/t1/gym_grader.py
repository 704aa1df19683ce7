"""The tasks and scorers of reasoning-gym; importing it takes seconds and needs ``[reasoning]``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

_LIBRARY: Any = importlib.import_module("reasoning_gym")


def names() -> list[str]:
    """Returns the names of all tasks there are."""
    return sorted(_LIBRARY.factory.DATASETS)


def entries(name: str, seed: int, size: int) -> Iterator[dict[str, Any]]:
    """Yields the problems of a task, each with ``question`` and ``answer``."""
    task = _task(name, seed, size)
    return (task[place] for place in range(size))


def prepare(gold: str) -> Callable[[str], bool] | None:
    """Reads a place ``task:seed:size:index``; the judge is the task's own scorer.

    An answer is right if it earns the whole score.
    """
    name, seed, size, index = gold.split(":")
    task = _task(name, int(seed), int(size))
    entry = task[int(index)]
    return lambda answer: task.score_answer(answer, entry) >= 1.0


@lru_cache(maxsize=8)
def _task(name: str, seed: int, size: int) -> Any:  # noqa: ANN401 - the package has no types
    return _LIBRARY.create_dataset(name, seed=seed, size=size)
