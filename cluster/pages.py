"""The pages of reports: pictures in both schemes inside one file that needs nothing else."""

from __future__ import annotations

import base64
import io
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import jinja2
from matplotlib.figure import Figure

from cluster.plots import DPI
from heliostat.errors import UsageError

Draw = Callable[[bool], Figure]
"""Draws one picture, for a dark page where told so."""

_SLUG_CHARACTERS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """One picture as PNG, in both schemes."""

    title: str
    light: bytes
    dark: bytes

    @property
    def light_uri(self) -> str:
        """The light one as a data URI."""
        return _data_uri(self.light)

    @property
    def dark_uri(self) -> str:
        """The dark one as a data URI."""
        return _data_uri(self.dark)


def make_picture(title: str, draw: Draw) -> Picture:
    """Draws a picture in both schemes."""
    return Picture(title=title, light=_png(draw(False)), dark=_png(draw(True)))


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def _data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def save_pictures(folder: Path, pictures: Sequence[Picture]) -> None:
    """Writes the light pictures as PNG files named after their titles."""
    if folder.is_symlink():
        raise UsageError(f"expected a folder at {folder}, found a link; remove it")
    folder.mkdir(exist_ok=True)
    taken: Counter[str] = Counter()
    for picture in pictures:
        slug = re.sub(r"[^a-z0-9]+", "-", picture.title.lower())[:_SLUG_CHARACTERS].strip("-")
        name = slug or "plot"
        taken[name] += 1
        suffix = f"-{taken[name]}" if taken[name] > 1 else ""
        write_file(folder / f"{name}{suffix}.png", picture.light)


def load_template(name: str) -> jinja2.Template:
    """Reads one of our templates; it escapes all that is put in."""
    text = files("cluster").joinpath(name).read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(text)


def write_file(path: Path, content: bytes) -> None:
    """Writes a file anew: a link that a foreign folder left there is replaced, not followed."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".")
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    Path(name).chmod(0o644)
    Path(name).replace(path)
