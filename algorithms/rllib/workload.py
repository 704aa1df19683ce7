"""RLlib's algorithms as one workload: a recipe for each, checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from heliostat import Layout, Plot, Recipe, Workload
from heliostat.errors import UsageError

ONLINE = ("ppo", "sac", "tqc", "dqn", "appo", "impala")
OFFLINE = ("bc", "marwil", "iql", "cql")
"""Algorithms that learn from recorded steps and play only to be evaluated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RllibRecipe(Recipe):
    """What RLlib's algorithms have in common; ``steps`` counts its training iterations.

    ``layout.environment.hosts`` are environment runners and ``layout.learners`` learners; with 0
    of either, the launching process does their work.
    """

    algorithm: Literal[
        "ppo", "sac", "tqc", "dqn", "appo", "impala", "bc", "marwil", "iql", "cql"
    ] = "ppo"
    env: str = "CartPole-v1"
    """Gymnasium's id, or ``package.module:factory`` of a gymnasium, PettingZoo (parallel) or RLlib
    multi-agent environment."""
    env_args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What the environment is made with."""
    policies: Literal["one", "shared", "separate"] = "one"
    """``one`` for a single agent; with several they share a policy or have one each."""
    envs: Annotated[int, Ge(1)] = 1
    """Copies of the environment that step together, over all runners."""
    normalise: bool = False
    """Whether observations are brought to mean 0 and deviation 1 by running statistics."""
    paths: ClassVar[tuple[str, ...]] = ("data",)

    data: str = ""
    """Folder of Parquet files for the offline algorithms, one row a step: ``eps_id``, ``obs``,
    ``actions``, ``rewards``, ``new_obs``, ``terminateds``, ``truncateds``. Read into memory."""

    updates: Annotated[int, Ge(2)] = 20
    """Batches of one iteration of an offline algorithm."""

    lr: Annotated[float, Gt(0)] = 3e-4
    """Learning rate of every network."""
    gamma: Annotated[float, Ge(0), Le(1)] = 0.99
    """Discount a step."""
    batch: Annotated[int, Ge(1)] = 256
    """Steps of one batch of each learner."""
    iteration_steps: Annotated[int, Ge(0)] = 0
    """Environment steps of an iteration at least; 0 takes the algorithm's own least, mostly one
    batch."""
    hidden: tuple[Annotated[int, Ge(1)], ...] = (64, 64)
    """Widths of the hidden layers."""
    activation: Literal["tanh", "relu", "silu"] = "tanh"
    model: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further fields of RLlib's ``DefaultModelConfig``, such as ``use_lstm``."""
    training: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further arguments of the algorithm's ``training()``, such as ``clip_param``."""
    keep_replay: bool = True
    """Whether checkpoints hold the replay buffer; without it a resumed run refills it."""

    eval_every: Annotated[int, Ge(1)] = 5
    """Iterations between two evaluations; the last iteration is always evaluated."""
    eval_episodes: Annotated[int, Ge(1)] = 10
    """Episodes of each, without exploration."""
    eval_seed: Annotated[int, Ge(0), Le(2**30)] = 1_000_000
    """Seed of the first episode; the others count on from it, in every run alike."""
    eval_longest: Annotated[int, Ge(1)] = 10_000
    """Steps after which an episode of an evaluation is cut."""
    target: float | None = None
    """Mean return of an evaluation at which the run ends; null runs all steps."""
    draw: bool = True
    """Whether the last evaluation draws its first episode."""

    def check(self) -> None:
        """Refuses unknown arguments, environments that cannot be made and data that is not there.

        Raises:
            UsageError: says which, and what to do.
        """
        self._check_layout()
        if (self.algorithm in OFFLINE) != bool(self.data):
            raise UsageError(
                f"data: expected a folder of Parquet files for {', '.join(OFFLINE)} and for no "
                f"other, found data={self.data!r} with algorithm={self.algorithm}"
            )
        from algorithms.rllib.config import check

        check(self)

    def _check_layout(self) -> None:
        layout, runners = self.layout, max(1, self.layout.environment.hosts)
        if self.envs % runners:
            raise UsageError(
                f"envs: expected a multiple of layout.environment.hosts={runners}, found "
                f"{self.envs}; each runner steps the same number"
            )
        if self.algorithm in OFFLINE and layout.learners:
            raise UsageError(
                f"layout.learners: expected 0 for {self.algorithm}, found {layout.learners}; "
                "offline algorithms learn in the launching process"
            )
        wanted = {"min_learners": None, "parallelism": "ddp", "precision": "float32"}
        for name, value in wanted.items():
            if getattr(layout, name) != value:
                raise UsageError(
                    f"layout.{name}: expected {value}, found {getattr(layout, name)}; "
                    "RLlib's learners know nothing else"
                )


