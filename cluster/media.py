"""The figures and films that a run logged, as its report shows them."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_SIGNATURES = {"png": b"\x89PNG\r\n\x1a\n", "gif": b"GIF8"}
_LARGEST = 4 * 2**20
"""Bytes of a file that a page still carries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Media:
    """The newest picture or film of one name."""

    name: str
    step: int
    uri: str
    """The file as a data URI; empty where it is too large to carry."""


def newest_media(folder: Path, kind: Literal["png", "gif"]) -> Iterator[Media]:
    """Yields the newest file of each name below ``folder``, in order of names.

    The files may come from elsewhere: links and what is not of the kind are left out.
    """
    newest: dict[str, tuple[int, Path]] = {}
    for path in () if folder.is_symlink() else folder.glob(f"**/*-*.{kind}"):
        name, _, step = path.relative_to(folder).with_suffix("").as_posix().rpartition("-")
        if re.fullmatch(r"\d{1,15}", step) and not path.is_symlink() and path.is_file():
            newest[name] = max(newest.get(name, (-1, path)), (int(step), path))
    for name, (step, path) in sorted(newest.items()):
        if path.stat().st_size > _LARGEST:
            yield Media(name=name, step=step, uri="")
        elif (content := path.read_bytes()).startswith(_SIGNATURES[kind]):
            text = base64.b64encode(content).decode("ascii")
            yield Media(name=name, step=step, uri=f"data:image/{kind};base64,{text}")
