"""One supervised step and one policy update, over micro-batches and ranks.

Shapes: ``N`` sequences of this rank, ``T`` tokens, ``M`` answer tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from algorithms.t1.model import TokenScorer, TokenScores
from algorithms.t1.objective import (
    PolicyLoss,
    advantages,
    importance_weights,
    informative_groups,
    penalised_rewards,
    repeats_ngram,
    sum_by_answer,
    supervised_loss,
    update_anchor,
)
from algorithms.t1.tasks import PADDING, Bools, Ints, to_tensors
from algorithms.t1.workload import T1Recipe
from heliostat import Run
from heliostat.actors.environment import Episodes
from heliostat.learner import Learner

Policy = Learner[TokenScorer]
Array = npt.NDArray[Any]


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
    for rows, width in micro_batches(run, real.sum(dim=1)):
        inputs = tokens[rows, :width].to(run.device), answer[rows, :width].to(run.device)
        with policy.autocast():
            part = supervised_loss(policy.forward(*inputs).log_probs, total / run.world)
        policy.backward(part)
        loss += float(part.detach())
    rate = warm_cosine(step, recipe.sft_steps, recipe.sft_warm_steps)
    norm = policy.step(rate, recipe.max_norm)
    run.count("samples", len(tokens))
    run.count("tokens", float(real.sum()))
    return {"sft/loss": run.sum(loss) / run.world, "sft/rate": rate, "sft/gradient_norm": norm}


def micro_batches(run: Run[T1Recipe], lengths: Int[Tensor, " N"]) -> list[tuple[Tensor, int]]:
    """Splits rows into passes of similar length and about ``tokens_per_pass`` tokens.

    Args:
        run: tells the size of a pass; every rank gets equally many passes.
        lengths: tokens of each row.

    Returns:
        (row indices, longest row) of each pass, shortest rows first; no pass is empty.
    """
    order = torch.argsort(lengths, stable=True)
    below = torch.cumsum(lengths[order], dim=0)
    wanted = run.largest(math.ceil(int(below[-1]) / run.recipe.tokens_per_pass))
    fewest_rows = -run.largest(-len(order))
    count = int(min(wanted, fewest_rows))
    places = torch.arange(1, count)
    cuts = torch.searchsorted(below, below[-1] * places / count)
    # at least one row a pass: cut i lies behind cut i - 1 and leaves a row for each later pass
    cuts = torch.cummax((cuts - places).clamp(0, len(order) - count), dim=0).values + places
    return [(rows, int(lengths[rows].max())) for rows in torch.tensor_split(order, cuts)]


def warm_cosine(step: int, steps: int, warm: float, floor: float = 0.01) -> float:
    """Returns the share of the peak rate: linear up to ``warm`` steps, then cosine to ``floor``."""
    if step < warm:
        return (step + 1) / (warm + 1)
    done = (step - warm) / max(1.0, steps - warm)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True, slots=True)
class Batch:
    """Graded answers of one update: N = P * K rows, prompt by prompt."""

    tokens: Int[Tensor, "N T"]
    """Prompt and answer, then token 0."""
    answer: Bool[Tensor, "N T"]
    """Marks the answer's tokens, its end included."""
    sampled: Float[Tensor, "N T"]
    """Log-probabilities as the sampler recorded them, 0 outside the answer."""
    versions: Int[Tensor, "N T"]
    """Of the weights that drew each token, 0 outside the answer."""
    lengths: Int[Tensor, " N"]
    """Tokens of each answer."""
    finished: Bool[Tensor, " N"]
    rewards: Float[Tensor, " N"]
    """r: 1 for a right answer, else 0."""
    repetitive: Bool[Tensor, " N"]
    false_claims: Bool[Tensor, " N"]
    copies: int
    """K."""
    version: int
    """Of the oldest weights that drew a token of it."""

    @classmethod
    def of(cls, parts: Sequence[Episodes]) -> Batch:
        """Joins the episodes of several jobs, each prompt followed at once by its answer."""
        prompts = joined([part["observation"][0] for part in parts], PADDING, left=True)
        actions = joined([part["action"][0] for part in parts], 0)
        log_probs = joined([part["log_probs"][0] for part in parts], 0)
        copies, longest = actions.shape[1:]
        lengths = _flat(parts, "lengths")
        given, real = to_tensors(np.repeat(prompts, copies, axis=0))
        inside = torch.arange(longest) < lengths[:, None]
        newest = max(part.version for part in parts)
        versions = joined([part["versions"][0] for part in parts], 0).reshape(-1, longest)
        versions = np.where(inside.numpy(), versions, newest)
        start = torch.zeros_like(given)
        # A row begins with the padding of its prompt: reading from behind it moves all to the left.
        room = (~real).sum(dim=1, keepdim=True)
        whole = given.shape[1] + longest
        source = torch.arange(whole) + room
        beyond = source >= whole
        source = source.clamp(max=whole - 1)

        def moved(prompt: Tensor, answer: Tensor) -> Tensor:
            return torch.cat([prompt, answer], dim=1).gather(1, source).masked_fill(beyond, 0)

        answers = torch.from_numpy(actions.reshape(-1, longest)).where(inside, 0)
        return cls(
            tokens=moved(given, answers),
            answer=moved(start.bool(), inside),
            sampled=moved(start.float(), torch.from_numpy(log_probs.reshape(-1, longest))),
            versions=moved(start.int(), torch.from_numpy(versions)),
            lengths=lengths,
            finished=_flat(parts, "finished"),
            rewards=_flat(parts, "reward"),
            repetitive=_flat(parts, "repetitive"),
            false_claims=_flat(parts, "false_claims"),
            copies=copies,
            version=int(versions.min(initial=newest)),
        )


