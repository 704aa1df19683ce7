"""Environment actors: batches of environments played by a policy built from ``Weights``.

One loop serves control, several agents, and text: a prompt is an environment of one step whose
action is an answer and whose reward is its grade.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast, runtime_checkable

import numpy as np

from heliostat.layout import Family
from heliostat.pool import idempotent
from heliostat.seeding import torch_generator
from heliostat.weights import Weights

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Job:
    """One batch of episodes to play."""

    task: Any
    """What the environment's ``reset`` takes: a prompt batch, a task id, or nothing."""
    seed: int
    """Seed of the environments and of the policy's draws; equal jobs give equal episodes."""


@dataclass(frozen=True, slots=True)
class Step:
    """What a batch of environments answers to a batch of actions."""

    observations: np.ndarray
    """Next observations, [batch, ...]."""
    rewards: np.ndarray
    """float32 [batch, ...]; per prompt and answer in text, per agent where there are several."""
    done: np.ndarray
    """bool, same shape as ``rewards``: the episode has ended, by itself or by its time limit."""
    info: Mapping[str, np.ndarray]
    """Whatever else the episode's record should hold, one array a name."""


@runtime_checkable
class Environment(Protocol):
    """A batch of environments that begin together; those that ended wait for the others."""

    def reset(self, task: Any, seed: int) -> np.ndarray:  # noqa: ANN401 - the method's task
        """Begins one episode each; returns observations [batch, ...]."""
        ...

    def step(self, actions: Mapping[str, np.ndarray]) -> Step:
        """Takes the policy's actions, one array a name."""
        ...


@runtime_checkable
class Policy(Protocol):
    """Chooses actions for a batch."""

    def load(self, weights: Weights) -> None:
        """Takes new weights; those it has already, by ``weights.key``, cost nothing."""
        ...

    def act(self, observations: np.ndarray, generator: torch.Generator) -> dict[str, np.ndarray]:
        """Returns ``action`` [batch, ...] and whatever learning needs, such as ``log_probs``."""
        ...


@dataclass(frozen=True, slots=True)
class Episodes:
    """A batch of played episodes, stamped with the weights that played them."""

    version: int
    seed: int
    fields: Mapping[str, np.ndarray]
    """``observation``, the policy's arrays, ``reward``, ``alive`` and the environment's info,
    each [time, batch, ...]; ``alive`` is False after an episode's end."""

    def __getitem__(self, name: str) -> np.ndarray:
        """Returns one field, [time, batch, ...]."""
        return self.fields[name]

    def state(self) -> dict[str, Any]:
        """Returns the episodes as a checkpoint can hold them."""
        return {"version": self.version, "seed": self.seed, "fields": dict(self.fields)}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Episodes:
        """Rebuilds what ``state`` returned, from a checkpoint's tensors."""
        fields = {name: np.asarray(value) for name, value in state["fields"].items()}
        return cls(state["version"], state["seed"], fields)

    def split(self, count: int) -> list[Episodes]:
        """Cuts the batch axis into ``count`` parts of nearly equal size; some may be empty."""
        cut = {name: np.array_split(value, count, axis=1) for name, value in self.fields.items()}
        return [
            Episodes(self.version, self.seed, {name: parts[i] for name, parts in cut.items()})
            for i in range(count)
        ]

    @property
    def returns(self) -> np.ndarray:
        """Undiscounted return of each episode, float64 with the shape of one step's rewards."""
        rewards = self["reward"].astype(np.float64)
        return np.where(self["alive"], rewards, 0.0).sum(axis=0)


def play(environment: Environment, policy: Policy, job: Job, weights: Weights) -> Episodes:
    """Plays one batch to its end; the result depends on the job and the weights alone."""
    policy.load(weights)
    generator = torch_generator(job.seed)
    observations = environment.reset(job.task, job.seed)
    record: dict[str, list[np.ndarray]] = {}
    alive: np.ndarray | None = None
    while alive is None or alive.any():
        actions = policy.act(observations, generator)
        step = environment.step(actions)
        if alive is None:
            alive = np.ones_like(step.done, dtype=bool)
        moment = {"observation": observations, **actions, "reward": step.rewards, **step.info}
        for name, value in {**moment, "alive": alive}.items():
            record.setdefault(name, []).append(value)
        alive = alive & ~step.done
        observations = step.observations
    fields = {name: np.stack(values) for name, values in record.items()}
    return Episodes(weights.version, job.seed, fields)


class EnvironmentActor:
    """Plays jobs; a method's actor makes its environment and policy in its constructor."""

    family: ClassVar[Family] = "environment"

    def __init__(self, environment: Environment, policy: Policy) -> None:
        self._environment = environment
        self._policy = policy

    @idempotent
    def play(self, job: Job, weights: Weights) -> Episodes:
        """Plays one batch of episodes with these weights."""
        return play(self._environment, self._policy, job, weights)


class GymnasiumEnvironment:
    """``num_envs`` copies of a registered Gymnasium environment.

    ``seed`` seeds copy i with seed + i. An episode cut by its time limit counts as done;
    ``info["truncated"]`` tells the two apart.
    """

    def __init__(self, name: str, num_envs: int, **settings: object) -> None:
        import gymnasium

        make = cast("Any", gymnasium).make_vec
        self._envs = make(name, num_envs=num_envs, vectorization_mode="sync", **settings)

    def reset(self, task: None, seed: int) -> np.ndarray:  # noqa: ARG002 - the name is the task
        """Begins ``num_envs`` episodes."""
        observations, _ = self._envs.reset(seed=seed % 2**31)
        return observations

    def step(self, actions: Mapping[str, np.ndarray]) -> Step:
        """Takes ``actions["action"]``, [num_envs, ...]."""
        observations, rewards, ended, truncated, _ = self._envs.step(actions["action"])
        return Step(
            observations, rewards.astype(np.float32), ended | truncated, {"truncated": truncated}
        )


class ParallelEnvironment:
    """A PettingZoo parallel environment; the batch axis is its possible agents, in their order.

    An agent that has left sees zeros and earns nothing.
    """

    def __init__(self, env: Any) -> None:  # noqa: ANN401 - PettingZoo carries no useful types
        self._env = env
        self._agents: list[Any] = list(env.possible_agents)

    def reset(self, task: Any, seed: int) -> np.ndarray:  # noqa: ANN401 - passed on as options
        """Begins one episode of all agents; ``task`` becomes the environment's options."""
        observations, _ = self._env.reset(seed=seed % 2**31, options=task)
        self._blank = np.zeros_like(next(iter(observations.values())))
        return self._stack(observations)

    def step(self, actions: Mapping[str, np.ndarray]) -> Step:
        """Takes ``actions["action"]``, one row an agent."""
        living = set(self._env.agents)
        chosen = {
            agent: action
            for agent, action in zip(self._agents, actions["action"], strict=True)
            if agent in living
        }
        observations, rewards, ended, truncated, _ = self._env.step(chosen)
        done = [ended.get(agent, True) or truncated.get(agent, True) for agent in self._agents]
        earned = np.array([rewards.get(agent, 0.0) for agent in self._agents], np.float32)
        return Step(self._stack(observations), earned, np.array(done), {})

    def _stack(self, observations: Mapping[Any, np.ndarray]) -> np.ndarray:
        return np.stack([observations.get(agent, self._blank) for agent in self._agents])
