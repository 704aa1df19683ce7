"""The equations of T1 (arXiv 2501.11651, section 2) as pure functions.

Shapes: ``P`` prompts with ``K`` answers each; ``N = P * K`` answers; ``M`` answer tokens on one
flat axis, answer by answer, with ``owners[m]`` the answer of token m. Symbols: r reward, r' reward
after penalties, k log-ratio to the anchor, R advantage, π_θ the policy, π_ref the anchor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

LossNorm = Literal["token", "sequence", "constant"]


def leave_one_out(values: Float[Tensor, "P K"]) -> Float[Tensor, "P K"]:
    """Subtracts from each value the mean of the *other* values of its group.

    LOO(v)_i = v_i - 1/(K-1) Σ_{j≠i} v_j = K/(K-1) (v_i - mean(v)); a group sums to 0.

    Raises:
        ValueError: A group has fewer than two values.
    """
    size = values.shape[1]
    if size < 2:
        raise ValueError(
            f"expected at least 2 answers a prompt, found K={size}: there is no other answer to "
            "compare with; raise answers_per_prompt"
        )
    return (values - values.mean(dim=1, keepdim=True)) * (size / (size - 1))


def advantages(
    rewards: Float[Tensor, "P K"], log_ratios: Float[Tensor, "P K"], beta: float
) -> Float[Tensor, "P K"]:
    """Combines the RLOO advantage with the KL term, centred the same way ("KL normalisation").

    R_i = LOO(r')_i - β LOO(k)_i, with k_i = log π_θ(y_i|x) - log π_ref(y_i|x). It equals
    LOO(r' - βk)_i, sums to 0 in each group and ignores constants added to r' or to k.

    Args:
        rewards: r', after penalties.
        log_ratios: k, sums over the tokens of an answer, in nats; carries no gradient.
        beta: β ≥ 0.
    """
    return leave_one_out(rewards) - beta * leave_one_out(log_ratios)


def informative_groups(rewards: Float[Tensor, "P K"]) -> Bool[Tensor, " P"]:
    """Tells which prompts' answers differ in reward: the others carry no policy gradient.

    Args:
        rewards: r', after penalties.
    """
    return rewards.amax(dim=1) > rewards.amin(dim=1)


def penalised_rewards(
    rewards: Float[Tensor, " N"],
    patterns: Mapping[str, Bool[Tensor, " N"]],
    switched_on: Iterable[str],
    penalty: float = -1.0,
) -> Float[Tensor, " N"]:
    """Sets r' = ``penalty`` for answers that show an unwanted pattern, right or wrong.

    With rewards in {0, 1} a penalty teaches a policy that often shows the pattern to end early
    with a false claim (reward 0 beats -1): switch a pattern on when its base rate is below 5 %.

    Args:
        rewards: r.
        patterns: Which answers show each known pattern, by name.
        switched_on: Names of the patterns to penalise.
        penalty: The value given.

    Raises:
        ValueError: A name is not among ``patterns``.
    """
    shown = torch.zeros_like(rewards, dtype=torch.bool)
    for name in switched_on:
        if name not in patterns:
            raise ValueError(
                f"expected a penalty of {sorted(patterns)}, found {name!r}; correct its name"
            )
        shown = shown | patterns[name]
    return rewards.masked_fill(shown, penalty)


def repeats_ngram(
    tokens: Int[Tensor, "N L"], lengths: Int[Tensor, " N"], n: int, max_repeats: int
) -> Bool[Tensor, " N"]:
    """Tells which answers hold some n-gram more than ``max_repeats`` times, overlaps included.

    Args:
        tokens: Answers, padded on the right.
        lengths: Tokens of each answer before the padding.
        n: Length of the pattern, ≥ 1.
        max_repeats: Occurrences that are still fine, ≥ 1.

    Raises:
        ValueError: ``n`` or ``max_repeats`` is below 1.
    """
    if n < 1 or max_repeats < 1:
        raise ValueError(
            f"expected n ≥ 1 and max_repeats ≥ 1, found n={n}, max_repeats={max_repeats}; "
            "change the penalty's numbers"
        )
    places = tokens.shape[1] - n + 1
    if places <= max_repeats:
        return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    windows = tokens.unfold(1, n, 1).reshape(-1, n)
    grams = cast("Tensor", torch.unique(windows, dim=0, return_inverse=True)[1])
    # Windows that reach into the padding get numbers of their own, hence never repeat.
    place = torch.arange(places, device=tokens.device)
    inside = place + n <= lengths[:, None]
    ordered = torch.sort(grams.view(len(tokens), places).where(inside, -1 - place), dim=1)[0]
    return (ordered[:, max_repeats:] == ordered[:, :-max_repeats]).any(dim=1)


def importance_weights(
    log_probs: Float[Tensor, " M"], sampler_log_probs: Float[Tensor, " M"], cap: float
) -> Float[Tensor, " M"]:
    """Corrects tokens drawn from older weights: w_t = min(π_θ(y_t) / π_sampler(y_t), cap).

    Truncated importance sampling; both log-probabilities are at the sampling temperature. The
    weights carry no gradient and are 1 for a sampler that is up to date.

    Args:
        log_probs: Under the weights that learn.
        sampler_log_probs: As the sampler recorded them.
        cap: Largest weight, ≥ 1.
    """
    return (log_probs.detach() - sampler_log_probs).exp().clamp(max=cap)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """Numbers of the policy-gradient loss.

    Attributes:
        entropy_coef: α ≥ 0 of the entropy bonus.
        norm: What the sum over tokens is divided by: all tokens ("token"), the tokens of the
            answer, then the answers ("sequence"), or answers * ``constant_tokens`` ("constant").
        constant_tokens: The divisor of an answer under "constant".
    """

    entropy_coef: float
    norm: LossNorm = "token"
    constant_tokens: float = 1.0

    def __call__(
        self,
        log_probs: Float[Tensor, " M"],
        entropies: Float[Tensor, " M"],
        token_advantages: Float[Tensor, " M"],
        token_shares: Float[Tensor, " M"],
    ) -> Float[Tensor, ""]:
        """Returns L = -Σ_m s_m (R_m log π_θ(y_m) + α H_m), T1's objective as a loss.

        The shares s come from ``token_shares`` of the *whole* batch, so that losses of micro-
        batches and of learner ranks add up to that of the batch.

        Args:
            log_probs: Differentiable, at the sampling temperature.
            entropies: Differentiable, nats.
            token_advantages: R of each token's answer, times its importance weight.
            token_shares: s, non-negative.
        """
        bonus = self.entropy_coef * entropies
        return -(token_shares * (token_advantages * log_probs + bonus)).sum()

    def token_shares(self, lengths: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
        """Returns the share s of each token of an answer, from the lengths of the whole batch."""
        answers = lengths.float()
        if self.norm == "token":
            return torch.ones_like(answers) / answers.sum()
        if self.norm == "sequence":
            return 1 / (answers * len(answers))
        return torch.full_like(answers, 1 / (len(answers) * self.constant_tokens))


def sum_by_answer(
    values: Float[Tensor, " M"], owners: Int[Tensor, " M"], answers: int
) -> Float[Tensor, " N"]:
    """Sums token values over each answer: log π(y|x) from log π(y_t|x, y_<t)."""
    return values.new_zeros(answers).index_add(0, owners, values)


def supervised_loss(log_probs: Float[Tensor, " M"], total_tokens: float) -> Float[Tensor, ""]:
    """Returns -Σ_m log π_θ(y_m) / total_tokens: cross-entropy of the answer tokens, in nats.

    Args:
        log_probs: Of the answer tokens of a micro-batch.
        total_tokens: Answer tokens of the whole batch, so that micro-batches add up.
    """
    return -log_probs.sum() / total_tokens


@torch.no_grad()
def update_anchor(anchor: Iterable[Tensor], policy: Iterable[Tensor], decay: float) -> None:
    """Moves the anchor towards the policy, in place: θ_ref ← d θ_ref + (1 - d) θ.

    Args:
        anchor: Parameters of π_ref.
        policy: Parameters of π_θ, in the same order.
        decay: d in [0, 1]; 1 freezes the anchor, 0 copies the policy.

    Raises:
        ValueError: ``decay`` lies outside [0, 1], or the numbers of parameters differ.
    """
    if not 0 <= decay <= 1:
        raise ValueError(f"expected a decay in [0, 1], found {decay}; change anchor_decay")
    references, current = list(anchor), list(policy)
    if len(references) != len(current):
        raise ValueError(
            f"expected as many parameters in anchor and policy, found {len(references)} and "
            f"{len(current)}; build the anchor as a copy of the policy"
        )
    for reference, value in zip(references, current, strict=True):
        reference.lerp_(value, 1 - decay)
