"""LMRL-Gym as a workload: its numbers, its named recipes, its roles and its plots."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from heliostat import Layout, Plot, Recipe, Workload
from heliostat.errors import UsageError

Method = Literal["bc", "filtered_bc", "mc", "ilql", "ppo", "online_filtered_bc"]
GameName = Literal["maze_fo", "maze_po", "text_nav_fo", "text_nav_po", "wordle", "endgames"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LmrlRecipe(Recipe):
    """Numbers of LMRL-Gym; ``steps`` counts the method's own, after ``bc_steps`` of imitation."""

    game: GameName = "maze_fo"
    method: Method = "ilql"
    """``bc`` and ``filtered_bc`` spend ``steps`` on more imitation."""

    episodes: Annotated[int, Ge(1)] = 1240
    """Episodes of the data, played by the paper's behaviour policies."""
    data_seed: int = 0
    """Of the data, which the run's seed leaves as they are."""
    keep: Annotated[float, Ge(0), Le(1)] = 0.0
    """Share of the best episodes that the filtered methods imitate; 0 keeps those that succeed."""
    rows_per_chunk: Annotated[int, Ge(1)] = 8
    """Consecutive contexts of an episode that are drawn together."""
    history: Annotated[int, Ge(1)] = 10
    """Turns that a player of the partially observed maze remembers at least."""

    hidden: Annotated[int, Ge(32)] = 64
    """Width of the small Llama; a multiple of 32, the width of a head."""
    layers: Annotated[int, Ge(1)] = 2
    feed_forward: Annotated[int, Ge(1)] = 128

    bc_steps: Annotated[int, Ge(0)] = 200
    """Steps of imitation with which every method begins."""
    bc_lr: Annotated[float, Gt(0)] = 2e-3
    warm_steps: Annotated[int, Ge(1)] = 20
    """Steps over which a rate rises, at the start and where the method's own part begins."""
    batch: Annotated[int, Ge(1)] = 64
    """Chunks of data a step."""
    passes: Annotated[int, Ge(1)] = 1
    """Forward and backward passes into which a batch is cut; changes memory, not the numbers."""
    max_norm: Annotated[float, Gt(0)] = 1.0
    """Largest 2-norm of a gradient."""

    lr: Annotated[float, Gt(0)] = 1e-3
    """Rate of the method's own part."""
    discount: Annotated[float, Gt(0), Le(1)] = 0.99
    """Discount of the paper, for each token of an action."""
    beta: Annotated[float, Ge(0)] = 16.0
    """β of the extracted policy π_BC exp(β (Q - V))."""
    cql_weight: Annotated[float, Ge(0)] = 0.5
    """Weight of the cross-entropy that keeps Q near the data."""
    expectile: Annotated[float, Gt(0), Le(1)] = 0.99
    """τ of ILQL's V."""
    polyak: Annotated[float, Gt(0), Le(1)] = 0.05
    """Share of the critic that its target takes over after each step."""

    rollouts: Annotated[int, Ge(1)] = 64
    """Episodes of one online step."""
    rollouts_per_job: Annotated[int, Ge(1)] = 64
    """Episodes of one call to a player; how many players there are changes no number."""
    epochs: Annotated[int, Ge(1)] = 2
    """How often the rollouts of a step are learnt from."""
    minibatches: Annotated[int, Ge(1)] = 2
    """Optimiser steps an epoch."""
    gae_lambda: Annotated[float, Ge(0), Le(1)] = 0.95
    clip: Annotated[float, Gt(0)] = 0.2
    kl_coef: Annotated[float, Ge(0)] = 0.01
    """Weight of log π / π_BC, taken off each token's reward."""
    bc_weight: Annotated[float, Ge(0)] = 0.0
    """Weight of PPO's imitation of the data."""
    value_lr: Annotated[float, Gt(0)] = 1e-3
    """Rate of PPO's critic."""

    eval_every: Annotated[int, Ge(1)] = 100
    """Steps between two evaluations beside training."""
    eval_cases: Annotated[int, Ge(1)] = 25
    """Cases of each, of those that the game has."""
    eval_repeats: Annotated[int, Ge(1)] = 4
    """Episodes of a case."""
    test_cases: Annotated[int, Ge(1)] = 10_000
    """Cases of the scores after imitation and at the end."""
    test_repeats: Annotated[int, Ge(1)] = 8
    episodes_per_job: Annotated[int, Ge(1)] = 256
    """Episodes of one call to a judge."""

    @property
    def total_steps(self) -> int:
        """Steps of imitation and the method's own together."""
        return self.bc_steps + self.steps

    @property
    def extracts(self) -> bool:
        """Whether the method plays by a critic."""
        return self.method in ("mc", "ilql")

    def check(self) -> None:
        """Refuses what no run could do.

        Raises:
            UsageError: says which key, and what to do.
        """
        if self.hidden % 32:
            raise UsageError(f"hidden: expected a multiple of 32, found {self.hidden}")
        if self.layout.parallelism != "ddp":
            raise UsageError(
                f"layout.parallelism: expected ddp, found {self.layout.parallelism!r}; "
                "the critic begins as a copy of the policy, which shards cannot give"
            )
        ranks = max(1, self.layout.learners)
        jobs = -(-self.rollouts // self.rollouts_per_job)
        if self.method in ("ppo", "online_filtered_bc") and jobs < ranks:
            raise UsageError(
                f"rollouts_per_job: found {jobs} jobs of rollouts for {ranks} learners; "
                "lower it, each rank needs one"
            )
        if self.minibatches > min(self.rollouts, self.rollouts_per_job):
            raise UsageError(
                f"minibatches: expected at most the {min(self.rollouts, self.rollouts_per_job)} "
                f"episodes of a job, found {self.minibatches}; lower it"
            )
        share = self.batch // ranks
        if share < self.passes:
            raise UsageError(
                f"passes: expected at most {share}, a rank's chunks, found {self.passes}; lower it"
            )


_MAZE = LmrlRecipe(steps=800, checkpoint_every=200, layout=Layout.laptop(), lr=5e-4, polyak=0.02)
_WORDLE = replace(
    _MAZE,
    game="wordle",
    steps=300,
    episodes=20_000,
    keep=0.3,
    rows_per_chunk=1,
    hidden=96,
    feed_forward=256,
    bc_steps=600,
    bc_lr=3e-3,
    checkpoint_every=100,
    discount=1.0,
    beta=4.0,
    cql_weight=0.01,
    expectile=0.7,
    kl_coef=0.001,
    rollouts=256,
    rollouts_per_job=256,
    eval_cases=256,
    eval_repeats=1,
    test_repeats=2,
)
_PAPER = replace(
    _MAZE,
    steps=20_000,
    checkpoint_every=1000,
    layout=replace(Layout.cluster(), parallelism="ddp", min_learners=None),
    hidden=768,
    layers=12,
    feed_forward=3072,
    bc_steps=10_000,
    bc_lr=1e-4,
    batch=128,
    lr=1e-4,
    polyak=0.005,
    rollouts=512,
    minibatches=4,
    kl_coef=0.1,
    eval_every=1000,
    test_repeats=32,
)

WORKLOAD = Workload(
    name="lmrl",
    summary="Multi-turn text games: BC, filtered BC, MC returns, ILQL, PPO, online filtered BC.",
    paper="Abdulhai et al. 2023, LMRL-Gym (arXiv 2311.18232)",
    recipes={
        "maze": _MAZE,
        "maze-po": replace(_MAZE, game="maze_po"),
        "wordle": _WORDLE,
        "smoke": replace(
            _MAZE,
            layout=Layout.in_process(),
            bc_steps=60,
            steps=60,
            eval_every=30,
            test_repeats=2,
        ),
        "paper": _PAPER,
        "paper-wordle": replace(
            _PAPER,
            game="wordle",
            episodes=1_000_000,
            keep=0.3,
            rows_per_chunk=1,
            lr=3e-5,
            discount=1.0,
            beta=32.0,
            cql_weight=0.01,
            expectile=0.7,
            kl_coef=0.001,
            bc_weight=10.0,
            eval_cases=400,
            test_repeats=10,
        ),
    },
    train="algorithms.lmrl.train:train",
    roles={
        "trajectories": "algorithms.lmrl.roles:Trajectories",
        "players": "algorithms.lmrl.roles:Players",
        "judges": "algorithms.lmrl.roles:Judges",
    },
    spaces={
        "ilql": {
            "lr": "loguniform(1e-4, 3e-3)",
            "beta": "loguniform(1, 64)",
            "expectile": "choice(0.7, 0.9, 0.99)",
        }
    },
    score="eval/score",
    plots=(
        Plot(title="Normalised score", metrics=("eval/score",), level="bc_score"),
        Plot(title="Mean return of an episode", metrics=("eval/return",), level="bc_return"),
        Plot(title="Share of episodes that succeed", metrics=("eval/success",)),
        Plot(title="Loss", metrics=("train/loss",)),
    ),
)
