"""The equations of a group policy gradient as pure functions; T1 (arXiv 2501.11651) is one choice.

Shapes: ``P`` prompts with ``K`` answers each; ``N = P * K`` answers; ``M`` answer tokens on one
flat axis, answer by answer, with ``owners[m]`` the answer of token m. Symbols: r reward, r' reward
after penalties, k log-ratio to the anchor, R advantage, π_θ the policy, π_ref the anchor, μ the
policy that sampled, ρ = π_θ / μ. A bool ``counted`` marks the answers that take part: one whose
reward is unknown does not, and its values, NaN among them, change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Advantage = Literal["rloo", "grpo", "reinforce"]
Importance = Literal["truncated", "clipped", "none"]
LossNorm = Literal["token", "sequence", "constant"]

_SMALL = 1e-6
"""Added to a group's standard deviation before it divides."""


def leave_one_out(
    values: Float[Tensor, "P K"], counted: Bool[Tensor, "P K"] | None = None
) -> Float[Tensor, "P K"]:
    """Subtracts from each value the mean of the *other* counted values of its group.

    LOO(v)_i = v_i - 1/(n-1) Σ_{j≠i} v_j = n/(n-1) (v_i - mean(v)) with n counted values; a group
    sums to 0. Uncounted values give 0, and so does a group with fewer than two counted.

    Raises:
        ValueError: A group has fewer than two values.
    """
    seen, means, count = _group_means(values, counted)
    return (values - means).where(seen, 0.0) * (count / (count - 1).clamp(min=1))


def group_advantages(
    kind: Advantage,
    rewards: Float[Tensor, "P K"],
    counted: Bool[Tensor, "P K"] | None = None,
) -> Float[Tensor, "P K"]:
    """Returns the advantage A of each answer from the rewards r' of its group.

    "rloo": LOO(r'), unbiased, of least variance among baselines without a critic (T1). "grpo":
    (r' - mean) / (s + 1e-6) with the group's sample deviation s (arXiv 2402.03300), which weighs
    nearly solved and nearly hopeless prompts up. "reinforce": r' itself. Uncounted answers get 0.

    Raises:
        ValueError: A group has fewer than two values.
    """
    if kind == "rloo":
        return leave_one_out(rewards, counted)
    seen, means, count = _group_means(rewards, counted)
    if kind == "reinforce":
        return rewards.where(seen, 0.0)
    apart = (rewards - means).where(seen, 0.0)
    variance = apart.square().sum(dim=1, keepdim=True) / (count - 1).clamp(min=1)
    return apart / (variance.sqrt() + _SMALL)


def _group_means(
    values: Float[Tensor, "P K"], counted: Bool[Tensor, "P K"] | None
) -> tuple[Bool[Tensor, "P K"], Float[Tensor, "P 1"], Float[Tensor, "P 1"]]:
    """Returns (what is counted, means over it, how many that are)."""
    if values.shape[1] < 2:
        raise ValueError(
            f"expected at least 2 answers a prompt, found K={values.shape[1]}: there is no other "
            "answer to compare with; raise answers_per_prompt"
        )
    seen = torch.ones_like(values, dtype=torch.bool) if counted is None else counted
    count = seen.sum(dim=1, keepdim=True).to(values.dtype)
    means = values.where(seen, 0.0).sum(dim=1, keepdim=True) / count.clamp(min=1)
    return seen, means, count


def advantages(
    rewards: Float[Tensor, "P K"],
    log_ratios: Float[Tensor, "P K"],
    beta: float,
    kind: Advantage = "rloo",
    counted: Bool[Tensor, "P K"] | None = None,
) -> Float[Tensor, "P K"]:
    """Combines the advantage with the KL term, centred over the other answers (T1, section 3).

    R_i = A_i - β LOO(k)_i, with k_i = log π_θ(y_i|x) - log π_ref(y_i|x). For "rloo" it equals
    LOO(r' - βk)_i, sums to 0 in each group and ignores constants added to r' or to k.

    Args:
        rewards: r', after penalties.
        log_ratios: k, sums over the tokens of an answer, in nats; carries no gradient.
        beta: β ≥ 0; 0 where the KL is not part of the reward.
        kind: Of the advantage.
        counted: Answers that take part; None for all.
    """
    return group_advantages(kind, rewards, counted) - beta * leave_one_out(log_ratios, counted)


def informative_groups(
    rewards: Float[Tensor, "P K"], counted: Bool[Tensor, "P K"] | None = None
) -> Bool[Tensor, " P"]:
    """Tells which prompts' answers differ in reward: the others carry no policy gradient.

    Args:
        rewards: r, before or after penalties.
        counted: Answers that take part; None for all.
    """
    seen = torch.ones_like(rewards, dtype=torch.bool) if counted is None else counted
    best = rewards.where(seen, -torch.inf).amax(dim=1)
    return best > rewards.where(seen, torch.inf).amin(dim=1)


def importance_weights(
    log_probs: Float[Tensor, " M"], sampler_log_probs: Float[Tensor, " M"], cap: float
) -> Float[Tensor, " M"]:
    """Corrects tokens drawn from older weights: w_t = min(π_θ(y_t) / μ(y_t), cap).

    Truncated importance sampling; both log-probabilities are at the sampling temperature. The
    weights carry no gradient and are 1 for a sampler that is up to date.

    Args:
        log_probs: Under the weights that learn.
        sampler_log_probs: As the sampler recorded them.
        cap: Largest weight, ≥ 1.
    """
    return (log_probs.detach() - sampler_log_probs).exp().clamp(max=cap)


