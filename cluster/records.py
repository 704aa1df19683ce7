"""Files of a run as they are found: half-written, of another version, or made by someone else.

What is missing or of another type reads as blank, and nothing that a file names is imported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import yaml

from heliostat.folder import RunFolder
from heliostat.workload import Plot

_LARGEST = 1e100


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """What a run's record says of the method that it ran; blank where it does not."""

    name: str = ""
    summary: str = ""
    paper: str = ""
    score: str | None = None
    """Metric that ranks its checkpoints."""
    total_steps: int | None = None
    """Steps over all phases."""
    plots: tuple[Plot, ...] = ()

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self:
        """Reads it from a run's record, of which every part may be missing or of another type."""
        found = _mapping(record.get("method"))
        return cls(
            name=as_text(found.get("name")) or "",
            summary=as_text(found.get("summary")) or "",
            paper=as_text(found.get("paper")) or "",
            score=as_text(found.get("score")),
            total_steps=as_count(found.get("total_steps")),
            plots=tuple(_plots(_items(found.get("plots")))),
        )


def read_lines(path: Path, tail_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects of a file of lines, of its end only where a length is given.

    What is missing, torn or no object is passed over: the file may be half-written or foreign.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        if tail_bytes is not None:
            file.seek(max(0, path.stat().st_size - tail_bytes))
        for line in file:
            if found := _parsed(line):
                yield found


def read_events(folder: RunFolder) -> list[dict[str, Any]]:
    """Reads a run's diary, with those of ranks on other machines, in the order of time."""
    found = [event for path in folder.events.files() for event in read_lines(path)]
    return sorted(found, key=lambda event: as_number(event.get("time")) or 0.0)


def read_recipe(folder: RunFolder) -> dict[str, Any]:
    """Reads the values of a run's recipe; empty where it is missing, torn or something else."""
    if not folder.recipe.is_file():
        return {}
    try:
        found: object = yaml.safe_load(folder.recipe.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return _mapping(found)


def read_object(path: Path) -> dict[str, Any]:
    """Reads a file that holds one JSON object; empty where missing, torn or something else."""
    return _parsed(path.read_bytes()) if path.is_file() else {}


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        return _mapping(json.loads(text))
    except (ValueError, RecursionError):  # torn, no JSON, or nested to defeat its reader
        return {}


def as_number(value: object) -> float | None:
    """Reads a number, or "NaN" and the infinities as the tracker spells them; None for the rest.

    What is beyond 1e100 reads as infinite, so that sums and axes of what is finite do not overflow.
    """
    if isinstance(value, str) and value in {"NaN", "Infinity", "-Infinity"}:
        return float(value)
    if not isinstance(value, int | float):
        return None
    if abs(value) > _LARGEST:
        return math.inf if value > 0 else -math.inf
    return float(value)


def as_count(value: object) -> int | None:
    """Reads a whole number from 0 on; None for the rest."""
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if value >= 0 else None


def printable(text: str) -> str:
    """Returns the text with ``?`` for what would steer a terminal or cannot be drawn."""
    return "".join(character if character.isprintable() else "?" for character in text)


def as_text(value: object) -> str | None:
    """Reads a text; None for the rest."""
    return value if isinstance(value, str) else None


def _plots(found: Sequence[object]) -> Iterator[Plot]:
    for plot in map(_mapping, found):
        title = as_text(plot.get("title"))
        metrics = tuple(name for name in map(as_text, _items(plot.get("metrics"))) if name)
        if title and metrics:
            yield Plot(title=title, metrics=metrics, level=as_text(plot.get("level")))


def _mapping(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _items(value: object) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else []
