"""What RLlib is told: its configurations, the processes of a layout, and environments by name."""

from __future__ import annotations

import importlib
import inspect
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

from heliostat import ray_session

# isort: split
import gymnasium
from ray.rllib.connectors.env_to_module import MeanStdFilter
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.env.multi_agent_env import MultiAgentEnv
from ray.rllib.env.wrappers.pettingzoo_env import ParallelPettingZooEnv
from ray.rllib.utils.from_config import NotProvided
from ray.tune.registry import register_env  # pyright: ignore[reportUnknownVariableType]

from heliostat.errors import UsageError, nearest
from heliostat.layout import Layout
from heliostat.workload import resolve

assert ray_session  # imported first: it sets Ray's token mode, which Ray reads when imported
logging.getLogger("ray.rllib").setLevel(logging.ERROR)  # it greets with warnings
Config = Any
"""RLlib's ``AlgorithmConfig``, most of whose methods carry no types."""
_PROBE_S = 5.0
"""How long a dead runner is asked, before each training step, whether it is back."""


def default_config(algorithm: str) -> Config:
    """Returns RLlib's configuration of an algorithm, such as ``ppo``, as RLlib ships it."""
    module = importlib.import_module(f"ray.rllib.algorithms.{algorithm}")
    return getattr(module, f"{algorithm.upper()}Config")()


def arguments_of(config: Config) -> list[str]:
    """Returns the names that ``config.training()`` takes, its parents' included."""
    found: dict[str, None] = {}
    for kind in type(config).__mro__:
        if "training" in vars(kind):
            parameters = inspect.signature(vars(kind)["training"]).parameters.values()
            live = [p.name for p in parameters if p.default is NotProvided]
            found |= dict.fromkeys(live)
    return list(found)


def refuse_unknown(kind: str, given: Mapping[str, object], known: Sequence[str]) -> None:
    """Refuses keys of a mapping that RLlib has no name for.

    Raises:
        UsageError: gives the nearest name.
    """
    for name in given:
        if name not in known:
            raise UsageError(nearest(f"{kind}.{name}", [f"{kind}.{one}" for one in known]))


def model_fields() -> list[str]:
    """Returns the names that describe RLlib's default networks."""
    return list(DefaultModelConfig.__dataclass_fields__)


def model_config(**fields: object) -> object:
    """Returns a description of RLlib's default networks."""
    return cast("Any", DefaultModelConfig)(**fields)


def place(config: Config, layout: Layout) -> None:
    """Writes into the configuration how many processes there are, and their resources.

    Environment runners, a learner's torch threads and restarts follow the layout; an actor's torch
    uses as many threads as the actor has CPUs, at least one.
    """
    hosts = layout.environment
    config.env_runners(
        num_env_runners=hosts.hosts,
        num_cpus_per_env_runner=hosts.cpus,
        num_gpus_per_env_runner=hosts.gpus,
        custom_resources_per_env_runner={},
    )
    config.learners(
        num_learners=layout.learners,
        num_cpus_per_learner=layout.learner_cpus,
        num_gpus_per_learner=layout.learner_gpus,
    )
    config.fault_tolerance(
        restart_failed_env_runners=True,
        max_num_env_runner_restarts=layout.max_restarts,
        env_runner_health_probe_timeout_s=_PROBE_S,
        env_runner_restore_timeout_s=layout.start_deadline_s,
    )


def normaliser(several: bool, *_: object, **__: object) -> object:
    """Returns a connector that normalises observations, of several agents if told so."""
    return MeanStdFilter(multi_agent=several)


def make_environment(name: str, arguments: Mapping[str, Any], *, drawn: bool = False) -> Any:  # noqa: ANN401 - gymnasium's, RLlib's or PettingZoo's
    """Makes an environment.

    Args:
        name: gymnasium's id, or ``package.module:factory`` for anything else: a gymnasium
            environment, a parallel PettingZoo one, or RLlib's ``MultiAgentEnv``.
        arguments: what the factory takes.
        drawn: whether it must be able to draw itself into an array.
    """
    arguments = dict(arguments)
    if not is_factory(name):
        mode = {"render_mode": "rgb_array"} if drawn else {}
        return cast("Any", gymnasium.make)(name, **{**arguments, **mode})
    factory = resolve(name)
    if isinstance(factory, type) and issubclass(factory, MultiAgentEnv):
        return cast("Any", factory)(arguments)
    made = factory(**arguments)
    single = isinstance(made, gymnasium.Env)
    return cast("Any", made if single else ParallelPettingZooEnv(made))


def is_factory(name: str) -> bool:
    """Whether a name means ``package.module:factory``; gymnasium's ``module:Id-v0`` does not."""
    return name.partition(":")[2].isidentifier()


def agents_of(environment: object) -> list[Any]:
    """Returns the agents of a multi-agent environment, and none for one of a single agent."""
    if isinstance(environment, MultiAgentEnv):
        return list(environment.possible_agents)
    return []


def register(name: str, arguments: Mapping[str, Any]) -> str:
    """Makes a factory's environment known to RLlib; returns the name that RLlib knows it by."""
    key = f"{name}?{json.dumps(dict(arguments), sort_keys=True)}"

    def make(_: object) -> Any:  # noqa: ANN401 - as make_environment
        return make_environment(name, arguments)

    register_env(key, make)
    return key
