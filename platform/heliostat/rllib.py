"""The bridge to RLlib's new API stack; with ``rllib_*`` beside it the core's only import of it.

RLlib starts environment runners and learners of its own, as many as the layout says. What leaves
here are plain values: metrics by name, trees of arrays and JSON values, episodes.
"""

from __future__ import annotations

import math
import random
import shutil
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self, cast

from heliostat.rllib_config import Config

# isort: split
import numpy as np
import torch
from ray.exceptions import ObjectLostError, RayActorError

from heliostat.errors import ActorLost, DeadlineExceeded
from heliostat.layout import Layout
from heliostat.plain import to_live, to_plain
from heliostat.rllib_episodes import Episode, Player
from heliostat.seeding import derive

_FORGOTTEN = ("curr_log_alpha", "curr_kl_coeffs_per_module", "moving_avg_sqd_adv_norms_per_module")
"""Tensors of RLlib's learners that their own ``get_state`` leaves out."""
_BOOKKEEPING = ("num_", "module_train_batch_size", "learner_connector", "diff_num", "weights_seq")
"""How those of a learner's results begin that count what the platform counts or times itself."""
_STEPS = ("env_runners", "num_env_steps_sampled_lifetime")
_PROBE_PAUSE_S = 0.2
_SEEDS = 2**31
"""Seeds of environments and of NumPy's global generator lie below."""


class Algorithm:
    """An RLlib algorithm in training. Leaving its context ends its actors."""

    def __init__(self, config: Config, make: Callable[[], Any], layout: Layout) -> None:
        """Starts the actors.

        Args:
            config: complete; it is copied.
            make: makes an environment for evaluation.
            layout: gives the deadlines.
        """
        with _quiet():
            hosted = _hosted(config.algo_class, layout)
            self._rllib: Any = hosted(config=config.copy(copy_frozen=False))
            try:
                self._player = Player(self._rllib.config, make)
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the actors."""
        self._rllib.stop()
        shutil.rmtree(self._rllib.logdir, ignore_errors=True)  # made under the home folder, empty

    def step(self) -> dict[str, float]:
        """Trains for one of RLlib's iterations.

        Returns:
            ``train/return``, ``train/episode_length``, ``train/env_steps`` in all, the learner's
            numbers under their own names, and ``perf/env_steps_per_s``.

        Raises:
            ActorLost: a learner died, or no environment runner came back.
            DeadlineExceeded: the runners took no step within ``layout.call_deadline_s``.
        """
        start, before = time.perf_counter(), self._env_steps()
        self._rllib.taken = -1.0  # the time since the last iteration is not the runners'
        try:
            result = self._rllib.train()
        except (RayActorError, ObjectLostError) as error:
            raise ActorLost(f"RLlib lost an actor that it does not replace: {error}") from error
        metrics = metrics_of(result)
        metrics["train/env_steps"] = self._env_steps()
        spent = time.perf_counter() - start
        return metrics | {"perf/env_steps_per_s": (metrics["train/env_steps"] - before) / spent}

    def _env_steps(self) -> float:
        path = _STEPS if self._runners is not None else _STEPS[-1]
        return float(self._rllib.metrics.peek(path, default=0))

    @property
    def _runners(self) -> Any:  # noqa: ANN401 - RLlib's EnvRunnerGroup; None for offline algorithms
        return self._rllib.env_runner_group

    def begin_anew(self, seed: int) -> None:
        """Starts every environment anew and reseeds every process.

        What happens between two such points depends on the state and the seed alone, where
        sampling and learning take turns. Episodes under way are given up.
        """
        if self._runners is not None:
            self._runners.foreach_env_runner(partial(_renew, seed=seed))
        self._rllib.learner_group.foreach_learner(partial(_reseed, seed=derive(seed, "learner")))
        for source in (self._rllib.local_replay_buffer, self._rllib.offline_data):
            if source is not None:
                source.rng = np.random.default_rng(seed)

    def evaluate(self, seeds: Sequence[int], longest: int) -> list[Episode]:
        """Plays one episode from each seed without exploring; trains nothing.

        Args:
            seeds: equal seeds and weights give equal episodes.
            longest: steps after which an episode is cut.
        """
        state = self._rllib.learner_group.get_state(
            components="learner/rl_module", inference_only=True
        )["learner"]
        if self._runners is not None:
            pipelines = ["env_to_module_connector", "module_to_env_connector"]
            state = {**state, **self._rllib.env_runner.get_state(components=pipelines)}
        return self._player.play(state, seeds, longest)

    def state(self, replay: bool = True) -> dict[str, Any]:
        """Returns all that ``load`` needs, as a tree of arrays and JSON values.

        Args:
            replay: whether to keep the replay buffer, where there is one.
        """
        rllib = self._rllib
        learner = dict(rllib.learner_group.get_state()["learner"])
        del learner["should_module_be_updated"]
        runner = (
            None
            if self._runners is None
            else rllib.env_runner.get_state(not_components="rl_module")
        )
        buffer = rllib.local_replay_buffer if replay and rllib.offline_data is None else None
        (variables, *_) = _answers(rllib.learner_group.foreach_learner(_forgotten))
        tree = {
            "learner": learner,
            "variables": variables,
            "runner": runner,
            "metrics": rllib.metrics.get_state(),
            "replay": None if buffer is None else _without_infos(buffer.get_state()),
        }
        return cast("dict[str, Any]", to_plain(tree))

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores what ``state`` returned, on any number of actors.

        Learning rates and the like stay those of the configuration.
        """
        rllib, found = self._rllib, cast("dict[str, Any]", to_live(state))
        own = rllib.learner_group.get_state(components="learner/optimizer")["learner"]["optimizer"]
        for name, optimizer in found["learner"]["optimizer"].items():
            if name in own:
                optimizer["state"]["param_groups"] = own[name]["state"]["param_groups"]
        learner = {"learner": found["learner"]}
        if self._runners is None:
            rllib.learner_group.set_state(learner)
            rllib.metrics.set_state(found["metrics"])
        else:
            rllib.metrics.set_state(found["metrics"])
            rllib.set_state({"env_runner": found["runner"], "learner_group": learner})
        rllib.learner_group.foreach_learner(partial(_remember, values=found["variables"]))
        if found["replay"] is not None and rllib.local_replay_buffer is not None:
            rllib.local_replay_buffer.set_state(_with_infos(found["replay"]))


