"""Recipes: every number of a run, in one frozen record that is checked before anything starts."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, cast, get_origin, get_type_hints

import yaml
from annotated_types import Ge
from pydantic import TypeAdapter, ValidationError

from heliostat.errors import UsageError, nearest
from heliostat.layout import Layout

_PRESETS = {
    "in_process": Layout.in_process,
    "laptop": Layout.laptop,
    "one_gpu": Layout.one_gpu,
    "cluster": Layout.cluster,
}


WandbMode = Literal["offline", "online", "disabled"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tracking:
    """Where a run is shown beside its own folder."""

    wandb: Literal["auto", "offline", "online", "disabled"] = "auto"
    """Where W&B logs; ``auto`` asks WANDB_MODE and else means offline."""
    project: str = ""
    """W&B's project; empty asks WANDB_PROJECT and else means ``heliostat``."""
    tags: tuple[str, ...] = ()
    """Words to find the run by in W&B."""
    artifacts: Literal["none", "best", "last", "all"] = "none"
    """Checkpoints that W&B keeps: each new best, the last one at the end, or every one."""
    tensorboard: bool = False
    """Whether to write TensorBoard's files too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Base of every method's recipe; a method adds its own numbers as fields.

    Fields state their range in the type, ``lr: Annotated[float, Gt(0)]``, and a method's
    ``__post_init__`` refuses combinations that no single range can express.
    """

    steps: Annotated[int, Ge(0)]
    """Optimisation steps of the method's main loop."""
    seed: Annotated[int, Ge(0)] = 0
    """Root of every random stream of the run."""
    layout: Layout = field(default_factory=Layout.in_process)
    """Processes and resources."""
    checkpoint_every: Annotated[int, Ge(1)] = 100
    """Steps between two checkpoints."""
    keep_checkpoints: Annotated[int, Ge(1)] = 2
    """Checkpoints kept by the run's metric; the newest is always kept beside them."""
    tracker: Tracking = Tracking()
    """W&B and TensorBoard; changes no number of the run."""

    @property
    def total_steps(self) -> int:
        """Steps over all phases of the run, for progress and time left."""
        return self.steps

    paths: ClassVar[tuple[str, ...]] = ()
    """Fields that name files or folders of the user's."""

    def located(self) -> Self:
        """Returns a copy whose ``paths`` are absolute: a job or a resumed run starts elsewhere."""
        found = {name: Path(text) for name in self.paths if (text := getattr(self, name))}
        absolute = {name: str(path.resolve()) for name, path in found.items() if path.exists()}
        return dataclasses.replace(self, **absolute)

    def check(self) -> None:
        """Refuses what only the machine can tell, such as a missing file, before a run starts.

        Raises:
            UsageError: what is missing, where, and what to do.
        """

    def to_dict(self) -> dict[str, Any]:
        """Returns nested plain values that YAML and JSON can hold."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Builds a checked recipe from nested plain values; strings are read by a field's type.

        Raises:
            UsageError: an unknown key (with the nearest valid one), a value of the wrong type or
                outside its range, or a combination that the recipe refuses.
        """
        known = cls.keys()
        for key, _ in leaves(values):
            if not cls.knows(key) and not any(name.startswith(key + ".") for name in known):
                raise UsageError(nearest(key, known))
        try:
            recipe = cast("Self", _adapter(cls).validate_python(dict(values)))
        except ValidationError as error:
            raise UsageError("\n".join(_explain(item) for item in error.errors())) from None
        for key, value in leaves(recipe.to_dict()):
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"{key}: expected a finite number, found {value}")
        return recipe

    @classmethod
    def keys(cls) -> list[str]:
        """Returns every key that ``override`` accepts, dotted, in order, but those in mappings."""
        return list(_types(cls))

    @classmethod
    def knows(cls, key: str) -> bool:
        """Whether a dotted key names a field, or an entry of a field that holds a mapping."""
        types = _types(cls)
        parts = key.split(".")
        parents = (".".join(parts[:count]) for count in range(1, len(parts)))
        return key in types or any(get_origin(types.get(name)) is Mapping for name in parents)

    def override(self, *assignments: str) -> Self:
        """Returns a copy with ``key=value`` assignments applied, each parsed by its field's type.

        ``layout=NAME`` takes a preset: in_process, laptop, one_gpu or cluster. An entry of a
        mapping has no type of its own: its text is read as YAML.

        Raises:
            UsageError: as ``from_dict``, and for an assignment without ``=``.

        Example:
            ``recipe.override("steps=20", "layout.learners=2", "layout.environment.hosts=4")``
        """
        values = self.to_dict()
        for assignment in assignments:
            key, equals, text = assignment.partition("=")
            if not equals:
                raise UsageError(f"expected key=value, found {assignment!r}; write it as key=value")
            if not self.knows(key) and key != "layout":
                raise UsageError(nearest(key, self.keys()))
            typed = key in self.keys()
            _put(values, key, _preset(text) if key == "layout" else _plain(text, typed))
        return type(self).from_dict(values)

    def fingerprint(self) -> str:
        """Returns 16 hex digits that change with any value of the recipe."""
        read = type(self).from_dict(self.to_dict())  # so that 1 and 1.0 agree where they are equal
        text = json.dumps(read.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_yaml(self) -> str:
        """Returns the recipe as YAML, keys in the order of definition."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False)


def _put(values: dict[str, Any], key: str, value: object) -> None:
    """Sets a dotted key, making the mappings on its way."""
    *parents, leaf = key.split(".")
    for parent in parents:
        inner: object = values.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise UsageError(f"{key}: {parent!r} is {inner!r}, which has no entries")
        values = cast("dict[str, Any]", inner)
    values[leaf] = value


def _plain(text: str, typed: bool) -> object:
    """Reads the text of an override: as YAML, where no field's type will read it.

    Where one will (``typed``), only lists, mappings and null are YAML.
    """
    if typed and text != "null" and not text.startswith(("[", "{")):
        return text
    try:
        found: object = yaml.safe_load(text)
    except yaml.YAMLError:
        return text  # a text field may begin so; any other refuses it by its type
    if typed or not isinstance(found, str | date):
        return found
    try:
        return float(text)  # YAML takes 1e-4 for a text
    except ValueError:
        return text


def _preset(name: str) -> dict[str, Any]:
    if name not in _PRESETS:
        raise UsageError(nearest(name, list(_PRESETS), "layout preset"))
    return dataclasses.asdict(_PRESETS[name]())


@functools.cache
def _adapter(cls: type) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


@functools.cache
def _types(cls: type) -> Mapping[str, object]:
    """Returns dotted key -> type, in the order of definition."""
    return dict(_fields(cls))


def _fields(cls: type, prefix: str = "") -> Iterable[tuple[str, object]]:
    """Yields dotted keys with their types."""
    types = get_type_hints(cls)
    for item in dataclasses.fields(cls):
        nested = types[item.name]
        if dataclasses.is_dataclass(nested):
            yield from _fields(cast("type", nested), f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, nested


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, object]]:
    """Yields each dotted key below ``prefix`` with its value, in the order of nested mappings."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(cast("Mapping[str, Any]", value), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _explain(error: Mapping[str, Any]) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    return f"{key}: {error['msg'][0].lower()}{error['msg'][1:]}, found {error['input']!r}"
