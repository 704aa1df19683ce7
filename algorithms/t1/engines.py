"""Engines: three ways to sample answers with the weights of the learner, chosen by ``engine``.

``native`` is our own sampler; ``transformers`` is Hugging Face's ``generate``, the reference that
the others must equal; ``vllm`` is for GPUs. All take tokens and give tokens: nothing is decoded and
encoded again. Shapes as in ``sampler``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from algorithms.t1.model import TokenScorer
from algorithms.t1.sampler import NEVER, Answers, Finish, Pause, Sampling, behind, sample
from algorithms.t1.workload import T1Recipe
from heliostat.weights import Weights


@runtime_checkable
class Engine(Protocol):
    """Samples answers with the weights it was given last."""

    def load(self, weights: Weights) -> None:
        """Takes new weights.

        Raises:
            WeightsDiffer: it does not hold them afterwards.
        """
        ...

    def sample(
        self,
        prompts: Int[Tensor, "P S"],
        sampling: Sampling,
        generator: torch.Generator,
        real: Bool[Tensor, "P S"] | None = None,
        begun: Answers | None = None,
        pause: Pause = NEVER,
    ) -> Answers:
        """Samples K answers to each prompt, or goes on with ``begun``; see ``sampler.sample``.

        Log-probabilities are those of ``Answers.log_probs`` whatever the engine: of the tempered,
        untruncated distribution.
        """
        ...


def make_engine(recipe: T1Recipe, make_policy: Callable[[], PreTrainedModel]) -> Engine:
    """Returns the engine that the recipe names, with the untrained policy in it."""
    if recipe.engine == "vllm":
        from algorithms.t1.vllm_engine import VllmEngine

        return VllmEngine(make_policy(), recipe.positions, recipe.seed)
    scorer = TokenScorer(make_policy()).eval()
    return NativeEngine(scorer) if recipe.engine == "native" else TransformersEngine(scorer)


class NativeEngine:
    """Our own sampler over a module in this process."""

    def __init__(self, scorer: TokenScorer) -> None:
        self._scorer = scorer

    def load(self, weights: Weights) -> None:
        """Copies the weights into the module."""
        weights.load_into(self._scorer)

    def sample(
        self,
        prompts: Int[Tensor, "P S"],
        sampling: Sampling,
        generator: torch.Generator,
        real: Bool[Tensor, "P S"] | None = None,
        begun: Answers | None = None,
        pause: Pause = NEVER,
    ) -> Answers:
        """Samples by ``sampler.sample``."""
        return sample(self._scorer.policy, prompts, sampling, generator, real, begun, pause)


class TransformersEngine:
    """Hugging Face's ``generate`` over a module in this process: slow, and the reference."""

    def __init__(self, scorer: TokenScorer) -> None:
        self._scorer = scorer

    def load(self, weights: Weights) -> None:
        """Copies the weights into the module."""
        weights.load_into(self._scorer)

    def sample(
        self,
        prompts: Int[Tensor, "P S"],
        sampling: Sampling,
        generator: torch.Generator,
        real: Bool[Tensor, "P S"] | None = None,
        begun: Answers | None = None,
        pause: Pause = NEVER,
    ) -> Answers:
        """Samples by ``generate``; log-probabilities come from its unprocessed logits."""
        copies, limit = sampling.answers_per_prompt, sampling.max_new_tokens
        before = blank(len(prompts) * copies, prompts.device) if begun is None else begun
        rows = before.running
        if len(rows) == 0:
            return before
        tokens, mask = behind(prompts, real, before, rows, copies)
        mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        room = limit - int(before.lengths[rows].min())
        steps = room if pause.tokens is None else min(room, pause.tokens)
        with torch.random.fork_rng(devices=[]):  # generate draws from the global generator
            torch.manual_seed(int(torch.randint(2**62, (1,), generator=generator)))
            made = cast("Any", self._scorer.policy).generate(
                tokens,
                attention_mask=mask.long(),
                generation_config=_settings(sampling, steps, pause.seconds),
            )
        drawn = cast("Tensor", made.sequences[:, tokens.shape[1] :])
        logits = torch.stack([step.float() for step in made.logits], dim=1)
        log_p = torch.log_softmax(logits / (sampling.temperature or 1.0), dim=-1)
        scores = log_p.gather(2, drawn[..., None]).squeeze(2)
        ends = drawn == sampling.end_token
        counts = (ends.int().argmax(dim=1) + 1).where(ends.any(dim=1), drawn.shape[1])
        counts = torch.minimum(counts, limit - before.lengths[rows])
        return extended(before, rows, drawn, scores, counts, sampling)


def _settings(sampling: Sampling, steps: int, seconds: float) -> GenerationConfig:
    greedy = sampling.temperature == 0.0
    return GenerationConfig(
        do_sample=not greedy,
        temperature=None if greedy else sampling.temperature,
        min_p=sampling.min_p if sampling.min_p > 0.0 and not greedy else None,
        top_k=None if greedy else 0,
        top_p=None if greedy else 1.0,
        max_new_tokens=steps,
        max_time=seconds if seconds < float("inf") else None,
        eos_token_id=sampling.end_token,
        pad_token_id=sampling.end_token,
        output_logits=True,
        return_dict_in_generate=True,
    )


def blank(count: int, device: torch.device) -> Answers:
    """Returns ``count`` answers of which nothing is written yet."""
    zeros = torch.zeros(count, dtype=torch.int64, device=device)
    return Answers(
        tokens=torch.zeros(count, 0, dtype=torch.int64, device=device),
        log_probs=torch.zeros(count, 0, device=device),
        lengths=zeros,
        finish=torch.full_like(zeros, int(Finish.ABORTED)),
    )


def extended(
    before: Answers,
    rows: Int[Tensor, " B"],
    drawn: Int[Tensor, "B M"],
    log_probs: Float[Tensor, "B M"],
    counts: Int[Tensor, " B"],
    sampling: Sampling,
) -> Answers:
    """Writes drawn tokens behind what the rows have.

    Args:
        before: all N answers.
        rows: those that went on.
        drawn: their new tokens.
        log_probs: of the new tokens.
        counts: how many of them count.
        sampling: tells the end token and the limit.
    """
    lengths = before.lengths.clone()
    lengths[rows] += counts
    longest, width = int(lengths.max()), before.tokens.shape[1]
    tokens = torch.full((len(lengths), longest), sampling.end_token, device=drawn.device)
    scores = torch.zeros(len(lengths), longest, device=drawn.device)
    tokens[:, :width], scores[:, :width] = before.tokens, before.log_probs
    places = torch.arange(drawn.shape[1], device=drawn.device)
    valid = places < counts[:, None]
    owner, place = valid.nonzero().unbind(1)
    where = rows[owner], before.lengths[rows[owner]] + place
    tokens[where], scores[where] = drawn[valid], log_probs[valid]
    inside = torch.arange(longest, device=drawn.device) < lengths[:, None]
    ended = ((tokens == sampling.end_token) & inside).any(dim=1)
    finish = torch.full_like(lengths, int(Finish.ABORTED))
    finish[lengths == sampling.max_new_tokens] = int(Finish.LENGTH)
    finish[ended] = int(Finish.END)
    return Answers(tokens, scores, lengths, finish)