def metrics_of(result: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of one of RLlib's results under the platform's names."""
    sampled = result.get("env_runners", {})
    names = {"episode_return_mean": "train/return", "episode_len_mean": "train/episode_length"}
    found = {new: float(sampled[old]) for old, new in names.items() if old in sampled}
    metrics = {name: value for name, value in found.items() if not math.isnan(value)}
    modules = {
        module: numbers
        for module, numbers in result.get("learners", {}).items()
        if not module.startswith("__")  # sums over all modules
    }
    for module, numbers in modules.items():
        prefix = "train" if len(modules) == 1 else f"train/{module}"
        for name, value in numbers.items():
            if name.startswith(_BOOKKEEPING) or name.endswith("throughput"):
                continue
            if np.ndim(value) == 0:
                metrics[f"{prefix}/{name}"] = float(value)
    return metrics


@contextmanager
def _quiet() -> Generator[None]:
    """Keeps back the warning that each of RLlib's runners gives to the one before it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Overriding environment rllib", UserWarning)
        yield


def _hosted(kind: Any, layout: Layout) -> Any:  # noqa: ANN401 - classes of RLlib
    """Returns the algorithm's class, which RLlib lets go on for ever, with deadlines."""

    class Hosted(kind):
        taken, since = -1.0, 0.0
        """Environment steps so far, and when there were fewer."""

        def restore_env_runners(self, env_runner_group: Any) -> list[int]:  # noqa: ANN401 - RLlib's
            """Brings dead runners back, at least one of them; called before each training step."""
            runners, start = env_runner_group, time.monotonic()
            while True:
                restored = kind.restore_env_runners(self, runners)
                if not runners or not runners.num_remote_env_runners():
                    return restored
                if runners.num_healthy_remote_env_runners():
                    break
                if time.monotonic() > start + layout.start_deadline_s:
                    waited = f"within {layout.start_deadline_s:g} s"
                    raise ActorLost(f"no environment runner came back {waited}")
                time.sleep(_PROBE_PAUSE_S)
            taken = self.metrics.peek(_STEPS, default=0)
            if taken != self.taken:
                self.taken, self.since = taken, time.monotonic()
            elif time.monotonic() > self.since + layout.call_deadline_s:
                raise DeadlineExceeded(
                    f"waited {layout.call_deadline_s:g} s for the environment runners to take a "
                    "step; does the environment raise? RLlib logs why a runner left"
                )
            return restored

    Hosted.__name__ = kind.__name__  # RLlib asks for it
    return Hosted


def _reseed(_: object, seed: int) -> None:
    random.seed(seed % _SEEDS)
    np.random.seed(seed % _SEEDS)
    torch.manual_seed(seed)


def _renew(runner: Any, seed: int) -> None:  # noqa: ANN401 - runs inside RLlib's EnvRunner
    stream = derive(seed, "runner", runner.worker_index or 0)
    _reseed(runner, stream)
    runner._seed, runner._needs_initial_reset = stream % _SEEDS, True  # its next reset's


def _answers(results: Any) -> list[Any]:  # noqa: ANN401 - RLlib's RemoteCallResults
    return [answer.get() for answer in results]


def _forgotten(learner: Any) -> dict[str, dict[str, Any]]:  # noqa: ANN401 - RLlib's Learner
    return {
        name: {
            module: value.detach().cpu().numpy()
            for module, value in getattr(learner, name).items()
            if isinstance(value, torch.Tensor)
        }
        for name in _FORGOTTEN
        if hasattr(learner, name)
    }


def _remember(learner: Any, values: Mapping[str, Mapping[str, Any]]) -> None:  # noqa: ANN401
    for name, modules in values.items():
        for module, value in modules.items():
            getattr(learner, name)[module].data.copy_(torch.as_tensor(value))


def _without_infos(replay: dict[str, Any]) -> dict[str, Any]:
    """Drops what environments said beside their observations: nothing is learnt from it."""
    for episode in replay["episodes"]:
        if "infos" in episode:  # not so where several agents play
            episode["infos"] = {**episode["infos"], "data": len(episode["infos"]["data"])}
    return replay


def _with_infos(replay: dict[str, Any]) -> dict[str, Any]:
    for episode in replay["episodes"]:
        if "infos" in episode:
            episode["infos"]["data"] = [{} for _ in range(episode["infos"]["data"])]
    return replay
