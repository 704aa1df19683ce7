"""The losses of LMRL-Gym's methods as pure functions.

Shapes: ``M`` tokens of actions on a flat axis, episode by episode in the order of time, so that
entry m + 1 is the state after token m; ``V`` vocabulary. A loss is a sum over tokens weighted by
their *shares* of the whole batch, so that those of micro-batches and of ranks add up; the share of
a token that does not count is 0. γ is a token's discount.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 (PyTorch's own name for it)
from jaxtyping import Bool, Float, Int
from scipy import signal
from torch import Tensor

Reals = npt.NDArray[np.float64]


def imitation_loss(
    log_probs: Float[Tensor, " M"], shares: Float[Tensor, " M"]
) -> Float[Tensor, ""]:
    """Returns the cross-entropy of the actions, in nats a token: BC and its filtered kin."""
    return -(shares * log_probs).sum()


def expectile_loss(
    values: Float[Tensor, " M"], targets: Float[Tensor, " M"], tau: float
) -> Float[Tensor, " M"]:
    """Returns |τ - 1(u < 0)| u² / 2 with u = target - value, for each token.

    τ = 1/2 gives a quarter of the squared error; towards 1 the largest target wins.
    """
    error = targets - values
    weight = torch.where(error >= 0, tau, 1 - tau)
    return weight * error.square() / 2


def next_values(values: Float[Tensor, " M"], ended: Bool[Tensor, " M"]) -> Float[Tensor, " M"]:
    """Returns the value of the state after each token; 0 where the game ended."""
    following = torch.cat([values[1:], values.new_zeros(1)])
    return following.masked_fill(ended, 0.0)


@dataclass(frozen=True, slots=True)
class TokenValues:
    """A critic's values at each token that was said."""

    q1: Float[Tensor, " M"]
    q2: Float[Tensor, " M"]
    v: Float[Tensor, " M"]
    cql: Float[Tensor, " M"]
    """Σ over both Q of -log softmax(Q)(said token): keeps Q near the data (the CQL term)."""

    @classmethod
    def of(
        cls,
        heads: dict[str, Float[Tensor, "D _"]],
        said: Int[Tensor, " D"],
        where: Int[Tensor, " M"],
    ) -> TokenValues:
        """Picks the values of said tokens from those of ``D`` distinct ones."""

        def picked(q: Tensor) -> Tensor:
            return q.gather(1, said[:, None]).squeeze(1)[where]

        q1, q2 = heads["q1"], heads["q2"]
        cql = F.cross_entropy(q1, said, reduction="none") + F.cross_entropy(
            q2, said, reduction="none"
        )
        return cls(picked(q1), picked(q2), heads["v"].squeeze(1)[where], cql[where])


def mc_loss(
    found: TokenValues,
    returns: Float[Tensor, " M"],
    shares: Float[Tensor, " M"],
    cql_weight: float,
) -> Float[Tensor, ""]:
    """Returns the loss of Monte-Carlo returns: Q and V regress on the return to go, plus CQL."""
    errors = [(value - returns).square() / 2 for value in (found.q1, found.q2, found.v)]
    return (shares * (sum(errors) + cql_weight * found.cql)).sum()


@dataclass(frozen=True, slots=True)
class IlqlLoss:
    """Numbers of ILQL's loss: both Q regress on r + γ V(s'), V on an expectile of min Q'."""

    discount: float
    """Of the next state, a token."""
    expectile: float
    """τ."""
    cql_weight: float

    def __call__(
        self,
        found: TokenValues,
        target: TokenValues,
        rewards: Float[Tensor, " M"],
        ended: Bool[Tensor, " M"],
        shares: Float[Tensor, " M"],
    ) -> Float[Tensor, ""]:
        """Returns the loss.

        Args:
            found: of the critic that learns.
            target: Q' of its slow copy; carries no gradient.
            rewards: r.
            ended: whether s' is the end, whose value is 0.
            shares: of each token.
        """
        backup = rewards + self.discount * next_values(found.v.detach(), ended)
        q_errors = ((found.q1 - backup).square() + (found.q2 - backup).square()) / 2
        v_errors = expectile_loss(found.v, torch.minimum(target.q1, target.q2), self.expectile)
        return (shares * (q_errors + v_errors + self.cql_weight * found.cql)).sum()


def generalised_advantages(
    rewards: Reals, values: Reals, owners: npt.NDArray[np.int64], discount: float, decay: float
) -> Reals:
    """Returns GAE, Σ_k (γ λ)^k δ_{m+k} with δ_m = r_m + γ V_{m+1} - V_m, within whole episodes.

    Args:
        rewards: [M].
        values: V [M] of the state before each token; after an episode's last token it is 0.
        owners: the episode of each token, [M].
        discount: γ.
        decay: λ.
    """
    following = np.append(values[1:], 0.0)
    following[[edge - 1 for edge in edges_of(owners)[1:]]] = 0.0
    deltas = rewards + discount * following - values
    return discounted(deltas, owners, discount * decay)


def edges_of(owners: npt.NDArray[np.int64]) -> list[int]:
    """Returns where each run of equal entries begins, and the end of the last, ascending."""
    changes = np.flatnonzero(owners[1:] != owners[:-1]) + 1
    return [0, *changes.tolist(), len(owners)]


def discounted(values: npt.NDArray[Any], owners: npt.NDArray[np.int64], discount: float) -> Reals:
    """Returns Σ_k γ^k v_{m+k} within each run of equal ``owners``, [M]."""
    sums = np.empty(len(values))
    scan = cast("Any", signal).lfilter
    for start, stop in pairwise(edges_of(owners)):
        backwards = values[start:stop][::-1].astype(np.float64)
        sums[start:stop] = scan([1.0], [1.0, -discount], backwards)[::-1]
    return sums


def ppo_loss(
    log_probs: Float[Tensor, " M"],
    old_log_probs: Float[Tensor, " M"],
    gains: Float[Tensor, " M"],
    shares: Float[Tensor, " M"],
    clip: float,
) -> Float[Tensor, ""]:
    """Returns PPO's clipped loss, -Σ min(ρ A, clip(ρ, 1 - ε, 1 + ε) A), ρ = π / π_old."""
    ratio = (log_probs - old_log_probs).exp()
    bounded = ratio.clamp(1 - clip, 1 + clip)
    return -(shares * torch.minimum(ratio * gains, bounded * gains)).sum()
