"""Episodes played by a policy that RLlib trained: fixed seeds, no exploration, nothing learnt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from ray.rllib.connectors.env_to_module import MeanStdFilter
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.spaces.space_utils import unbatch  # pyright: ignore[reportUnknownVariableType]


@dataclass(frozen=True, slots=True)
class Episode:
    """One played episode."""

    seed: int
    total: float
    """Undiscounted sum of rewards, over all agents."""
    actions: Sequence[Any]
    """What the environment was told, step by step."""

    def __len__(self) -> int:
        return len(self.actions)


class Player:
    """Plays episodes with RLlib's networks and connectors."""

    def __init__(self, config: Any, make: Callable[[], Any]) -> None:  # noqa: ANN401 - RLlib's
        """Builds the networks.

        Args:
            config: the training's ``AlgorithmConfig``.
            make: makes one environment; those that were made are used again.
        """
        config = config.copy(copy_frozen=False)
        config.env_runners(num_env_runners=0, num_envs_per_env_runner=1, explore=False)
        kind = MultiAgentEnvRunner if config.is_multi_agent else SingleAgentEnvRunner
        # It brings networks and connectors that fit the environment; its own loop has no fixed
        # seeds for each episode and favours short ones.
        self._runner: Any = kind(config=config, worker_index=0, num_workers=0)
        for piece in self._runner._env_to_module.connectors:
            if isinstance(piece, MeanStdFilter):
                cast("Any", piece)._update_stats = False
        self._make = make
        self._environments: list[Any] = []
        self._mapping = config.policy_mapping_fn if config.is_multi_agent else None

    def play(self, state: dict[str, Any], seeds: Sequence[int], longest: int) -> list[Episode]:
        """Plays one episode from each seed, all in step with one another.

        Args:
            state: what RLlib's runners are given: weights and the state of connectors.
            seeds: one an episode.
            longest: steps after which an episode is cut.
        """
        runner = self._runner
        runner.set_state({**state, "weights_seq_no": 0})
        while len(self._environments) < len(seeds):
            self._environments.append(self._make())
        games = [
            (_Match(env, seed, self._mapping) if self._mapping else _Game(env, seed))
            for env, seed in zip(self._environments, seeds, strict=False)
        ]
        for _ in range(longest):
            playing = [game for game in games if not game.over]
            if not playing:
                break
            common: dict[str, Any] = {
                "episodes": [game.episode for game in playing],
                "rl_module": runner.module,
                "explore": False,
                "shared_data": {},
            }
            batch = runner._env_to_module(batch={}, **common)
            with torch.no_grad():
                answer = runner.module.forward_inference(batch)
            answer = runner._module_to_env(batch=answer, **common)
            chosen = answer.pop("actions")
            sent = answer.pop("actions_for_env", chosen)
            if self._mapping is None:
                chosen, sent = cast("Any", unbatch)(chosen), cast("Any", unbatch)(sent)
            for place, game in enumerate(playing):
                extra = {name: values[place] for name, values in answer.items()}
                game.step(chosen[place], sent[place], extra)
        return [Episode(game.seed, game.total, game.sent) for game in games]


@dataclass(slots=True)
class _Game:
    """An episode of one agent under way."""

    environment: Any
    seed: int
    total: float = 0.0
    sent: list[Any] = field(default_factory=list[Any])
    over: bool = False
    episode: Any = None

    def __post_init__(self) -> None:
        observation, infos = self.environment.reset(seed=self.seed)
        self.episode = SingleAgentEpisode(
            observation_space=self.environment.observation_space,
            action_space=self.environment.action_space,
        )
        self.episode.add_env_reset(observation, infos)

    def step(self, chosen: Any, sent: Any, extra: dict[str, Any]) -> None:  # noqa: ANN401
        """Takes one step: ``chosen`` is the policy's action, ``sent`` the environment's."""
        observation, reward, ended, cut, infos = self.environment.step(sent)
        self.episode.add_env_step(
            observation,
            chosen,
            reward,
            infos,
            terminated=ended,
            truncated=cut,
            extra_model_outputs=extra,
        )
        self.sent.append(sent)
        self.total += float(reward)
        self.over = bool(ended or cut)


@dataclass(slots=True)
class _Match:
    """An episode of several agents under way."""

    environment: Any
    seed: int
    mapping: Any
    total: float = 0.0
    sent: list[Any] = field(default_factory=list[Any])
    over: bool = False
    episode: Any = None

    def __post_init__(self) -> None:
        observations, infos = self.environment.reset(seed=self.seed)
        self.episode = MultiAgentEpisode(
            observation_space=self.environment.observation_spaces,
            action_space=self.environment.action_spaces,
            agent_to_module_mapping_fn=self.mapping,
        )
        self.episode.add_env_reset(observations=observations, infos=infos)

    def step(self, chosen: Any, sent: Any, extra: dict[str, Any]) -> None:  # noqa: ANN401
        """Takes one step; actions are dicts by agent, ``extra`` maps names to such dicts."""
        observations, rewards, ended, cut, infos = self.environment.step(sent)
        by_agent: dict[Any, dict[str, Any]] = {}
        for name, values in extra.items():
            for agent, value in values.items():
                by_agent.setdefault(agent, {})[name] = value
        self.episode.add_env_step(
            observations,
            chosen,
            rewards,
            infos,
            terminateds=ended,
            truncateds=cut,
            extra_model_outputs=by_agent,
        )
        self.sent.append(sent)
        self.total += float(sum(rewards.values()))
        self.over = bool(ended.get("__all__") or cut.get("__all__"))


def frames(environment: Any, episode: Episode, count: int) -> list[npt.NDArray[np.uint8]]:  # noqa: ANN401 - whatever can draw itself
    """Plays an episode again and draws ``count`` moments of it, evenly spread.

    Args:
        environment: draws itself into an array; it must follow from its seed and its actions.
        episode: what was played.
        count: at least 1.

    Returns:
        Pictures [height, width, 3].

    Raises:
        ValueError: the environment draws nothing.
    """
    wanted = {round(place) for place in np.linspace(0, len(episode), count)}
    environment.reset(seed=episode.seed)
    drawn = [environment.render()]
    for step, action in enumerate(episode.actions, start=1):
        environment.step(action)
        if step in wanted:
            drawn.append(environment.render())
    if any(picture is None for picture in drawn):
        raise ValueError("expected an array from render(), found None")
    return drawn