_PPO = RllibRecipe(
    steps=60,
    checkpoint_every=10,
    envs=8,
    batch=2048,
    lr=1e-3,
    eval_every=2,
    eval_episodes=20,
    target=450.0,
    model={"vf_share_layers": False},
    training={
        "minibatch_size": 256,
        "num_epochs": 10,
        "lambda_": 0.95,
        "clip_param": 0.2,
        "vf_clip_param": 1e4,
        "use_kl_loss": False,
        "grad_clip": 0.5,
    },
)
_SAC = RllibRecipe(
    steps=200,
    checkpoint_every=20,
    algorithm="sac",
    env="Pendulum-v1",
    batch=64,
    lr=1e-3,
    iteration_steps=50,
    activation="relu",
    eval_every=10,
    target=-250.0,
    training={
        "tau": 0.01,
        "num_steps_sampled_before_learning_starts": 400,
        "replay_buffer_config": {"type": "EpisodeReplayBuffer", "capacity": 100_000},
    },
)
_DQN = replace(
    _SAC,
    algorithm="dqn",
    env="CartPole-v1",
    steps=300,
    iteration_steps=100,
    target=450.0,
    training={
        "epsilon": [[0, 1.0], [5000, 0.05]],
        "num_steps_sampled_before_learning_starts": 500,
    },
)
_IMPALA = replace(
    _PPO,
    algorithm="impala",
    batch=500,
    lr=5e-4,
    iteration_steps=2000,
    layout=Layout.laptop(),
    training={},
)
_BC = replace(_PPO, algorithm="bc", batch=1024, envs=1, target=None, training={})
_CQL = replace(_SAC, algorithm="cql", batch=256, iteration_steps=0, target=None, training={})

WORKLOAD = Workload(
    name="rllib",
    summary="RLlib's algorithms on any environment, online and offline, one agent or several.",
    paper="Liang et al. 2018, RLlib (arXiv 1712.09381); each algorithm's own in the README",
    recipes={
        "ppo": _PPO,
        "ppo-multi": replace(
            _PPO,
            env="ray.rllib.examples.envs.classes.multi_agent:MultiAgentCartPole",
            env_args={"num_agents": 2},
            policies="shared",
            target=900.0,
        ),
        "sac": _SAC,
        "tqc": replace(_SAC, algorithm="tqc"),
        "dqn": _DQN,
        "appo": replace(_IMPALA, algorithm="appo"),
        "impala": _IMPALA,
        "bc": _BC,
        "marwil": replace(_BC, algorithm="marwil"),
        "iql": replace(_CQL, algorithm="iql"),
        "cql": _CQL,
    },
    train="algorithms.rllib.train:train",
    brings_actors=True,
    spaces={
        "ppo": {
            "lr": "loguniform(1e-4, 3e-3)",
            "training.clip_param": "uniform(0.1, 0.3)",
            "training.entropy_coeff": "choice(0.0, 0.001, 0.01)",
        },
        "sac": {"lr": "loguniform(1e-4, 3e-3)", "batch": "choice(64, 128, 256)"},
    },
    score="eval/return",
    plots=(
        Plot(title="Return of an evaluation", metrics=("eval/return", "eval/worst_return")),
        Plot(title="Return while exploring", metrics=("train/return",)),
        Plot(title="Episode length", metrics=("train/episode_length", "eval/length")),
        Plot(title="Environment steps per second", metrics=("perf/env_steps_per_s",)),
        Plot(title="Loss", metrics=("train/total_loss",)),
    ),
)
