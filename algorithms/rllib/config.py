"""From a recipe to RLlib's configuration."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from algorithms.rllib.workload import OFFLINE, RllibRecipe
from heliostat import rllib_config as rllib
from heliostat.errors import UsageError
from heliostat.rllib_data import RecordedSteps, read_steps

RATES = ("actor_lr", "critic_lr", "alpha_lr", "value_lr")
"""Algorithms with several optimisers have these in place of ``lr``."""
OWN = ("lr", "gamma", "train_batch_size_per_learner", "train_batch_size", "model")
"""Arguments of ``training()`` that a recipe sets by fields of its own."""


def check(recipe: RllibRecipe) -> None:
    """Refuses what RLlib would refuse later, or take without a word.

    Raises:
        UsageError: an argument has no such name, the environment cannot be made or has another
            number of agents, or RLlib refuses the combination.
    """
    known = rllib.arguments_of(rllib.default_config(recipe.algorithm))
    for name in OWN:
        if name in recipe.training:
            raise UsageError(
                f"training.{name}: the recipe has a field for it; set lr, gamma, batch"
            )
    rllib.refuse_unknown("training", recipe.training, [name for name in known if name not in OWN])
    rllib.refuse_unknown("model", recipe.model, rllib.model_fields())
    if recipe.data:
        read_steps(Path(recipe.data))
    try:
        environment = make(recipe)
    except Exception as error:
        raise UsageError(f"env: {recipe.env!r} cannot be made: {error}") from error
    agents = rllib.agents_of(environment)
    environment.close()
    if bool(agents) != (recipe.policies != "one"):
        raise UsageError(
            f"policies: {recipe.env!r} has {len(agents) or 'one'} agents, found "
            f"policies={recipe.policies}; take one for a single agent, else shared or separate"
        )
    try:
        configure(recipe, seed=0).validate()
    except (ValueError, TypeError) as error:
        raise UsageError(f"RLlib refuses this recipe: {error}") from error


def make(recipe: RllibRecipe, *, drawn: bool = False) -> Any:  # noqa: ANN401 - any environment
    """Makes the recipe's environment, able to draw itself if asked."""
    return rllib.make_environment(recipe.env, recipe.env_args, drawn=drawn)


def configure(recipe: RllibRecipe, seed: int) -> rllib.Config:
    """Returns the whole of RLlib's configuration.

    Args:
        recipe: what to train.
        seed: in [0, 2**31 - 2**20), so that RLlib can count on from it.
    """
    config = rllib.default_config(recipe.algorithm)
    rates = [name for name in RATES if name in rllib.arguments_of(config)]
    chosen = dict.fromkeys(rates, recipe.lr) | ({"lr": None} if rates else {"lr": recipe.lr})
    config.training(
        gamma=recipe.gamma,
        train_batch_size_per_learner=recipe.batch,
        **{**chosen, **recipe.training},
    )
    widths = {"fcnet_hiddens": list(recipe.hidden), "fcnet_activation": recipe.activation}
    config.rl_module(model_config=rllib.model_config(**{**widths, **recipe.model}))
    _set_environment(config, recipe)
    rllib.place(config, recipe.layout)
    config.reporting(
        min_time_s_per_iteration=0,
        min_train_timesteps_per_iteration=0,
        min_sample_timesteps_per_iteration=recipe.iteration_steps,
    )
    config.debugging(seed=seed, log_level="ERROR", log_sys_usage=False)
    if recipe.algorithm in OFFLINE:
        config.offline_data(
            input_=[recipe.data],
            offline_data_class=RecordedSteps,
            dataset_num_iters_per_learner=recipe.updates,
        )
    return config


def _set_environment(config: rllib.Config, recipe: RllibRecipe) -> None:
    environment = make(recipe)
    agents = rllib.agents_of(environment)
    name, arguments = recipe.env, dict(recipe.env_args)
    if agents or rllib.is_factory(name):
        name, arguments = rllib.register(name, arguments), {}
    config.environment(env=name, env_config=arguments)
    if not agents:
        config.environment(
            observation_space=environment.observation_space,
            action_space=environment.action_space,
        )
    environment.close()
    config.env_runners(
        num_envs_per_env_runner=recipe.envs // max(1, recipe.layout.environment.hosts)
    )
    if recipe.normalise:
        config.env_runners(env_to_module_connector=partial(rllib.normaliser, bool(agents)))
    if recipe.policies == "shared":
        config.multi_agent(policies={"shared"}, policy_mapping_fn=_shared)
    elif recipe.policies == "separate":
        config.multi_agent(policies={str(agent) for agent in agents}, policy_mapping_fn=_separate)


def _shared(agent: object, *_: object, **__: object) -> str:
    del agent
    return "shared"


def _separate(agent: object, *_: object, **__: object) -> str:
    return str(agent)
