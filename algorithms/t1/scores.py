"""From logits to the log-probabilities and entropies that learning needs, with a short backward."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

# pyright: reportIncompatibleMethodOverride=false
# once_differentiable makes the parameters of a backward position-only.


class TokenScores(NamedTuple):
    """Scores of ``M`` chosen tokens under the policy at the asked temperature, in nats."""

    log_probs: Float[Tensor, " M"]
    """log π(y_t | x, y_<t)."""
    entropies: Float[Tensor, " M"]
    """H(π(· | x, y_<t)) of the whole distribution at the token's place."""


def token_scores(
    logits: Float[Tensor, "M V"], targets: Int[Tensor, " M"], temperature: float
) -> TokenScores:
    """Scores the targets; float16 and bfloat16 logits are raised to float32 first.

    Args:
        logits: Of the tokens before the targets.
        targets: Token indices in [0, V).
        temperature: Divides the logits, > 0.
    """
    if logits.dtype in {torch.float16, torch.bfloat16}:
        logits = logits.float()
    scaled = logits if temperature == 1.0 else logits / temperature
    return TokenScores(*cast("tuple[Tensor, Tensor]", _Scores.apply(scaled, targets)))


def dot(one: Float[Tensor, "M V"], other: Float[Tensor, "M V"]) -> Float[Tensor, " M"]:
    """Returns the inner product of each row with the other's, without their product in between."""
    return cast("Tensor", torch.linalg.vecdot(one, other))


class _Scores(torch.autograd.Function):
    """log p_y and H(p) of softmax(z) together; keeps log p alone for the backward pass.

    ∂/∂z_v of (a log p_y + b H) is a (1[v = y] - p_v) - b p_v (log p_v + H).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        log_p = torch.log_softmax(logits, dim=-1)
        entropies = -dot(log_p.exp(), log_p)
        ctx.save_for_backward(log_p, targets, entropies)
        return log_p.gather(1, targets[:, None]).squeeze(1), entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        log_prob_grads, entropy_grads = gradients
        log_p, targets, entropies = ctx.saved_tensors
        pull = -log_prob_grads - entropy_grads * entropies
        gradient = torch.addcmul(pull[:, None], log_p, entropy_grads[:, None], value=-1)
        gradient = gradient.mul_(log_p.exp())
        return gradient.scatter_add_(1, targets[:, None], log_prob_grads[:, None]), None
