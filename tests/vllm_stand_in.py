"""As much of vLLM's public ``LLM`` as our adapter uses, over a Hugging Face model.

It checks what the adapter does with prompts, pauses, seeds and answers, and nothing about vLLM; the
contract runs against the real one where that is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaForCausalLM

TokensPrompt = dict
SamplingParams = SimpleNamespace


class Model(LlamaForCausalLM):
    """A model that loads weights as vLLM's do: by the names of a checkpoint."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.load_state_dict(dict(weights))


class LLM:
    """Answers one prompt after the other."""

    def __init__(self, model: str, **settings: Any) -> None:
        assert settings["logprobs_mode"] == "processed_logprobs"
        assert settings["skip_tokenizer_init"]
        self._model = Model.from_pretrained(model).eval()
        self.cached = False

    def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        return [function(self._model)]

    def reset_prefix_cache(self) -> bool:
        self.cached = False
        return True

    def generate(self, prompts: Any, sampling_params: Any, use_tqdm: bool) -> list[Any]:
        assert not use_tqdm
        pairs = zip(prompts, sampling_params, strict=True)
        return [SimpleNamespace(outputs=[self._answer(*pair)]) for pair in pairs]

    @torch.no_grad()
    def _answer(self, prompt: dict[str, list[int]], params: Any) -> Any:
        tokens = list(prompt["prompt_token_ids"])
        start, log_probs = len(tokens), []
        generator = torch.Generator().manual_seed(params.seed)
        while len(tokens) < start + params.max_tokens:
            logits = self._model(input_ids=torch.tensor([tokens])).logits[0, -1]
            log_p = (logits / (params.temperature or 1.0)).log_softmax(-1)
            greedy = params.temperature == 0
            token = log_p.argmax() if greedy else log_p.exp().multinomial(1, generator=generator)
            tokens.append(int(token))
            log_probs.append({int(token): SimpleNamespace(logprob=float(log_p[token]))})
            if tokens[-1] in params.stop_token_ids:
                break
        return SimpleNamespace(token_ids=tokens[start:], logprobs=log_probs)
