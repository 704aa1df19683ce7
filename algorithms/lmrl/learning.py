"""What learns: a policy, a critic, its slow target, and the policy that imitation left behind."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import torch

from algorithms.lmrl.model import Critic, Policy, adamw, agent
from algorithms.lmrl.workload import LmrlRecipe
from heliostat import Run, Weights
from heliostat.learner import full_state, load_full_state


class Learning:
    """The models of one rank."""

    def __init__(self, run: Run[LmrlRecipe], vocabulary: int) -> None:
        recipe = run.recipe
        self._recipe = recipe
        models = agent(recipe, vocabulary, run.seed("model"))
        critic = models.critic or _critic(recipe, vocabulary, run.seed("critic"))
        self.policy = run.learner(models.policy, adamw(recipe.bc_lr))
        self.critic = run.learner(critic, adamw(recipe.bc_lr))
        self.reference: Policy = deepcopy(self.policy.model).requires_grad_(requires_grad=False)
        """π_BC, from the end of imitation on."""
        self.target: Critic = deepcopy(self.critic.model).requires_grad_(requires_grad=False)

    def begin(self) -> None:
        """Begins the method's own part: critic, target and reference from what imitation left."""
        recipe = self._recipe
        load_full_state(self.critic.model.trunk, full_state(self.policy.model.trunk))
        self.reference = deepcopy(self.policy.model).requires_grad_(requires_grad=False)
        self.target = deepcopy(self.critic.model).requires_grad_(requires_grad=False)
        self._restart(recipe)

    def _restart(self, recipe: LmrlRecipe) -> None:
        if recipe.method not in ("bc", "filtered_bc"):
            self.policy.restart(adamw(recipe.lr))
            self.critic.restart(adamw(recipe.lr if recipe.extracts else recipe.value_lr))

    @torch.no_grad()
    def follow(self) -> None:
        """Moves the target towards the critic: θ' ← (1 - p) θ' + p θ."""
        pairs = zip(self.target.parameters(), self.critic.model.parameters(), strict=True)
        for slow, fast in pairs:
            slow.lerp_(fast, self._recipe.polyak)

    def weights(self, step: int) -> Weights:
        """Snapshots what plays: the policy, and for MC and ILQL the target critic and β."""
        policy = dict(self.policy.weights(step).arrays())
        arrays = {f"policy.{name}": array for name, array in policy.items()}
        beta = 0.0
        if self._recipe.extracts:
            critic = Weights.of_tensors(self.target.state_dict(), step)
            arrays |= {f"critic.{name}": array for name, array in critic.arrays()}
            beta = self._recipe.beta if step > self._recipe.bc_steps else 0.0
        return Weights.of({"beta": np.array([beta], np.float32), **arrays}, step)

    def state(self, step: int) -> dict[str, Any]:
        """Returns the models for the checkpoint; those of the method's own part from its start."""
        state: dict[str, Any] = {"policy": self.policy.state()}
        if step > self._recipe.bc_steps:
            state["critic"] = self.critic.state()
            state["target"] = full_state(self.target)
            state["reference"] = full_state(self.reference)
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Restores what ``state`` returned."""
        if "critic" in state:
            self._restart(self._recipe)
            self.critic.load(state["critic"])
            load_full_state(self.target, state["target"])
            load_full_state(self.reference, state["reference"])
        self.policy.load(state["policy"])


def _critic(recipe: LmrlRecipe, vocabulary: int, seed: int) -> Critic:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Critic(recipe, vocabulary)
