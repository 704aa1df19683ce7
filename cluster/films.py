"""The films of a run as its report shows them."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from pathlib import Path

_LARGEST = 4 * 2**20
"""Bytes of a film that a page still carries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Film:
    """The newest film of a name."""

    name: str
    step: int
    uri: str
    """The GIF as a data URI; empty where it is too large to carry."""


def newest_films(folder: Path) -> list[Film]:
    """Returns the newest film of each name in the folder of a run's videos, in order of names."""
    found: dict[str, tuple[int, Path]] = {}
    for path in folder.glob("**/*.gif"):
        stamp = re.fullmatch(
            r"(.+)-(\d{1,15})", path.relative_to(folder).with_suffix("").as_posix()
        )
        if stamp is not None and path.is_file() and not path.is_symlink():
            found[stamp[1]] = max(found.get(stamp[1], (-1, path)), (int(stamp[2]), path))
    return [
        Film(name=name, step=step, uri=_data_uri(path))
        for name, (step, path) in sorted(found.items())
    ]


def _data_uri(path: Path) -> str:
    if path.stat().st_size > _LARGEST:
        return ""
    return "data:image/gif;base64," + base64.b64encode(path.read_bytes()).decode("ascii")
