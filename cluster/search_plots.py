"""The pictures of a search: courses of its trials, parallel coordinates, importance, the front."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cluster.plots import Series, new_axes, style
from cluster.records import printable
from cluster.spaces import Value

_NAME_CHARACTERS = 18


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """One trial's metric over its steps."""

    name: str
    series: Series
    stopped: bool
    """It was given up, or failed."""
    best: bool


def plot_courses(courses: Sequence[Course], metric: str, dark: bool = False) -> Figure:
    """Draws the metric of every trial over its steps; a cross marks where one was stopped."""
    with style(dark) as theme:
        figure, axes = new_axes("Trials, x where one was stopped", "step", metric)
        for course in sorted(courses, key=lambda course: course.best):
            x, y = (np.asarray(values, np.float64) for values in course.series)
            fine = np.isfinite(y)
            x, y = x[fine], y[fine]
            if not x.size:
                continue
            colour = theme.colours[0] if course.best else theme.quiet
            axes.plot(
                x,
                y,
                color=colour,
                alpha=1.0 if course.best else 0.45,
                linewidth=1.8 if course.best else 1.0,
            )
            if course.stopped:
                axes.plot(x[-1:], y[-1:], "x", color=theme.colours[1], markersize=6)
            if course.best:
                _note(axes, f"best: {course.name}", (x[-1], y[-1]), theme.colours[0])
        return figure


def plot_parallel(
    points: Sequence[Mapping[str, Value]],
    scores: Sequence[float],
    metric: str,
    larger_is_better: bool = True,
    dark: bool = False,
) -> Figure:
    """Draws each trial as a line over one axis a key, the last of the metric.

    Args:
        points: the keys' values of each trial, of one at least; numbers over several decades are
            drawn by decade.
        scores: the metric of each trial, finite.
        metric: its name.
        larger_is_better: which fifth of the trials is drawn in colour.
        dark: for a dark page.
    """
    columns: dict[str, Sequence[Value]] = {
        key: [point[key] for point in points] for key in points[0]
    }
    columns[metric] = list(scores)
    axis_of = {name: _Axis.of(values) for name, values in columns.items()}
    with style(dark) as theme:
        figure, axes = new_axes("Parallel coordinates, the best in colour", "", "")
        axes.set_yticks([])
        order = sorted(
            range(len(scores)), key=lambda i: scores[i] * (1 if larger_is_better else -1)
        )
        top = set(order[-max(1, len(scores) // 5) :])
        for index in order:
            heights = [axis.place(columns[name][index]) for name, axis in axis_of.items()]
            colour = theme.colours[0] if index in top else theme.quiet
            axes.plot(
                range(len(heights)), heights, color=colour, alpha=0.9 if index in top else 0.35
            )
        for place, axis in enumerate(axis_of.values()):
            axes.axvline(place, color=theme.grid, linewidth=1)
            for height, text in axis.labels():
                axes.annotate(
                    printable(text),
                    (place, height),
                    xytext=(3, 0),
                    textcoords="offset points",
                    fontsize=7,
                    color=theme.quiet,
                    va="center",
                )
        names = [printable(name[-_NAME_CHARACTERS:]) for name in axis_of]
        axes.set_xticks(range(len(names)), names)
        axes.set_ylim(-0.06, 1.06)
        axes.set_xlim(-0.1, len(names) - 0.6)
        return figure


@dataclass(frozen=True, slots=True)
class _Axis:
    """Where values stand between 0 and 1: numbers by size or by decade, others by name."""

    low: float
    high: float
    log: bool
    names: tuple[str, ...]

    @classmethod
    def of(cls, values: Sequence[Value]) -> _Axis:
        numbers = [
            float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool)
        ]
        numbers = [number for number in numbers if math.isfinite(number)]
        if not numbers or any(isinstance(value, str | list | bool) for value in values):
            return cls(0.0, 1.0, False, tuple(sorted({str(value) for value in values})))
        low, high = min(numbers), max(numbers)
        return cls(low, high, low > 0 and high / low > 30, ())

    def place(self, value: Value) -> float:
        """Returns the height of a value; NaN leaves a gap."""
        if self.names:
            return self.names.index(str(value)) / max(1, len(self.names) - 1)
        if not isinstance(value, int | float) or not math.isfinite(value):
            return math.nan
        if self.high == self.low:
            return 0.5
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def labels(self) -> list[tuple[float, str]]:
        """Returns heights and texts to write beside the axis."""
        if self.names:
            return [(self.place(name), name[:_NAME_CHARACTERS]) for name in self.names[:12]]
        return [(0.0, f"{self.low:.3g}"), (1.0, f"{self.high:.3g}")]


def plot_importance(shares: Mapping[str, float], metric: str, dark: bool = False) -> Figure:
    """Draws how closely each key goes with the metric, the closest on top."""
    with style(dark) as theme:
        figure, axes = new_axes("Importance", f"rank correlation with {metric}, its size", "")
        names = [printable(name[-2 * _NAME_CHARACTERS :]) for name in shares][::-1]
        axes.barh(range(len(names)), list(shares.values())[::-1], color=theme.colours[0])
        axes.set_yticks(range(len(names)), names)
        axes.set_xlim(0, 1)
        return figure


def plot_front(
    scores: Sequence[tuple[float, float]],
    front: Sequence[bool],
    metrics: tuple[str, str],
    dark: bool = False,
) -> Figure:
    """Draws the trials by their first two metrics, those of the Pareto front in colour."""
    with style(dark) as theme:
        figure, axes = new_axes("Pareto front", metrics[0], metrics[1])
        for chosen, colour in ((False, theme.quiet), (True, theme.colours[0])):
            some = [score for score, best in zip(scores, front, strict=True) if best is chosen]
            axes.plot([x for x, _ in some], [y for _, y in some], "o", color=colour, markersize=5)
        return figure


def _note(axes: Axes, text: str, at: tuple[float, float], colour: str) -> None:
    axes.annotate(
        printable(text),
        at,
        xytext=(-4, 8),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color=colour,
    )
