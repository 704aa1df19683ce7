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
from collections.abc import Mapping
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
    final = path_of(folder, step)
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
        replaced = folder / f".partial-{step:010d}-replaced"
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
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
    """Copies a whole checkpoint into another run's folder, which will then go on from it.

    Args:
        source: the checkpoint folder of the run to branch off from.
        step: which checkpoint; None takes the newest whole one.
        target: the checkpoint folder of the other run, made where missing; what it held goes.

    Raises:
        UsageError: there is no such checkpoint; the message lists those there are.
        CheckpointCorrupt: the one that was asked for is not whole.
    """
    found = {_step(path): path for path in _finished(source)}
    if step is None:
        step = next((one for one in sorted(found, reverse=True) if _is_whole(found[one])), None)
    if step is None or step not in found:
        wanted = "a whole checkpoint" if step is None else f"a checkpoint of step {step}"
        raise UsageError(f"expected {wanted} in {source}, found steps {sorted(found)}")
    _verify(found[step])
    partial = target / f".partial-{step:010d}-fork"
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(found[step], partial)
    path = target / found[step].name
    shutil.rmtree(path, ignore_errors=True)
    partial.rename(path)
    prune(target, keep=0, newest=step)
    return path


def prune(folder: Path, keep: int, newest: int) -> None:
    """Deletes what is not worth keeping.

    Args:
        folder: the run's checkpoint folder.
        keep: how many of the best scores to keep beside the newest.
        newest: step of the checkpoint that was just saved. It stays; those of later steps go, for
            they are of a course that the run has left.
    """
    found = _finished(folder)
    later = [path for path in found if _step(path) > newest]
    older = sorted((path for path in found if _step(path) < newest), key=_rank, reverse=True)
    for path in (*later, *older[keep:], *folder.glob(".partial-*")):
        shutil.rmtree(path)


def best(folder: Path) -> Path:
    """Returns the checkpoint of the highest score, the newer of equals."""
    return max(_finished(folder), key=_rank)


def score_of(folder: Path, step: int) -> float | None:
    """Returns the score that a checkpoint was saved with."""
    return json.loads((path_of(folder, step) / _TREE).read_text())["score"]


def path_of(folder: Path, step: int) -> Path:
    """Returns where the checkpoint of a step is, or would be."""
    return folder / f"step-{step:010d}"


def steps(folder: Path) -> list[int]:
    """Returns the steps of the checkpoints in a folder, ascending; none is opened."""
    return sorted(map(_step, _finished(folder)))


def _finished(folder: Path) -> list[Path]:
    return [path for path in folder.glob("step-*") if path.name[5:].isdecimal()]


def _step(path: Path) -> int:
    return int(path.name[5:])


def _is_whole(path: Path) -> bool:
    try:
        _verify(path)
    except CheckpointCorrupt as error:
        logger.warning("skipping checkpoint %s: %s", path, error)
        return False
    return True


def _rank(path: Path) -> tuple[float, int]:
    try:
        score = score_of(path.parent, _step(path))
    except (OSError, ValueError, KeyError):  # a damaged one is the first to go
        return (-math.inf, -1)
    return (-math.inf if score is None else score, _step(path))


def _verify(path: Path) -> None:
    try:
        sums: object = json.loads((path / _MARKER).read_text())
        found = {name: _checksum(path / name) for name in (_TENSORS, _TREE)}
    except (OSError, ValueError) as error:
        raise CheckpointCorrupt(f"{path} is not whole: {error}") from error
    if sums != found:
        raise CheckpointCorrupt(f"{path}: expected checksums {sums}, found {found}")


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
            name = str(len(tensors))
            tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
            return {"$tensor": name}
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
