"""Places of run folders, as ``--runs`` takes them: a folder, or the URL of an object store."""

from __future__ import annotations

import atexit
import functools
import os
import re
import shutil
from pathlib import Path

from cluster.registry import find_run
from heliostat.errors import UsageError
from heliostat.folder import RunFolder
from heliostat.mirror import Mirror, is_url, local_copy, open_store

NAME = re.compile(r"\w[\w.-]{0,99}", re.ASCII)
"""What a run may be called."""


def run_folder(place: str, name: str) -> RunFolder:
    """Returns the folder in which a run does its work, whether it is there or not."""
    if is_url(place):
        url = f"{place.rstrip('/')}/{name}"
        return RunFolder(local_copy(url), url)
    return RunFolder(Path(place).resolve() / name)


def open_run(place: str, name: str, *, heavy: bool = False) -> RunFolder:
    """Returns a run's folder to look at; from an object store, as a fresh copy.

    Args:
        place: what ``--runs`` says.
        name: of the run.
        heavy: with checkpoints and the views' own folders.

    Raises:
        UsageError: no run has that name; the message gives the nearest.
    """
    if not is_url(place):
        return find_run(Path(place).resolve(), name)
    if name not in _names(place):
        read_runs(place)
        return find_run(_own_copy(place.rstrip("/")), name)
    return _copy(place, name, heavy=heavy)


def read_runs(place: str) -> Path:
    """Returns a local folder that holds what a place's runs say of themselves."""
    if not is_url(place):
        return Path(place).resolve()
    root = _own_copy(place.rstrip("/"))
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    for name in _names(place):
        _copy(place, name, heavy=False)
    return root


def publish(folder: RunFolder, *names: str) -> None:
    """Sends files and folders that were made in a copy to the object store it is of."""
    if not folder.url:
        return
    store, root = open_store(folder.url)
    for name in names:
        top = folder.path / name
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.is_file():
                store.pipe_file(f"{root}/{path.relative_to(folder.path)}", path.read_bytes())


def _copy(place: str, name: str, *, heavy: bool) -> RunFolder:
    url = f"{place.rstrip('/')}/{name}"
    folder = RunFolder(_own_copy(url), url)
    shutil.rmtree(folder.path, ignore_errors=True)
    folder.path.mkdir(parents=True)
    Mirror(folder, "read").pull(heavy)
    return folder


def _own_copy(url: str) -> Path:
    """Returns this process's own folder for what it reads, which goes when the process ends."""
    use = f"read-{os.getpid()}"
    _remove_at_exit(local_copy("", use))
    return local_copy(url, use)


@functools.cache
def _remove_at_exit(folder: Path) -> None:
    atexit.register(shutil.rmtree, folder, ignore_errors=True)


def _names(place: str) -> list[str]:
    store, root = open_store(place)
    try:
        found = store.ls(root, detail=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(f"--runs: {place} cannot be read: {error}") from error
    names = [Path(entry["name"]).name for entry in found if entry["type"] == "directory"]
    return [name for name in names if NAME.fullmatch(name)]
