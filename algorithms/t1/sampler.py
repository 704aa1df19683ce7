"""Samples K answers to each prompt with exact log-probabilities: the hot loop of T1.

A prompt is prefilled once and its cache is shared out to its K answers; keys and values live in
buffers of fixed size; answers that ended leave the batch. Sampling may pause and go on later, with
other weights, behind what was written.

Shapes: ``P`` prompts, ``K`` answers each, ``N = P * K`` answers, ``S`` prompt tokens, ``L`` answer
tokens, ``B`` answers still running, ``V`` vocabulary.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import IntEnum

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from algorithms.t1.decoders import Decoder, decoder_for

_COMPACT_FRACTION = 1 / 16
"""Ended answers leave the batch when they are this share of it: copying a cache costs a little."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample.

    Attributes:
        answers_per_prompt: K ≥ 1.
        max_new_tokens: Longest answer, its end token included, ≥ 1.
        end_token: Ends an answer and is part of it.
        temperature: Divides the logits, ≥ 0; 0 takes the most likely token.
        min_p: Tokens less likely than this share of the most likely one are never drawn, in [0, 1);
            0 draws from the whole distribution.
    """

    answers_per_prompt: int
    max_new_tokens: int
    end_token: int
    temperature: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        """Refuses values out of range.

        Raises:
            ValueError: A value is out of range.
        """
        for name, value, fine in (
            ("answers_per_prompt ≥ 1", self.answers_per_prompt, self.answers_per_prompt >= 1),
            ("max_new_tokens ≥ 1", self.max_new_tokens, self.max_new_tokens >= 1),
            ("temperature ≥ 0", self.temperature, self.temperature >= 0),
            ("0 ≤ min_p < 1", self.min_p, 0 <= self.min_p < 1),
        ):
            if not fine:
                raise ValueError(f"expected {name}, found {value}; change the sampling settings")


@dataclass(frozen=True, slots=True)
class Pause:
    """When a call returns although answers still run; by default never. One token is always drawn.

    Attributes:
        tokens: Most tokens that a call adds to an answer; repeatable.
        seconds: Longest time that a call decodes; what it cuts depends on the machine.
    """

    tokens: int | None = None
    seconds: float = float("inf")


NEVER = Pause()


class Finish(IntEnum):
    """Why an answer has its length."""

    END = 0
    """It drew the end token."""
    LENGTH = 1
    """It was cut at ``max_new_tokens``."""
    ABORTED = 2
    """A pause left it unfinished; it can go on."""


@dataclass(frozen=True, slots=True)
class Answers:
    """``N`` answers; those to prompt p are the rows ``p * K`` to ``(p + 1) * K - 1``.

    Attributes:
        tokens: ``[N, L]`` int64, L the longest answer; after an answer stands its end token.
        log_probs: ``[N, L]`` float32, log π_τ(y_t | x, y_<t) of the *tempered, untruncated*
            distribution: temperature is in it, ``min_p`` is not (temperature 0 counts as 1). 0 in
            the padding. ``TokenScorer`` at the same temperature gives the same numbers.
        lengths: ``[N]`` int64, tokens of each answer, the end token included.
        finish: ``[N]`` int64, the ``Finish`` of each.
    """

    tokens: Int[Tensor, "N L"]
    log_probs: Float[Tensor, "N L"]
    lengths: Int[Tensor, " N"]
    finish: Int[Tensor, " N"]

    @property
    def finished(self) -> Bool[Tensor, " N"]:
        """True for a drawn end token."""
        return self.finish == Finish.END

    @property
    def running(self) -> Int[Tensor, " B"]:
        """Rows that can go on."""
        return (self.finish == Finish.ABORTED).nonzero().squeeze(1)


def sample(  # noqa: PLR0913, PLR0917 - the last two are seldom given
    model: PreTrainedModel,
    prompts: Int[Tensor, "P S"],
    sampling: Sampling,
    generator: torch.Generator,
    real: Bool[Tensor, "P S"] | None = None,
    begun: Answers | None = None,
    pause: Pause = NEVER,
) -> Answers:
    """Samples ``K`` answers to each prompt.

    The answers depend on the arguments alone; token t of answer n uses uniform ``[t, n]`` of those
    drawn at the start, so that neither the order in which others end nor compaction changes it. So
    answers that were paused and go on with an equal generator and equal weights are those that
    would have come without a pause.

    Args:
        model: Any causal language model of Hugging Face, without dropout or in evaluation mode.
        prompts: Prompts on the model's device, padded on the *left* where they differ in length.
        sampling: Numbers of answers and tokens, temperature, truncation.
        generator: On the CPU or the model's device.
        real: False on the padding of ``prompts``; None where there is none.
        begun: What an earlier call with the same prompts and sampling returned; its aborted
            answers go on, read anew together with their prompts, and the others stay.
        pause: When to return although answers still run.

    Returns:
        All N answers, on the model's device.
    """
    count, limit = len(prompts) * sampling.answers_per_prompt, sampling.max_new_tokens
    tokens = torch.full((limit, count), sampling.end_token, device=prompts.device)
    log_probs = torch.zeros(limit, count, device=prompts.device)
    if begun is not None:
        tokens[: begun.tokens.shape[1]] = begun.tokens.T
        log_probs[: begun.tokens.shape[1]] = begun.log_probs.T
        if len(begun.running) == 0:
            return begun
    uniforms = torch.rand(limit, count, generator=generator, device=generator.device)
    with torch.inference_mode():
        decoder = decoder_for(model)
        if begun is None:
            rows = torch.arange(count, device=prompts.device)
            written = torch.zeros_like(rows)
            logits = decoder.prefill(prompts, real, sampling.answers_per_prompt, limit)
        else:
            rows, written = begun.running, begun.lengths[begun.running]
            inputs = behind(prompts, real, begun, rows, sampling.answers_per_prompt)
            logits = decoder.prefill(*inputs, 1, limit - int(written.min()))
        drawing = _Drawing(tokens, log_probs, uniforms.to(prompts.device), rows, written)
        rows, written = drawing.run(decoder, logits, sampling, pause)
    return _laid_out(drawing, rows, written, sampling)


def behind(
    prompts: Int[Tensor, "P S"],
    real: Bool[Tensor, "P S"] | None,
    begun: Answers,
    rows: Int[Tensor, " B"],
    copies: int,
) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"] | None]:
    """Joins prompts and what was written of their answers, padded on the left again.

    Returns:
        (tokens, False on padding or None where there is none).
    """
    owners, lengths = rows // copies, begun.lengths[rows]
    longest = int(lengths.max())
    asked = prompts[owners]
    known = torch.ones_like(asked, dtype=torch.bool) if real is None else real[owners]
    inside = torch.arange(longest, device=rows.device) < lengths[:, None]
    joined = torch.cat([asked, begun.tokens[rows, :longest]], dim=1)
    mask = torch.cat([known, inside], dim=1)
    if bool(mask.all()):
        return joined, None
    order = torch.argsort(mask.int(), dim=1, stable=True)  # padding to the left, the rest in order
    return joined.gather(1, order), mask.gather(1, order)


@dataclass(slots=True)
class _Drawing:
    """Tokens and log-probabilities as they are drawn, ``[limit, N]``."""

    tokens: Tensor
    log_probs: Tensor
    uniforms: Tensor
    rows: Int[Tensor, " B"]
    """Which answers run."""
    written: Int[Tensor, " B"]
    """Tokens that each had before this call."""

    def run(
        self, decoder: Decoder, logits: Tensor, sampling: Sampling, pause: Pause
    ) -> tuple[Int[Tensor, " B"], Int[Tensor, " B"]]:
        """Draws token by token; returns the answers that a pause left, and their lengths."""
        deadline = time.monotonic() + pause.seconds
        rows, places = self.rows, self.written
        running = torch.ones_like(rows, dtype=torch.bool)
        # Answers of unequal length reach the limit one by one: each must leave when it does.
        ragged = bool((places != places[0]).any())
        most = 1.0 if ragged else 1 - _COMPACT_FRACTION
        drawn_tokens = 0
        while True:
            drawn, log_probs = _draw(logits, self.uniforms[places, rows], sampling)
            self.tokens[places, rows] = drawn.where(running, sampling.end_token)
            self.log_probs[places, rows] = log_probs.where(running, 0.0)
            places, drawn_tokens = places + 1, drawn_tokens + 1
            running = running & (drawn != sampling.end_token) & (places < sampling.max_new_tokens)
            alive = int(running.sum())
            if alive == 0 or drawn_tokens == pause.tokens or time.monotonic() >= deadline:
                return rows[running], places[running]
            if alive < len(running) and alive <= len(running) * most:
                kept = running.nonzero().squeeze(1)
                decoder.keep(kept)
                drawn, rows, places, running = drawn[kept], rows[kept], places[kept], running[kept]
            logits = decoder.step(drawn)


def _laid_out(
    drawing: _Drawing, rows: Int[Tensor, " B"], written: Int[Tensor, " B"], sampling: Sampling
) -> Answers:
    """Cuts the buffers to the longest answer and says how each ended."""
    ended = drawing.tokens == sampling.end_token
    finished = ended.any(dim=0)
    lengths = (ended.int().argmax(dim=0) + 1).where(finished, sampling.max_new_tokens)
    lengths[rows] = written
    finish = torch.full_like(lengths, Finish.LENGTH).where(~finished, int(Finish.END))
    finish[rows] = int(Finish.ABORTED)
    longest = int(lengths.max())
    # Copies made outside inference mode may take part in a backward pass.
    tokens = drawing.tokens[:longest].T.clone(memory_format=torch.contiguous_format)
    log_probs = drawing.log_probs[:longest].T.clone(memory_format=torch.contiguous_format)
    return Answers(tokens, log_probs, lengths, finish)


def _draw(
    logits: Float[Tensor, "B V"], uniforms: Float[Tensor, " B"], sampling: Sampling
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    """Draws by inversion of the distribution function; also returns the log-probabilities."""
    scaled = logits.float()
    if sampling.temperature not in {0.0, 1.0}:
        scaled = scaled / sampling.temperature
    log_p = torch.log_softmax(scaled, dim=-1)
    if sampling.temperature == 0.0:
        drawn = scaled.argmax(dim=-1)
    else:
        weights = log_p.exp()
        if sampling.min_p > 0.0:
            floor = sampling.min_p * weights.amax(dim=-1, keepdim=True)
            weights = weights.where(weights >= floor, 0.0)
        below = weights.cumsum(dim=-1)
        total = below[:, -1]
        # Below the total even after rounding: a token of weight zero is never reached.
        level = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
        drawn = torch.searchsorted(below, level[:, None], right=True).squeeze(1)
    return drawn, log_p.gather(1, drawn[:, None]).squeeze(1)
