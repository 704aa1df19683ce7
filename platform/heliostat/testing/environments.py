"""The contract of environments: episodes can be stacked over time, and played again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np

from heliostat.actors.environment import Environment, Step
from heliostat.testing.difference import difference
from heliostat.testing.law import demand

Actions = Callable[[np.ndarray, np.random.Generator], Mapping[str, np.ndarray]]
"""Chooses actions, one array a name, for observations [batch, ...]."""


def check_environment(
    environment: Environment,
    task: object,
    policy_actions: Actions,
    *,
    seed: int = 0,
    max_steps: int = 10_000,
) -> None:
    """Checks a batch of environments by playing it twice.

    Args:
        environment: any implementation of the protocol.
        task: for its ``reset``.
        policy_actions: chooses from the observations and the generator alone.
        seed: of the episodes, and of the generator.
        max_steps: by when every episode must have ended.

    Raises:
        ContractBroken: a law is broken.
    """
    first = list(_play(environment, task, policy_actions, seed, max_steps))
    _check_names(first[0])
    _check_forms(first)
    second = list(_play(environment, task, policy_actions, seed, max_steps))
    demand(
        difference(first, second, "two episodes of one seed"),
        "equal seeds and actions give equal episodes",
        "reset does not seed everything, or something of the last episode is left behind",
    )


@dataclass(frozen=True, slots=True)
class _Moment:
    """One step of an episode."""

    observations: np.ndarray
    """What the actions were chosen from."""
    actions: Mapping[str, np.ndarray]
    step: Step


def _play(
    environment: Environment, task: object, policy_actions: Actions, seed: int, max_steps: int
) -> Iterator[_Moment]:
    generator = np.random.default_rng(seed)
    observations = environment.reset(deepcopy(task), seed)
    alive: np.ndarray | None = None
    for number in range(max_steps):
        actions = policy_actions(observations, generator)
        before = deepcopy((observations, actions))
        step = environment.step(actions)
        demand(
            difference(
                before, (observations, actions), f"(observations, actions) of step {number}"
            ),
            "a step leaves earlier observations and the actions as they are",
            "the environment gives out its own buffer and writes into it; return a copy",
        )
        yield _Moment(*before, deepcopy(step))
        alive = np.logical_not(step.done) & (True if alive is None else alive)
        if not alive.any():
            return
        observations = step.observations
    demand(
        f"{0 if alive is None else int(alive.sum())} go on after {max_steps} steps",
        "every episode ends",
        "it has no time limit; count a cut episode as done, or raise max_steps",
    )


def _check_names(moment: _Moment) -> None:
    names = ["observation", "reward", "alive", *moment.actions, *moment.step.info]
    twice = sorted({name for name in names if names.count(name) > 1})
    demand(
        f"{twice} twice among {names}" if twice else None,
        "all arrays of an episode's record have names of their own",
        "an array of the actions or of info is called like another; rename it",
    )


def _check_forms(moments: Sequence[_Moment]) -> None:
    first = moments[0]
    demand(
        None if _kind(first.step.rewards) == "ndarray of float32" else _kind(first.step.rewards),
        "rewards are an array of float32",
        "NumPy made them float64; end with astype(np.float32)",
    )
    batch = (len(first.observations), len(first.step.rewards))
    demand(
        f"{batch[0]} observations and {batch[1]} rewards" if batch[0] != batch[1] else None,
        "observations and rewards have one batch axis, their first",
        "the axes of several agents or answers come first; put them after the batch",
    )
    done = np.zeros(first.step.rewards.shape, np.bool_)
    start = _forms(first.observations, first.step)
    for number, moment in enumerate(moments):
        demand(
            difference(_form(done), _form(moment.step.done), f"done of step {number}"),
            "done is bool and has the shape of the rewards",
            "it is one flag for the whole batch, or a number",
        )
        demand(
            difference(start, _forms(moment.step.observations, moment.step), f"step {number}"),
            "every array keeps its name, shape and dtype from reset to the end",
            "ended copies were dropped from the batch, or an array is given at times only",
        )


def _forms(observations: np.ndarray, step: Step) -> dict[str, str]:
    arrays = {"observation": observations, "reward": step.rewards, **step.info}
    return {name: _form(array) for name, array in arrays.items()}


def _form(array: np.ndarray) -> str:
    return f"{_kind(array)} {getattr(array, 'shape', '')}"


def _kind(array: np.ndarray) -> str:
    return f"{type(array).__name__} of {getattr(array, 'dtype', 'no dtype')}"
