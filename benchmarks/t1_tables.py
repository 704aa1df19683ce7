"""The figures and tables of T1's studies, from the JSON of numbers that a study wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from cluster.demo import Interval
from cluster.plots import new_axes, style

Table = Mapping[str, Any]

NAMES = {
    "k4": "K = 4, 16 prompts",
    "base": "K = 16, 16 prompts",
    "k64": "K = 64, 16 prompts",
    "k4-equal": "K = 4, 64 prompts",
    "k64-equal": "K = 64, 4 prompts",
    "t07": "0.7",
    "t12": "1.2",
    "t15": "1.5",
    "short-penalty": "28 tokens, over-long = -1",
    "long": "37 tokens, over-long = 0",
    "long-penalty": "37 tokens, over-long = -1",
}
"""Arm -> its name in a table; ``base`` has another name in each study."""
_BASE = {"penalties": "28 tokens, over-long = 0", "temperature": "1.0"}
_COMPARED = {
    "samples": dict.fromkeys(("k4", "k64", "k4-equal", "k64-equal"), "base"),
    "penalties": {"short-penalty": "base", "long-penalty": "long"},
    "temperature": dict.fromkeys(("t07", "t12", "t15"), "base"),
}
"""Study -> arm -> the arm it is compared with, seed by seed."""


def name_of(study: str, arm: str) -> str:
    """Returns what an arm is called in a study."""
    return _BASE.get(study, NAMES[arm]) if arm == "base" else NAMES[arm]


def gain(table: Table, arm: str, metric: str, other: str | None = None) -> Interval:
    """Returns a metric's change over an arm's start, or its difference to another arm's end."""
    after = table["arms"][arm][metric]
    before = table["arms"][other][metric] if other else table["arms"][arm][f"sft_{metric}"]
    return Interval.of([one - two for one, two in zip(after, before, strict=True)])


def format_table(study: str, table: Table) -> str:
    """Returns a study as Markdown: per cent, and points with 95 % intervals over seeds."""
    head = (
        f"{len(table['seeds'])} seeds, {table['updates']} updates, {table['prompts']} test "
        f"prompts; commit {table['commit']}, {table['wall_s']} s."
    )
    if study == "thinking":
        return f"{_thinking_table(table)}\n\n{head}"
    penalties = study == "penalties"
    titles = {
        "samples": ["answers to a prompt", "samples", "CPU s a seed"],
        "penalties": ["limit and penalty"],
        "temperature": ["rollout temperature"],
    }[study]
    titles += ["after SFT", "after RL", "gain, points", "against", "difference, points"]
    if penalties:
        titles += ["over-long before", "after", "false claims before", "after"]
    elif study == "temperature":
        titles += ["after RL at 0.5", "difference at 0.5, points"]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for arm, metrics in table["arms"].items():
        other = _COMPARED[study].get(arm)
        row = [name_of(study, arm)]
        if study == "samples":
            row += [_samples(arm, table["updates"]), f"{np.mean(metrics['cpu_s']):.0f}"]
        row += [_mean(metrics["sft_accuracy"]), _mean(metrics["accuracy"])]
        row += [str(gain(table, arm, "accuracy")), name_of(study, other) if other else ""]
        row += [str(gain(table, arm, "accuracy", other)) if other else ""]
        if penalties:
            names = ("sft_overlong", "overlong", "sft_false_claims", "false_claims")
            row += [_mean(metrics[name]) for name in names]
        elif study == "temperature":
            row += [_mean(metrics["accuracy_t05"])]
            row += [str(gain(table, arm, "accuracy_t05", other)) if other else ""]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join([*lines, "", head])


def _samples(arm: str, updates: int) -> str:
    words = NAMES[arm].replace(",", "").split()
    copies, prompts = (int(word) for word in words if word.isdecimal())
    return f"{copies * prompts * updates:,}"


def _mean(values: Sequence[float]) -> str:
    return f"{100 * float(np.mean(values)):.1f}"


def _thinking_table(table: Table) -> str:
    """One row a budget, one column a fraction of reinforcement learning."""
    curves = table["curves"]
    fractions = list(curves[0])
    titles = ["tokens of thought", *(f"{100 * float(one):.0f} % of RL" for one in fractions)]
    lines = ["| " + " | ".join([*titles, "last less first, points"]) + " |"]
    lines.append("|" + "---|" * (len(titles) + 1))
    for place, point in enumerate(curves[0][fractions[0]]):
        whole = len(curves[0][fractions[0]]) - place
        name = {1: "whole, greedy", 2: "whole"}.get(whole, str(point["budget"]))
        values = [[seed[one][place]["accuracy"] for seed in curves] for one in fractions]
        change = Interval.of([one - two for one, two in zip(values[-1], values[0], strict=True)])
        lines.append("| " + " | ".join([name, *map(_mean, values), str(change)]) + " |")
    return "\n".join(lines)


def plot_arms(study: str, xlabel: str) -> Callable[[Table], Figure]:
    """Returns what draws each arm's accuracy after reinforcement learning, with its interval."""

    def draw(table: Table) -> Figure:
        with style(dark=False) as theme:
            figure, axes = new_axes(f"T1 on countdown: {study}", xlabel, "test accuracy, %")
            arms = list(table["arms"])
            for metric, label, colour in (
                ("sft_accuracy", "after SFT", theme.quiet),
                ("accuracy", "after RL", theme.colours[0]),
            ):
                found = [Interval.of(table["arms"][arm][metric]) for arm in arms]
                axes.errorbar(
                    range(len(arms)),
                    [100 * one.mean for one in found],
                    [100 * one.half for one in found],
                    fmt="o",
                    color=colour,
                    capsize=3,
                    label=label,
                )
            names = [name_of(study, arm).replace(", ", "\n") for arm in arms]
            axes.set_xticks(range(len(arms)), names, fontsize=7)
            axes.legend(frameon=False, fontsize=8)
            return figure

    return draw


def plot_thinking(table: Table) -> Figure:
    """Draws accuracy over the tokens of thought really used, one line a fraction."""
    with style(dark=False) as theme:
        figure, axes = new_axes(
            "T1 on countdown: a thought cut off, then summarised",
            "tokens of thought used, mean",
            "test accuracy, %",
        )
        for number, fraction in enumerate(table["curves"][0]):
            points = [seed[fraction] for seed in table["curves"]]
            columns = list(zip(*points, strict=True))[:-2]
            found = [Interval.of([one["accuracy"] for one in column]) for column in columns]
            axes.errorbar(
                [float(np.mean([one["tokens"] for one in column])) for column in columns],
                [100 * one.mean for one in found],
                [100 * one.half for one in found],
                fmt="o-",
                markersize=3,
                capsize=2,
                color=theme.colours[number],
                label=f"{100 * float(fraction):.0f} % of RL",
            )
        axes.legend(frameon=False, fontsize=8)
        return figure


FIGURES: Mapping[str, Callable[[Table], Figure]] = {
    "samples": plot_arms("samples", "answers to a prompt and prompts an update"),
    "penalties": plot_arms("penalties", "limit of an answer and reward of an over-long one"),
    "temperature": plot_arms("temperature", "temperature of training; tested at 1.0"),
    "thinking": plot_thinking,
}
"""Study -> what draws it."""
