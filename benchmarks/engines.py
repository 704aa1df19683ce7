"""Sampled tokens a second: our sampler, Hugging Face's ``generate``, and what memory would allow.

``python -m benchmarks.engines`` prints one table. The engines take turns on the demo's model, 28
tokens an answer, eight answers a prompt; seconds are of this process's CPU, so that neighbours
disturb less. The bound is what a decode step must read, the weights once and the filled part of the
caches, over the measured rate of a large copy: a small model that fits into the processor's own
caches is bound by arithmetic and the cost of calls long before.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

from algorithms.t1.engines import Engine, NativeEngine, TransformersEngine
from algorithms.t1.model import ModelShape, TokenScorer, scratch_model
from algorithms.t1.sampler import Sampling

PROMPT, TOKENS, COPIES, VOCABULARY, END, ROUNDS = 7, 28, 8, 111, 110, 4


def spent(work: Callable[[], object]) -> float:
    """Returns the CPU seconds of one call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def tokens_per_s(engine: Engine, answers: int, seed: int) -> float:
    """Samples one batch of ``answers``."""
    prompts = torch.randint(END, (answers // COPIES, PROMPT))
    sampling = Sampling(COPIES, TOKENS, END)
    start = time.process_time()
    made = engine.sample(prompts, sampling, torch.Generator().manual_seed(seed))
    return float(made.lengths.sum()) / (time.process_time() - start)


def copied_bytes_per_s() -> float:
    """Measures a copy far larger than any cache, reads and writes counted."""
    source = torch.randn(25_000_000)
    target = torch.empty_like(source)
    return 2 * source.nbytes / min(spent(lambda: target.copy_(source)) for _ in range(6))


def bytes_per_step(shape: ModelShape, scorer: TokenScorer, answers: int) -> int:
    """Returns what a decode step reads with caches half full, in float32."""
    weights = sum(weight.nbytes for weight in scorer.parameters())
    filled = PROMPT + TOKENS // 2
    return weights + answers * shape.layers * 2 * shape.heads * shape.head_dim * filled * 4


def main() -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    shape = ModelShape()
    scorer = TokenScorer(scratch_model(shape, VOCABULARY, END, seed=0)).eval()
    native, reference = NativeEngine(scorer), TransformersEngine(scorer)
    bandwidth = copied_bytes_per_s()
    sys.stdout.write(f"copy: {bandwidth / 1e9:.1f} GB/s\n")
    sys.stdout.write(f"{'answers':>8}{'native':>9}{'generate':>10}{'ratio':>7}{'bound':>9}\n")
    for answers in (16, 64, 256):
        tokens_per_s(native, answers, 0), tokens_per_s(reference, answers, 0)
        pairs = [
            (tokens_per_s(native, answers, seed), tokens_per_s(reference, answers, seed))
            for seed in range(1, ROUNDS + 1)
        ]
        ours, theirs = (max(side) for side in zip(*pairs, strict=True))
        bound = answers * bandwidth / bytes_per_step(shape, scorer, answers)
        sys.stdout.write(f"{answers:>8}{ours:>9.0f}{theirs:>10.0f}{ours / theirs:>7.2f}")
        sys.stdout.write(f"{bound:>9.0f}\n")


if __name__ == "__main__":
    main()
