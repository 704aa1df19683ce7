"""Checkpoints: safetensors and JSON, written aside and renamed, trusted only with their marker.

A state is a tree of dicts, lists and tuples with tensors, NumPy arrays and JSON values as leaves.
Nothing is pickled, so that a checkpoint from elsewhere cannot run code.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]

from heliostat.errors import CheckpointCorrupt, UsageError

State = dict[str, Any]

_TENSORS, _TREE, _MARKER = "state.safetensors", "state.json", "COMPLETE"
logger = logging.getLogger("heliostat")


def save(folder: Path, step: int, state: Mapping[str, Any], score: float | None = None) -> Path:
    """Writes ``folder/step-NNNNNNNNNN`` so that it exists whole or not at all.

    Args:
        folder: the run's checkpoint folder, made where missing.
        step: the step that the state belongs to; an older checkpoint of the same step is replaced.
        state: tree of tensors, arrays and JSON values; arrays come back as tensors.
        score: ranks the checkpoint among those that ``prune`` keeps; larger is better.

    Raises:
        TypeError: a leaf is none of the kinds above; the message gives its path in the tree.
    """
    final = folder / f"step-{step:010d}"
    partial = folder / f".partial-{step:010d}-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors: dict[str, torch.Tensor] = {}
    if score is not None and not math.isfinite(score):
        score = None
    tree = {"step": step, "score": score, "state": _encode(state, "state", tensors)}
    save_file(tensors, partial / _TENSORS)
    (partial / _TREE).write_text(json.dumps(tree, allow_nan=False))
    sums = {name: _checksum(partial / name) for name in (_TENSORS, _TREE)}
    (partial / _MARKER).write_text(json.dumps(sums))
    for path in (*partial.iterdir(), partial):
        _sync(path)
    if final.exists():
        final.rename(folder / f".partial-{step:010d}-replaced")
    partial.rename(final)
    _sync(folder)
    return final


def load(path: Path) -> tuple[int, State]:
    """Reads one checkpoint.

    Returns:
        (step, state).

    Raises:
        CheckpointCorrupt: the marker is missing or a file differs from what the marker promises.
    """
    _verify(path)
    tree = json.loads((path / _TREE).read_text())
    return tree["step"], cast("State", _decode(tree["state"], load_file(path / _TENSORS)))


def latest(folder: Path) -> tuple[int, State] | None:
    """Reads the newest whole checkpoint, skipping with a warning those that are not.

    Returns:
        (step, state), or None where there is none.
    """
    for path in sorted(_finished(folder), reverse=True):
        try:
            return load(path)
        except (CheckpointCorrupt, ValueError, KeyError) as error:
            logger.warning("skipping checkpoint %s: %s", path, error)
    return None


def fork(source: Path, step: int | None, target: Path) -> Path:
    """Copies a whole checkpoint into another run's folder, which will then begin from it.

    Args:
        source: the checkpoint folder of the run to branch off from.
        step: which checkpoint; None takes the newest.
        target: the checkpoint folder of the new run, made where missing.

    Raises:
        UsageError: there is no such checkpoint; the message lists those there are.
        CheckpointCorrupt: it is not whole.
    """
    found = {int(path.name.rpartition("-")[2]): path for path in _finished(source)}
    if not found or (step is not None and step not in found):
        wanted = "a checkpoint" if step is None else f"a checkpoint of step {step}"
        raise UsageError(f"expected {wanted} in {source}, found steps {sorted(found)}")
    path = found[max(found) if step is None else step]
    _verify(path)
    target.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copytree(path, target / path.name))


def prune(folder: Path, keep: int) -> None:
    """Deletes leftovers and all but the newest checkpoint and the ``keep`` of best score."""
    *older, _ = sorted(_finished(folder)) or [None]
    ranked = sorted((path for path in older if path), key=_score, reverse=True)
    for path in ranked[keep:]:
        shutil.rmtree(path)
    for path in folder.glob(".partial-*"):
        shutil.rmtree(path)


def _finished(folder: Path) -> Iterator[Path]:
    return folder.glob("step-*")


def _score(path: Path) -> tuple[float, str]:
    try:
        score = json.loads((path / _TREE).read_text())["score"]
    except (OSError, ValueError):  # a damaged one is the first to go
        return (-math.inf, "")
    return (-math.inf if score is None else score, path.name)


def _verify(path: Path) -> None:
    try:
        sums: dict[str, int] = json.loads((path / _MARKER).read_text())
        found = {name: _checksum(path / name) for name in sums}
    except (OSError, ValueError) as error:
        raise CheckpointCorrupt(f"{path} is not whole: {error}") from error
    for name, expected in sums.items():
        if found[name] != expected:
            raise CheckpointCorrupt(
                f"{path / name}: expected checksum {expected}, found {found[name]}"
            )


def _checksum(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            total = zlib.crc32(block, total)
    return total


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _encode(value: object, path: str, tensors: dict[str, torch.Tensor]) -> object:
    """Replaces tensors by references and marks what JSON would lose: tuples and integer keys."""
    match value:
        case torch.Tensor() | np.ndarray():
            tensor = torch.as_tensor(value).detach().cpu()
            tensors[path] = tensor.clone(memory_format=torch.contiguous_format)
            return {"$tensor": path}
        case Mapping():
            entries = cast("Mapping[object, object]", value)
            return {"$dict": [[k, _encode(v, f"{path}/{k}", tensors)] for k, v in entries.items()]}
        case list() | tuple():
            items = cast("list[object] | tuple[object, ...]", value)
            encoded = [_encode(item, f"{path}/{i}", tensors) for i, item in enumerate(items)]
            return {"$tuple": encoded} if isinstance(value, tuple) else encoded
        case float() if not math.isfinite(value):
            return {"$float": repr(value)}
        case None | bool() | int() | float() | str():
            return value
        case _:
            raise TypeError(
                f"{path}: expected a tensor, array, dict, list, tuple or JSON value, "
                f"found {type(value).__name__}; convert it before saving"
            )


def _decode(value: object, tensors: Mapping[str, torch.Tensor]) -> object:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in cast("list[object]", value)]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = cast("dict[str, Any]", value).items()
    match kind:
        case "$tensor":
            return tensors[inner]
        case "$dict":
            return {key: _decode(item, tensors) for key, item in inner}
        case "$tuple":
            return tuple(_decode(item, tensors) for item in inner)
        case _:
            return float(inner)