def joined(arrays: Sequence[Array], padding: int, left: bool = False) -> Array:
    """Concatenates arrays along the first axis, the last one padded to the longest."""
    longest = max(array.shape[-1] for array in arrays)
    padded: list[Array] = []
    for array in arrays:
        room = longest - array.shape[-1]
        sides = [(0, 0)] * (array.ndim - 1) + [(room, 0) if left else (0, room)]
        padded.append(np.pad(array, sides, constant_values=padding))
    return np.concatenate(padded)


def _flat(parts: Sequence[Episodes], name: str) -> Tensor:
    return torch.from_numpy(np.concatenate([part[name][0] for part in parts]).reshape(-1))


def policy_update(
    run: Run[T1Recipe], policy: Policy, anchor: TokenScorer, batch: Batch, update: int
) -> dict[str, float]:
    """Takes one step on T1's objective (section 3) and moves the anchor.

    R_i = LOO(r')_i - β LOO(k)_i,  L = -E[R_i Σ_t log π(y_t)] - α E[H_t],  π_ref ← d π_ref + (1-d) π

    Args:
        run: this rank's run.
        policy: the learner of π.
        anchor: π_ref, changed in place.
        batch: this rank's share of the answers.
        update: updates done before this one, for the rate.

    Returns:
        Means over the answers of all ranks; ``train/drift`` is the largest difference between a
        token's log-probability now and when it was sampled.
    """
    recipe = run.recipe
    everything = batch
    if recipe.drop_flat_groups or recipe.dynamic_sampling:
        batch = _mixed_groups(batch)
    rewards = penalised_rewards(batch.rewards, _patterns(recipe, batch), recipe.penalise)
    passes = micro_batches(run, (batch.answer * torch.arange(batch.answer.shape[1])).amax(1) + 1)
    log_ratios = torch.zeros_like(rewards)
    if recipe.beta > 0:
        for rows, width in passes:
            with torch.no_grad(), policy.autocast():
                reference, owners, sampled = _scored(run, anchor, batch, rows, width)
            ratios = sampled - reference.log_probs
            log_ratios[rows] = sum_by_answer(ratios, owners, len(rows)).cpu()
    groups = (-1, batch.copies)
    gains = advantages(rewards.view(groups), log_ratios.view(groups), recipe.beta).flatten()
    objective = PolicyLoss(
        entropy_coef=recipe.entropy_coef,
        norm=recipe.loss_norm,
        constant_tokens=recipe.max_new_tokens,
    )
    shares = objective.token_shares(batch.lengths) / _share_of_rank(run, recipe, batch)
    entropy = drift = 0.0
    for rows, width in passes:
        with policy.autocast():
            scores, owners, sampled = _scored(run, policy.forward, batch, rows, width)
        weights = importance_weights(scores.log_probs, sampled, recipe.importance_cap)
        token_gains = gains[rows].to(run.device)[owners] * weights
        token_shares = shares[rows].to(run.device)[owners]
        policy.backward(objective(scores.log_probs, scores.entropies, token_gains, token_shares))
        entropy += float(scores.entropies.detach().sum())
        drift = max(drift, float((scores.log_probs.detach() - sampled).abs().max()))
    rate = warm_cosine(update, recipe.steps, recipe.warm_updates, recipe.final_rate)
    norm = policy.step(rate, recipe.max_norm)
    move_anchor(policy, anchor, recipe.anchor_decay)
    return {
        **_means(run, everything),
        "train/reward": run.sum(float(rewards.mean())) / run.world,
        "train/kl": run.sum(float(log_ratios.mean())) / run.world,
        "train/entropy": run.sum(entropy) / run.sum(float(batch.lengths.sum())),
        "train/drift": run.largest(drift),
        "train/gradient_norm": norm,
    }


