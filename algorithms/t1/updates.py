"""One supervised step and one policy update, over passes and ranks.

Shapes: ``N`` sequences of this rank, ``T`` tokens, ``M`` answer tokens of a pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from algorithms.t1.batches import Batch, Pass, dealt, micro_batches, passes
from algorithms.t1.model import TokenScorer
from algorithms.t1.objective import (
    PolicyLoss,
    advantages,
    informative_groups,
    sum_by_answer,
    supervised_loss,
    update_anchor,
)
from algorithms.t1.penalties import (
    penalised_rewards,
    perplexities,
    repeats_ngram,
)
from algorithms.t1.scores import TokenScores
from algorithms.t1.tasks import Bools, Ints, to_tensors
from algorithms.t1.verifier import Reason
from algorithms.t1.workload import T1Recipe
from heliostat import Run
from heliostat.learner import Learner

Policy = Learner[TokenScorer]


def supervised_step(
    run: Run[T1Recipe], policy: Policy, traces: tuple[Ints, Bools], step: int
) -> dict[str, float]:
    """Takes one step on the cross-entropy of the answers (the cold start of section 2).

    Args:
        run: this rank's run.
        policy: the learner.
        traces: (tokens [N, T] with ``PADDING`` on the right, bool [N, T] marking the answers),
            this rank's share of the batch.
        step: supervised steps done before this one, for the rate.

    Returns:
        Loss in nats a token over all ranks, rate and gradient norm.
    """
    recipe = run.recipe
    tokens, real = to_tensors(traces[0])
    answer = torch.from_numpy(traces[1])
    total = run.sum(float(answer.sum()))
    loss = 0.0
    for rows in micro_batches(run, real.sum(dim=1)):
        with policy.autocast():
            scores = policy.forward(tokens[rows].to(run.device), answer[rows].to(run.device))
            part = supervised_loss(scores.log_probs, total / run.world)
        policy.backward(part)
        loss += float(part.detach())
    rate = warm_cosine(step, recipe.sft_steps, recipe.sft_warm_steps)
    norm = policy.step(rate, recipe.max_norm)
    run.count("samples", len(tokens))
    run.count("tokens", float(real.sum()))
    return {"sft/loss": run.sum(loss) / run.world, "sft/rate": rate, "sft/gradient_norm": norm}


def warm_cosine(step: int, steps: int, warm: float, floor: float = 0.01) -> float:
    """Returns the share of the peak rate: linear up to ``warm`` steps, then cosine to ``floor``."""
    if step < warm:
        return (step + 1) / (warm + 1)
    done = (step - warm) / max(1.0, steps - warm)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))


def policy_update(
    run: Run[T1Recipe], policy: Policy, anchor: TokenScorer, batch: Batch, update: int
) -> dict[str, float]:
    """Takes one step on the group policy gradient (T1, section 3) and moves the anchor.

    R_i = LOO(r')_i - β LOO(k)_i,  L = -E[R_i Σ_t log π(y_t)] - α E[H_t],  π_ref ← d π_ref + (1-d) π

    Args:
        run: this rank's run.
        policy: the learner of π.
        anchor: π_ref, changed in place.
        batch: the answers of this rank's samplers.
        update: updates done before this one, for the rate.

    Returns:
        Means over the answers of all ranks; ``train/drift`` is the largest difference between a
        token's log-probability now and when it was sampled.
    """
    recipe = run.recipe
    everything, batch = batch, dealt(run, batch)
    parts = passes(run, batch)
    references = _references(run, policy, anchor, parts)
    judged = _judged(recipe, batch, parts, references)
    objective = _objective(recipe)
    gains, shares = judged.advantages.to(run.device), _shares(run, objective, batch)
    entropy = drift = cut = torch.zeros((), device=run.device)
    for part, reference in zip(parts, references, strict=True):
        with policy.autocast():
            scores = _scored(run, policy.forward, part)
        log_probs = scores.log_probs
        gain, share = gains[part.owners].to(log_probs), shares[part.owners].to(log_probs)
        loss = objective(log_probs, scores.entropies, part.sampled, gain, share, reference)
        policy.backward(loss)
        counted = share > 0
        with torch.no_grad():
            entropy = entropy + scores.entropies[counted].sum()
            apart = (log_probs - part.sampled).where(counted, 0.0)
            drift = torch.maximum(drift, apart.abs().max())
            cut = cut + (objective.is_cut(log_probs, part.sampled) & counted).sum()
    rate = warm_cosine(update, recipe.steps, recipe.warm_updates, recipe.final_rate)
    norm = policy.step(rate, recipe.max_norm)
    if (update + 1) % recipe.anchor_every == 0:
        move_anchor(policy, anchor, recipe.anchor_decay)
    run.count("samples", len(everything.lengths))
    run.count("tokens", float(everything.lengths.sum()))
    tokens = max(run.sum(float(batch.lengths[batch.graded].sum())), 1)
    return {
        **_means(run, everything),
        **_learned(run, batch, judged),
        "train/entropy": run.sum(float(entropy)) / tokens,
        "train/cut_tokens": run.sum(float(cut)) / tokens,
        "train/drift": run.largest(float(drift)),
        "train/gradient_norm": norm,
    }


def move_anchor(policy: Policy, anchor: TokenScorer, decay: float) -> None:
    """Moves an anchor made by ``Run.frozen`` towards the policy, however ranks share the two."""
    update_anchor(*policy.pairs(anchor), decay)


def _scored(run: Run[T1Recipe], scorer: Callable[..., TokenScores], part: Pass) -> TokenScores:
    return scorer(part.tokens, part.chosen, run.recipe.temperature, part.groups)


def _references(
    run: Run[T1Recipe], policy: Policy, anchor: TokenScorer, parts: Sequence[Pass]
) -> Sequence[Tensor | None]:
    """Returns log π_ref of the answer tokens of each pass, or nothing where it plays no part."""
    recipe = run.recipe
    if (recipe.kl == "none" or recipe.beta == 0) and "garbage" not in recipe.penalise:
        return [None] * len(parts)
    with torch.no_grad(), policy.autocast():
        return [_scored(run, anchor, part).log_probs for part in parts]


@dataclass(frozen=True, slots=True)
class _Judged:
    """What the answers earn, [N] each."""

    rewards: Float[Tensor, " N"]
    """r', after penalties."""
    penalised: Bool[Tensor, " N"]
    log_ratios: Float[Tensor, " N"]
    """k, 0 where the anchor plays no part."""
    advantages: Float[Tensor, " N"]
    """R."""


def _judged(
    recipe: T1Recipe, batch: Batch, parts: Sequence[Pass], references: Sequence[Tensor | None]
) -> _Judged:
    """Penalises unwanted patterns and turns rewards and the KL into advantages."""
    anchored = log_ratios = torch.zeros(len(batch.lengths))
    for part, reference in zip(parts, references, strict=True):
        if reference is not None:
            sums = [
                sum_by_answer(values.double(), part.owners, len(batch.lengths)).cpu()
                for values in (reference, part.sampled - reference)
            ]
            anchored, log_ratios = anchored + sums[0], log_ratios + sums[1]
    penalised = _penalised(recipe, batch, anchored)
    rewards = penalised_rewards(batch.rewards, penalised)
    gains = advantages(
        batch.grouped(rewards),
        batch.grouped(log_ratios).float(),
        recipe.beta if recipe.kl == "reward" else 0.0,
        recipe.advantage,
        batch.grouped(batch.graded),
    )
    return _Judged(rewards, penalised, log_ratios, gains.flatten())


def _penalised(recipe: T1Recipe, batch: Batch, anchored: Tensor) -> Tensor:
    """Tells which answers show a pattern that is switched on; the others cost nothing."""
    shown = torch.zeros_like(batch.finished)
    if "overlong" in recipe.penalise:
        shown = shown | ~batch.finished
    if "repetition" in recipe.penalise:
        places = torch.arange(batch.tokens.shape[1])
        start = batch.answer.int().argmax(dim=1, keepdim=True)
        answers = batch.tokens.gather(1, (places + start).clamp(max=len(places) - 1))
        repeats = repeats_ngram(answers, batch.lengths, recipe.ngram, recipe.ngram_repeats)
        shown = shown | batch.repetitive | repeats
    if "garbage" in recipe.penalise:
        shown = shown | (perplexities(anchored, batch.lengths) > recipe.garbage_perplexity)
    return shown


def _objective(recipe: T1Recipe) -> PolicyLoss:
    return PolicyLoss(
        entropy_coef=recipe.entropy_coef,
        kl_coef=recipe.beta if recipe.kl == "loss" else 0.0,
        norm=recipe.loss_norm,
        constant_tokens=recipe.max_new_tokens,
        importance=recipe.importance,
        importance_cap=recipe.importance_cap,
        clip_low=recipe.clip_low,
        clip_high=recipe.clip_high,
    )


def _shares(run: Run[T1Recipe], objective: PolicyLoss, batch: Batch) -> Tensor:
    """Returns the share of each answer's tokens in the loss of all ranks, whose mean is taken."""
    tokens = run.sum(float(batch.lengths[batch.graded].sum()))
    answers = run.sum(float(batch.graded.sum()))
    shares = objective.token_shares(batch.lengths, tokens, answers)
    return (shares * batch.graded * run.world).to(run.device)


def _means(run: Run[T1Recipe], batch: Batch) -> dict[str, float]:
    """Returns means over all graded answers that were sampled, of all ranks."""
    graded = batch.graded
    mixed = informative_groups(batch.grouped(batch.rewards), batch.grouped(graded))
    values = {
        "train/accuracy": batch.rewards[graded],
        "train/false_claims": batch.false_claims[graded],
        "train/overlong": ~batch.finished,
        "train/length": batch.lengths,
        "train/mixed_groups": mixed,
        "train/graded": graded,
        **{f"verifier/{reason.name.lower()}": batch.reasons == reason for reason in Reason},
    }
    return {name: _mean(run, value) for name, value in values.items()}


def _learned(run: Run[T1Recipe], batch: Batch, judged: _Judged) -> dict[str, float]:
    """Returns means over the answers that the step learned from, of all ranks."""
    learned = batch.graded
    if run.sum(float(learned.sum())) == 0:  # nothing differed: show what there was
        learned = torch.ones_like(learned)
    values = {
        "train/reward": judged.rewards,
        "train/penalised": judged.penalised,
        "train/kl": judged.log_ratios,
    }
    return {name: _mean(run, value[learned]) for name, value in values.items()}


def _mean(run: Run[T1Recipe], values: Tensor) -> float:
    return run.sum(float(values.double().sum())) / max(run.sum(len(values)), 1)
