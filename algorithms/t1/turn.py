"""TURN (arXiv 2502.05234): the sampling temperature from entropies alone, without labels.

The token entropy H(T) of a model's own samples grows with the temperature T. Where log H turns from
concave to convex, at EntP, errors begin to breed errors; majority voting is best near EntP, and
whatever needs one right answer among many (best-of-n, pass@k) a little above.

Shapes: ``G`` temperatures of a grid, ``P`` prompts of ``S`` tokens, ``L`` answer tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from algorithms.t1.model import TokenScorer
from algorithms.t1.sampler import Sampling, sample

Aggregator = Literal["majority", "best_of_n"]

GRID: Final = tuple(tenth / 10 for tenth in range(1, 15))
"""The paper's temperatures: 0.1 to 1.4."""
ADAPTATION: Final[dict[Aggregator, float]] = {"majority": 0.0, "best_of_n": 0.1}
"""β of an aggregator, added to EntP."""
LEAST_ENTROPY: Final = 1e-3
"""Below it, in nats, a sampler is greedy and log H is noise: the grid begins above."""
_FEWEST = 5
"""Points that two central differences in a row reach over."""


def turning_point(temperatures: Sequence[float], entropies: Sequence[float]) -> float:
    """Returns EntP: the smallest temperature from which log H is convex.

    The second derivative is a central difference taken twice, so that EntP is one of the interior
    grid points. Two neighbours must be convex, as one may be by chance; where none are, it is the
    last interior point.

    Args:
        temperatures: ``[G]``, ascending.
        entropies: ``[G]`` mean token entropies of samples at them, in nats.

    Raises:
        ValueError: the lists differ in length, the temperatures do not ascend, or fewer than five
            of the entropies lie above ``LEAST_ENTROPY``.
    """
    grid, values = np.asarray(temperatures, np.float64), np.asarray(entropies, np.float64)
    if grid.shape != values.shape or grid.ndim != 1 or (np.diff(grid) <= 0).any():
        raise ValueError(
            f"expected one entropy for each of ascending temperatures, found {len(entropies)} "
            f"entropies and temperatures {list(temperatures)}"
        )
    low = np.flatnonzero(~(values > LEAST_ENTROPY))
    start = int(low[-1]) + 1 if low.size else 0
    grid, values = grid[start:], values[start:]
    if len(grid) < _FEWEST:
        raise ValueError(
            f"expected at least {_FEWEST} temperatures with entropies above {LEAST_ENTROPY} nats, "
            f"found {len(grid)} of {len(entropies)}; sample at higher temperatures"
        )
    bend = np.gradient(np.gradient(np.log(values), grid), grid)
    convex = bend[1:-1] > 0
    pairs = np.flatnonzero(convex[:-1] & convex[1:])
    return float(grid[1 + (pairs[0] if pairs.size else len(convex) - 1)])


def choose_temperature(
    temperatures: Sequence[float], entropies: Sequence[float], aggregator: Aggregator
) -> float:
    """Returns T* = EntP + β of the aggregator; raises what ``turning_point`` raises."""
    return turning_point(temperatures, entropies) + ADAPTATION[aggregator]


def diagnosis(
    temperatures: Sequence[float], entropies: Sequence[float], rollout: float
) -> dict[str, float]:
    """Judges the temperature that training samples at.

    Returns:
        ``turn_entp``; ``turn_margin``, EntP less the rollout temperature: below 0 the sampler
        breeds errors; ``turn_log_entropy``, log H at the rollout temperature, interpolated: where
        it has collapsed, the answers to a prompt no longer differ. Empty where no EntP is found.
    """
    try:
        entp = turning_point(temperatures, entropies)
    except ValueError:  # a policy that is all but greedy has no curve to judge by
        return {}
    logs = np.log(np.maximum(entropies, LEAST_ENTROPY))
    at_rollout = float(np.interp(rollout, temperatures, logs))
    return {"turn_entp": entp, "turn_margin": entp - rollout, "turn_log_entropy": at_rollout}


def mean_entropy(
    scorer: TokenScorer,
    prompts: Int[Tensor, "P S"],
    real: Bool[Tensor, "P S"],
    sampling: Sampling,
    generator: torch.Generator,
) -> float:
    """Samples answers and returns their token entropy: mean over tokens, then over samples.

    The entropy is that of the whole *tempered* distribution, at each place of the sample.

    Args:
        scorer: the model.
        prompts: padded on the left.
        real: False on that padding.
        sampling: temperature > 0 and how many answers to each prompt.
        generator: draws them.

    Returns:
        H(T) in nats.
    """
    whole = None if bool(real.all()) else real
    answers = sample(scorer.policy, prompts, sampling, generator, whole)
    copies, longest = sampling.answers_per_prompt, answers.tokens.shape[1]
    tokens = torch.cat([prompts.repeat_interleave(copies, 0), answers.tokens], dim=1)
    inside = torch.arange(longest, device=tokens.device) < answers.lengths[:, None]
    chosen = torch.cat([torch.zeros_like(tokens[:, : prompts.shape[1]]).bool(), inside], dim=1)
    room = (~real).sum(dim=1).repeat_interleave(copies)[:, None]
    source = (torch.arange(tokens.shape[1], device=tokens.device) + room) % tokens.shape[1]
    tokens, chosen = tokens.gather(1, source), chosen.gather(1, source)
    with torch.no_grad():
        entropies = scorer(tokens, chosen, sampling.temperature).entropies
    owners = chosen.nonzero()[:, 0]
    totals = torch.zeros(len(tokens), device=tokens.device).index_add_(0, owners, entropies)
    return float((totals / answers.lengths).mean())