def kl_estimates(
    log_probs: Float[Tensor, " M"], references: Float[Tensor, " M"]
) -> Float[Tensor, " M"]:
    """Returns k2 = ½ (log π_θ(y_t) - log π_ref(y_t))², the KL of a token for use *in a loss*.

    Over tokens of the policy, the gradient of k2 has the mean ∇KL(π_θ‖π_ref). That of the unbiased
    k1 = log π_θ - log π_ref has the mean 0, and that of GRPO's k3 = π_ref/π_θ - 1 + k1 the mean
    ∇KL(π_ref‖π_θ): right estimates of the value, but not of this gradient.
    """
    return 0.5 * (log_probs - references).square()


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """Numbers of the policy-gradient loss.

    Attributes:
        entropy_coef: α ≥ 0 of the entropy bonus.
        kl_coef: β ≥ 0 of the KL in the loss; 0 where it is in the reward, or nowhere.
        norm: What the sum over tokens is divided by: all tokens ("token"), the tokens of the
            answer, then the answers ("sequence"), or answers * ``constant_tokens`` ("constant").
        constant_tokens: The divisor of an answer under "constant".
        importance: How stale tokens are corrected: weights cut at ``importance_cap``
            ("truncated"), PPO's two-sided clip ("clipped"), not at all ("none").
        importance_cap: Largest weight under "truncated".
        clip_low: A token's ratio pulls it down no further than to 1 - ``clip_low`` ("clipped").
        clip_high: And up no further than to 1 + ``clip_high``.
    """

    entropy_coef: float
    kl_coef: float = 0.0
    norm: LossNorm = "token"
    constant_tokens: float = 1.0
    importance: Importance = "truncated"
    importance_cap: float = 2.0
    clip_low: float = 0.2
    clip_high: float = 0.2

    def __call__(
        self,
        log_probs: Float[Tensor, " M"],
        entropies: Float[Tensor, " M"],
        sampled: Float[Tensor, " M"],
        token_advantages: Float[Tensor, " M"],
        token_shares: Float[Tensor, " M"],
        references: Float[Tensor, " M"] | None = None,
    ) -> Float[Tensor, ""]:
        """Returns L = -Σ_m s_m (gain_m + α H_m - β KL_m); T1's gain is R_m log π_θ(y_m).

        The shares s come from ``token_shares`` of the *whole* batch, so that losses of micro-
        batches and of learner ranks add up to that of the batch.

        Args:
            log_probs: Differentiable, at the sampling temperature.
            entropies: Differentiable, nats.
            sampled: log μ(y_m), as the sampler recorded it.
            token_advantages: R of each token's answer.
            token_shares: s, non-negative.
            references: log π_ref(y_m); needed for a KL in the loss alone.

        Raises:
            ValueError: ``kl_coef`` is positive but there are no references.
        """
        value = self.gains(log_probs, sampled, token_advantages)
        if self.entropy_coef > 0:
            value = value + self.entropy_coef * entropies
        if self.kl_coef > 0:
            if references is None:
                raise ValueError(
                    f"expected the anchor's log-probabilities with kl_coef={self.kl_coef}, found "
                    "none; score the tokens under the anchor too"
                )
            value = value - self.kl_coef * kl_estimates(log_probs, references)
        return -(token_shares * value).sum()

    def gains(
        self,
        log_probs: Float[Tensor, " M"],
        sampled: Float[Tensor, " M"],
        token_advantages: Float[Tensor, " M"],
    ) -> Float[Tensor, " M"]:
        """Returns what the policy gradient ascends; on fresh samples its gradient is R ∇log π_θ.

        "truncated": sg(min(ρ, cap)) R log π_θ; "clipped": min(ρ R, clip(ρ) R) (arXiv 1707.06347,
        equation 7); "none": R log π_θ.
        """
        if self.importance == "none":
            return token_advantages * log_probs
        if self.importance == "truncated":
            weights = importance_weights(log_probs, sampled, self.importance_cap)
            return weights * token_advantages * log_probs
        ratios = (log_probs - sampled).exp()
        clipped = ratios.clamp(1 - self.clip_low, 1 + self.clip_high)
        return torch.minimum(ratios * token_advantages, clipped * token_advantages)

    def is_cut(
        self, log_probs: Float[Tensor, " M"], sampled: Float[Tensor, " M"]
    ) -> Bool[Tensor, " M"]:
        """Tells which tokens' ratios ρ lie outside the bounds of the importance correction."""
        ratios = (log_probs - sampled).exp()
        if self.importance == "clipped":
            return (ratios < 1 - self.clip_low) | (ratios > 1 + self.clip_high)
        return ratios > (self.importance_cap if self.importance == "truncated" else torch.inf)

    def token_shares(
        self, lengths: Int[Tensor, " N"], tokens: float, answers: float
    ) -> Float[Tensor, " N"]:
        """Returns the share s of each token of an answer.

        Args:
            lengths: Tokens of each answer, ≥ 1.
            tokens: Counted answer tokens of the whole batch, over all learner ranks.
            answers: Counted answers of the whole batch, over all learner ranks.
        """
        each = torch.ones(len(lengths), dtype=torch.float64)
        if self.norm == "token":
            return each / max(tokens, 1)
        if self.norm == "sequence":
            return each / (lengths * max(answers, 1))
        return each / (max(answers, 1) * self.constant_tokens)


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
