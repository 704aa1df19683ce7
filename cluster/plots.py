"""The pictures of a report: one small style, light or dark, lines that carry their own names."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from cluster.records import printable

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType

Floats = npt.NDArray[np.float64]
Series = tuple[Sequence[float], Sequence[float]]
"""x and y of one line, of equal length; points that are not finite are left out."""

SMOOTH_ABOVE = 200
"""A line of more points is drawn smoothed, over its own points faintly."""
SIZE = (5.0, 3.0)
"""Inches: narrow, so that the letters stay readable on a phone."""
DPI = 200
_LABEL_GAP = 0.075
"""Least distance of two labels, as a share of the height of the axes."""
_NAME_CHARACTERS = 28
_TITLE_CHARACTERS = 80
_TICKS = (1, 2, 2.5, 5, 10)
_BARS = 24
"""Groups of steps in the picture of phases."""


@dataclass(frozen=True, slots=True)
class Theme:
    """The colours of a page."""

    ground: str
    ink: str
    quiet: str
    grid: str
    colours: tuple[str, ...]


_LIGHT = Theme(
    ground="#ffffff",
    ink="#1f2430",
    quiet="#6b7280",
    grid="#e6e8ec",
    colours=("#2563a8", "#c2532d", "#2f7d5b", "#7b56a3", "#a67c12", "#4b5563"),
)
_DARK = Theme(
    ground="#171a21",
    ink="#e5e7eb",
    quiet="#9aa3b2",
    grid="#2b303b",
    colours=("#7db3ee", "#f0936f", "#77c7a0", "#c0a1e4", "#e0b95c", "#aab2c0"),
)


def plot_lines(
    series: Mapping[str, Series],
    title: str,
    xlabel: str,
    ylabel: str,
    level: tuple[str, float] | None = None,
    dark: bool = False,
) -> Figure:
    """Draws lines over a common x-axis, each named at its end.

    Args:
        series: name -> (x, y); a line of more than ``SMOOTH_ABOVE`` points is drawn smoothed.
        title: what the picture shows.
        xlabel: quantity and unit of x.
        ylabel: quantity and unit of y.
        level: name and value of a dashed horizontal line to compare with.
        dark: for a dark page.

    Returns:
        A figure of its own, outside pyplot: nothing needs to be closed.

    Raises:
        ValueError: a line's x and y differ in length.
    """
    with style(dark) as theme:
        figure, axes = new_axes(title, xlabel, ylabel)
        ends: list[tuple[str, float, str]] = []
        for number, (name, (xs, ys)) in enumerate(series.items()):
            colour = theme.colours[number % len(theme.colours)]
            x, y = _finite(name, xs, ys)
            if not x.size:
                continue
            drawn = smooth(y) if x.size > SMOOTH_ABOVE else y
            if drawn is not y:
                axes.plot(x, y, ".", color=colour, alpha=0.3, markersize=2.4, markeredgewidth=0)
            marker = "o" if x.size < 30 else ""
            axes.plot(x, drawn, color=colour, marker=marker, markersize=3)
            if len(series) > 1:  # the y-axis names an only line
                ends.append((name, float(drawn[-1]), colour))
        if level is not None:
            axes.axhline(level[1], color=theme.quiet, linestyle=(0, (5, 3)), linewidth=1)
            ends.append((f"{level[0]} {level[1]:.3g}", level[1], theme.quiet))
        _name_lines(axes, ends)
        return figure


def plot_phases(
    steps: Sequence[float], seconds: Mapping[str, Sequence[float]], dark: bool = False
) -> Figure:
    """Draws how the time of a step is shared out, the mean over groups of steps.

    Args:
        steps: ``[R]``, ascending.
        seconds: phase -> ``[R]`` seconds of it in each step, the first phase lowest.
        dark: for a dark page.
    """
    groups = np.array_split(np.arange(len(steps)), min(_BARS, len(steps)))
    x = np.array([np.mean(np.asarray(steps, np.float64)[group]) for group in groups])
    layers = {
        name: np.array([np.mean(_or_zero(values)[group]) for group in groups])
        for name, values in seconds.items()
    }
    with style(dark) as theme:
        figure, axes = new_axes("Time of a step by phase", "step", "seconds a step")
        width = 0.86 * float(np.diff(x).min()) if x.size > 1 else 0.86
        floor = np.zeros(len(x))
        ends: list[tuple[str, float, str]] = []
        for number, (name, layer) in enumerate(layers.items()):
            colour = theme.colours[number % len(theme.colours)]
            axes.bar(x, layer, width, floor, color=colour, alpha=0.85, linewidth=0)
            middle = float(floor[-1] + layer[-1] / 2)
            ends.append((f"{name} {np.mean(layer):.2g} s", middle, colour))
            floor = floor + layer
        axes.set_ylim(bottom=0)
        _name_lines(axes, ends)
        return figure


def plot_time_line(
    hours: Sequence[float],
    steps: Sequence[float],
    marks: Mapping[str, Sequence[float]],
    dark: bool = False,
) -> Figure:
    """Draws the run's steps over the clock, and under them a row of marks for each kind of event.

    Args:
        hours: ``[R]`` hours since the run began, of each logged row.
        steps: ``[R]`` steps done by then.
        marks: kind of event -> hours since the run began.
        dark: for a dark page.
    """
    with style(dark) as theme:
        unit, scale = ("hours", 1.0) if max(hours, default=0.0) >= 2 else ("minutes", 60.0)
        figure, axes = new_axes("Progress by the clock", f"{unit} since the run began", "step")
        axes.plot(np.asarray(hours) * scale, steps, color=theme.colours[0])
        if not marks:
            return figure
        # The rows take the lower part of the same axes, so that marks and line share their x.
        rows = len(marks)
        top = max(max(steps, default=1.0), 1.0)
        height = top * 0.13
        axes.set_ylim(-height * (rows + 0.6), top * 1.05)
        for row, (kind, times) in enumerate(marks.items()):
            y = -height * (row + 1)
            colour = theme.colours[1 + row % (len(theme.colours) - 1)]
            at = np.asarray(times, np.float64) * scale
            axes.vlines(at, y, top, color=colour, linewidth=0.8, alpha=0.35)
            axes.plot(at, np.full(at.size, y), "|", color=colour, markersize=9, markeredgewidth=1.6)
            axes.annotate(
                f"{kind} ({at.size})",
                (1.01, y),
                xycoords=("axes fraction", "data"),
                color=colour,
                va="center",
                fontsize=8,
            )
        axes.axhline(0, color=theme.grid, linewidth=0.8)
        axes.set_yticks(
            [
                tick
                for tick in MaxNLocator(5, steps=_TICKS, integer=True).tick_values(0, top)
                if 0 <= tick <= top
            ]
        )
        return figure


def smooth(values: Floats) -> Floats:
    """Returns the centred moving mean over a fortieth of the points, taken twice.

    Both ends average over what lies inside, so that a constant stays itself.
    """
    reach = max(1, values.size // 80)
    index = np.arange(values.size)
    low, high = np.maximum(index - reach, 0), np.minimum(index + reach + 1, values.size)
    for _ in range(2):
        sums = np.concatenate([[0.0], np.cumsum(values)])
        values = (sums[high] - sums[low]) / (high - low)
    return values


def _finite(name: str, xs: Sequence[float], ys: Sequence[float]) -> tuple[Floats, Floats]:
    x, y = np.asarray(xs, np.float64), np.asarray(ys, np.float64)
    if x.shape != y.shape:
        raise ValueError(f"expected as many x as y for line {name!r}, found {x.size} and {y.size}")
    fine = np.isfinite(x) & np.isfinite(y)
    return x[fine], y[fine]


def _or_zero(values: Sequence[float]) -> Floats:
    return np.nan_to_num(np.asarray(values, np.float64), posinf=0.0, neginf=0.0)


def _name_lines(axes: Axes, ends: Sequence[tuple[str, float, str]]) -> None:
    """Writes names beside the right edge at the heights of the lines' ends, moved apart."""
    low, high = axes.get_ylim()
    axes.set_ylim(low, high)
    wanted = [(end - low) / (high - low) for _, end, _ in ends]
    for (name, _, colour), height in zip(ends, spread(wanted, _LABEL_GAP), strict=True):
        axes.annotate(
            printable(name[:_NAME_CHARACTERS]),
            (1.01, height),
            xycoords="axes fraction",
            color=colour,
            va="center",
            fontsize=8,
        )


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Moves heights in [0, 1] apart to at least ``gap``, in order, as little as needed.

    Neighbours that are too close become one block round their mean; blocks that then touch join.
    """
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    blocks: list[list[int]] = []

    def start(block: list[int]) -> float:
        middle = sum(heights[index] for index in block) / len(block)
        half = gap * (len(block) - 1) / 2
        return min(max(middle, half), max(1 - half, half)) - half

    for index in order:
        blocks.append([index])
        while len(blocks) > 1 and start(blocks[-2]) + gap * len(blocks[-2]) > start(blocks[-1]):
            last = blocks.pop()
            blocks[-1] += last
    placed = dict.fromkeys(order, 0.0)
    for block in blocks:
        for place, index in enumerate(block):
            placed[index] = start(block) + gap * place
    return [placed[index] for index in range(len(heights))]


def new_axes(title: str, xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    """Returns an empty figure of the reports' size, to be drawn inside ``style``."""
    figure = Figure(figsize=SIZE, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
    axes = figure.add_subplot()
    axes.set_title(printable(title[:_TITLE_CHARACTERS]), loc="left")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(printable(ylabel[:_TITLE_CHARACTERS]))
    whole = xlabel == "step"
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=_TICKS, integer=whole))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=_TICKS))
    return figure, axes


@contextmanager
def style(dark: bool) -> Generator[Theme]:
    """Draws as the reports do while the context lasts."""
    theme = _DARK if dark else _LIGHT
    settings: dict[RcKeyType, Any] = {
        "axes.axisbelow": True,
        "axes.edgecolor": theme.grid,
        "axes.facecolor": theme.ground,
        "axes.formatter.useoffset": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.labelcolor": theme.quiet,
        "axes.labelsize": 8,
        "axes.spines.left": False,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlecolor": theme.ink,
        "axes.titlepad": 10,
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "axes.xmargin": 0.02,
        "figure.facecolor": theme.ground,
        "font.family": "DejaVu Sans",
        "grid.color": theme.grid,
        "lines.linewidth": 1.6,
        "text.color": theme.ink,
        "text.parse_math": False,  # names come from run data: a $ in them is no formula
        "xtick.color": theme.quiet,
        "xtick.labelsize": 8,
        "xtick.major.size": 0,
        "ytick.color": theme.quiet,
        "ytick.labelsize": 8,
        "ytick.major.size": 0,
    }
    with mpl.rc_context(settings):
        yield theme