def move_anchor(policy: Policy, anchor: TokenScorer, decay: float) -> None:
    """Moves an anchor made by ``Run.frozen`` towards the policy, however ranks share the two."""
    update_anchor(*policy.pairs(anchor), decay)


def _patterns(recipe: T1Recipe, batch: Batch) -> dict[str, Tensor]:
    """Tells which answers show each pattern that may be penalised (section 3.2)."""
    places = torch.arange(batch.tokens.shape[1])
    start = batch.answer.int().argmax(dim=1, keepdim=True)
    source = (places + start).clamp(max=len(places) - 1)
    answers = batch.tokens.gather(1, source)  # each row begins with its answer
    repeats = repeats_ngram(answers, batch.lengths, recipe.ngram, recipe.ngram_repeats)
    return {"overlong": ~batch.finished, "repetition": batch.repetitive | repeats}


def _share_of_rank(run: Run[T1Recipe], recipe: T1Recipe, batch: Batch) -> float:
    """Returns what turns shares of this rank's batch into shares of all, averaged over ranks."""
    amount = batch.lengths.sum() if recipe.loss_norm == "token" else len(batch.lengths)
    return run.sum(float(amount)) / (float(amount) * run.world)


def _scored(
    run: Run[T1Recipe],
    scorer: Callable[..., TokenScores],
    batch: Batch,
    rows: Tensor,
    width: int,
) -> tuple[TokenScores, Tensor, Tensor]:
    """Scores a pass; also returns each token's row within it and its sampled log-probability."""
    answer = batch.answer[rows, :width]
    scores = scorer(
        batch.tokens[rows, :width].to(run.device), answer.to(run.device), run.recipe.temperature
    )
    owners = answer.nonzero()[:, 0].to(run.device)
    return scores, owners, batch.sampled[rows, :width][answer].to(run.device)


def _mixed_groups(batch: Batch) -> Batch:
    """Leaves out prompts whose answers all earned the same: R is 0 but for the KL term."""
    mixed = informative_groups(batch.rewards.view(-1, batch.copies))
    if not mixed.any():
        return batch
    rows = mixed.repeat_interleave(batch.copies)
    picked = {
        item.name: getattr(batch, item.name)[rows]
        for item in fields(batch)
        if isinstance(getattr(batch, item.name), Tensor)
    }
    return replace(batch, **picked)


def _means(run: Run[T1Recipe], batch: Batch) -> dict[str, float]:
    solved = batch.rewards.view(-1, batch.copies)
    values = {
        "train/accuracy": batch.rewards,
        "train/false_claims": batch.false_claims,
        "train/overlong": ~batch.finished,
        "train/length": batch.lengths,
        "train/mixed_groups": informative_groups(solved),
    }
    return {
        name: run.sum(float(value.double().sum())) / run.sum(len(value))
        for name, value in values.items()
    }
