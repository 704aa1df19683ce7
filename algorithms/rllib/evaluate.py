"""Scores and a picture of evaluation episodes."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from algorithms.rllib.config import make
from algorithms.rllib.workload import RllibRecipe
from heliostat import Run
from heliostat.rllib_episodes import Episode, frames

MOMENTS = 6
"""Pictures of an episode."""
OFF_SCREEN = {"MUJOCO_GL": "egl", "SDL_VIDEODRIVER": "dummy", "SDL_AUDIODRIVER": "dummy"}
"""What lets MuJoCo and pygame draw without a display."""
logger = logging.getLogger("heliostat")


def scores(episodes: Sequence[Episode]) -> dict[str, float]:
    """Returns mean, spread and worst return, and mean length in steps."""
    totals = np.array([episode.total for episode in episodes])
    return {
        "eval/return": float(totals.mean()),
        "eval/return_std": float(totals.std()),
        "eval/worst_return": float(totals.min()),
        "eval/length": float(np.mean([len(episode) for episode in episodes])),
    }


def draw(run: Run[RllibRecipe], episode: Episode, step: int) -> None:
    """Logs moments of an episode as one figure; says why where the environment cannot draw."""
    if "DISPLAY" not in os.environ:
        for name, value in OFF_SCREEN.items():
            os.environ.setdefault(name, value)
    try:
        environment = make(run.recipe, drawn=True)
        try:
            pictures = frames(environment, episode, MOMENTS)
        finally:
            environment.close()
    except Exception as error:  # noqa: BLE001 - drivers fail in ways of their own
        logger.warning("%s was not drawn: %s: %s", run.recipe.env, type(error).__name__, error)
        return
    figure = Figure(figsize=(2.2 * len(pictures), 2.2), layout="constrained")
    for place, picture in enumerate(pictures):
        axes = figure.add_subplot(1, len(pictures), place + 1)
        axes.imshow(picture)
        axes.set_axis_off()
    figure.suptitle(f"{run.recipe.env}: return {episode.total:.4g} in {len(episode)} steps")
    run.tracker.log_figure("episode", figure, step)
