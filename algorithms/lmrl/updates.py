"""One step of each method, over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from algorithms.lmrl.learning import Learning
from algorithms.lmrl.objective import (
    IlqlLoss,
    TokenValues,
    generalised_advantages,
    imitation_loss,
    mc_loss,
    ppo_loss,
)
from algorithms.lmrl.rows import Batch, Rows
from algorithms.lmrl.workload import LmrlRecipe
from heliostat import Run

Loss = Callable[[Batch, Float[Tensor, " M"]], Float[Tensor, ""]]
"""(batch, share of each token in the whole batch) -> loss."""


def imitation_step(
    run: Run[LmrlRecipe], models: Learning, chunks: Sequence[Rows], rate: float
) -> dict[str, float]:
    """Takes one step on the cross-entropy of the actions that count."""

    def loss(batch: Batch, shares: Tensor) -> Float[Tensor, ""]:
        log_probs = models.policy.forward(batch.tokens, batch.chosen)[batch.where]
        return imitation_loss(log_probs, shares)

    with models.policy.autocast():
        mean = _descend(run, chunks, loss, models.policy.backward)
    return {"train/loss": mean, "train/norm": models.policy.step(rate, run.recipe.max_norm)}


def value_step(
    run: Run[LmrlRecipe], models: Learning, chunks: Sequence[Rows], rate: float
) -> dict[str, float]:
    """Takes one step of the critic: Monte-Carlo returns or ILQL, as the recipe says."""
    recipe = run.recipe
    ilql_loss = IlqlLoss(recipe.discount, recipe.expectile, recipe.cql_weight)

    def loss(batch: Batch, shares: Tensor) -> Float[Tensor, ""]:
        said = batch.tokens[batch.chosen]
        heads = models.critic.forward(batch.tokens, batch.chosen)
        found = TokenValues.of(heads, said, batch.where)
        if recipe.method == "mc":
            return mc_loss(found, batch.returns, shares, recipe.cql_weight)
        with torch.no_grad():
            slow = models.target(batch.tokens, batch.chosen)
            target = TokenValues.of(slow, said, batch.where)
        return ilql_loss(found, target, batch.rewards, batch.ended, shares)

    with models.critic.autocast():
        mean = _descend(run, chunks, loss, models.critic.backward)
    norm = models.critic.step(rate, recipe.max_norm)
    models.follow()
    return {"train/loss": mean, "train/norm": norm}


def ppo_step(
    run: Run[LmrlRecipe], models: Learning, played: Rows, data: Sequence[Rows], rate: float
) -> dict[str, float]:
    """Takes some epochs of clipped steps on whole episodes that the policy has just played.

    Args:
        run: this rank's run.
        models: what learns.
        played: this rank's episodes.
        data: chunks to imitate at each step, where ``bc_weight`` is positive.
        rate: share of the learning rates.
    """
    recipe = run.recipe
    parts = [_judged(run, models, part) for part in played.split(recipe.minibatches)]
    sums = {"train/loss": 0.0, "train/value_loss": 0.0, "train/kl": 0.0}
    drift = 0.0
    for epoch in range(recipe.epochs):
        for place, (batch, gains, wanted) in enumerate(parts):
            shares = _shares(run, batch)
            log_probs = models.policy.forward(batch.tokens, batch.chosen)[batch.where]
            if epoch == place == 0:
                drift = float((log_probs.detach() - batch.log_probs).abs().max())
            loss = ppo_loss(log_probs, batch.log_probs, gains, shares, recipe.clip)
            if recipe.bc_weight > 0:
                loss = loss + recipe.bc_weight * _imitated(run, models, data)
            models.policy.backward(loss)
            values = models.critic.forward(batch.tokens, batch.chosen)["v"].squeeze(1)
            value_loss = (shares * (values[batch.where] - wanted).square()).sum() / 2
            models.critic.backward(value_loss)
            models.policy.step(rate, recipe.max_norm)
            models.critic.step(rate, recipe.max_norm)
            sums["train/loss"] += run.sum(float(loss.detach())) / run.world
            sums["train/value_loss"] += run.sum(float(value_loss.detach())) / run.world
            with torch.no_grad():
                moved = float((shares * (batch.log_probs - log_probs)).sum())
            sums["train/kl"] += run.sum(moved) / run.world
    steps = recipe.epochs * len(parts)
    return {name: value / steps for name, value in sums.items()} | {
        "train/drift": run.largest(drift)
    }


def _judged(
    run: Run[LmrlRecipe], models: Learning, part: Rows
) -> tuple[Batch, Float[Tensor, " M"], Float[Tensor, " M"]]:
    """Returns a part with its whitened advantages and the critic's targets."""
    recipe = run.recipe
    batch = Batch.of(part, run.device)
    with torch.no_grad():
        values = models.critic.model(batch.tokens, batch.chosen)["v"].squeeze(1)[batch.where]
        reference = models.reference(batch.tokens, batch.chosen)[batch.where]
    rewards = batch.rewards - recipe.kl_coef * (batch.log_probs - reference)
    known = values.double().cpu().numpy()
    gains = generalised_advantages(
        rewards.double().cpu().numpy(), known, part.owners, recipe.discount, recipe.gae_lambda
    )
    wanted = torch.from_numpy(gains + known).float().to(run.device)
    count = run.sum(len(gains))
    mean = run.sum(float(gains.sum())) / count
    spread = np.sqrt(run.sum(float(np.square(gains - mean).sum())) / count)
    whitened = torch.from_numpy((gains - mean) / (spread + 1e-8)).float().to(run.device)
    return batch, whitened, wanted


def online_imitation_step(
    run: Run[LmrlRecipe], models: Learning, played: Rows, rate: float
) -> dict[str, float]:
    """Imitates the episodes that count for some epochs; where none does, nothing is learnt."""
    metrics: dict[str, float] = {}
    parts = played.split(run.recipe.minibatches)
    for _ in range(run.recipe.epochs):
        for part in parts:
            metrics = imitation_step(run, models, [part], rate)
    return metrics


def _imitated(run: Run[LmrlRecipe], models: Learning, data: Sequence[Rows]) -> Float[Tensor, ""]:
    batch = Batch.of(Rows.join(data), run.device)
    log_probs = models.policy.forward(batch.tokens, batch.chosen)[batch.where]
    return imitation_loss(log_probs, _shares(run, batch))


def _shares(run: Run[LmrlRecipe], batch: Batch) -> Float[Tensor, " M"]:
    """Returns each token's share of all ranks' batches, whose gradients are then averaged."""
    return batch.counts * (run.world / run.sum(float(batch.counts.sum())))


def _descend(
    run: Run[LmrlRecipe], chunks: Sequence[Rows], loss: Loss, backward: Callable[[Tensor], None]
) -> float:
    """Adds the gradients of all passes; returns the mean loss over tokens and ranks."""
    counted = float(sum(chunk.counts.sum() for chunk in chunks))
    share = run.world / max(1.0, run.sum(counted))
    passes = min(run.recipe.passes, len(chunks))
    mean = 0.0
    for places in np.array_split(np.arange(len(chunks)), passes):
        batch = Batch.of(Rows.join([chunks[int(place)] for place in places]), run.device)
        part = loss(batch, batch.counts * share)
        backward(part)
        mean += float(part.detach())
    run.count("tokens", counted)
    return run.sum(mean) / run.world
