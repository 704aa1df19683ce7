"""The figures that a run logged, as its report shows them."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_LARGEST = 8 * 2**20
"""Bytes; a larger file is left where it is."""


@dataclass(frozen=True, slots=True)
class LoggedFigure:
    """The newest picture of one name."""

    name: str
    step: int
    uri: str
    """The PNG as a data URI."""


def logged_figures(folder: Path) -> Iterator[LoggedFigure]:
    """Yields the newest PNG of each name below ``folder``; the files may come from elsewhere.

    Links, files that are no PNG, and those above eight mebibytes are left out.
    """
    newest: dict[str, tuple[int, Path]] = {}
    for path in () if folder.is_symlink() else folder.glob("**/*-*.png"):
        name, _, step = path.relative_to(folder).with_suffix("").as_posix().rpartition("-")
        if re.fullmatch(r"\d{1,18}", step) and not path.is_symlink() and path.is_file():
            newest[name] = max(newest.get(name, (-1, path)), (int(step), path))
    for name, (step, path) in sorted(newest.items()):
        content = path.read_bytes() if path.stat().st_size <= _LARGEST else b""
        if content.startswith(_SIGNATURE):
            text = base64.b64encode(content).decode("ascii")
            yield LoggedFigure(name, step, f"data:image/png;base64,{text}")
