"""The models: a small causal Llama that says words, and another that values them.

Shapes: ``U`` rows, ``T`` tokens, ``M`` chosen tokens on a flat axis, ``V`` vocabulary, ``H`` width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from algorithms.lmrl.workload import LmrlRecipe
from envs.text.game import PAD

_HEAD = 32


def trunk(recipe: LmrlRecipe, vocabulary: int) -> LlamaModel:
    """Builds a Llama without a head."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.hidden // _HEAD,
        num_key_value_heads=recipe.hidden // _HEAD,
        head_dim=_HEAD,
        intermediate_size=recipe.feed_forward,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        initializer_range=0.05,  # 0.02 suits wide models; a narrow one starts too close to zero
    )
    return LlamaModel(config)


def _states(
    body: LlamaModel, tokens: Int[Tensor, "U T"], chosen: Bool[Tensor, "U T"]
) -> Float[Tensor, "M H"]:
    """Returns the state before each chosen token; padding stands to the right, as it must."""
    hidden = body(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
    return hidden[chosen[:, 1:]]


class Policy(nn.Module):
    """Log-probabilities of words."""

    def __init__(self, recipe: LmrlRecipe, vocabulary: int) -> None:
        super().__init__()
        self.trunk = trunk(recipe, vocabulary)
        self.head = nn.Linear(recipe.hidden, vocabulary, bias=False)
        nn.init.normal_(self.head.weight, std=0.05)

    def log_probs(self, states: Float[Tensor, "M H"]) -> Float[Tensor, "M V"]:
        """Returns log π of every word; ``PAD`` cannot be said."""
        logits = self.head(states).float()
        padding = torch.arange(logits.shape[-1], device=logits.device) == PAD
        return logits.masked_fill(padding, -1e9).log_softmax(dim=-1)

    def forward(
        self, tokens: Int[Tensor, "U T"], chosen: Bool[Tensor, "U T"]
    ) -> Float[Tensor, " M"]:
        """Returns the log-probability of each chosen token, row by row."""
        log_p = self.log_probs(_states(self.trunk, tokens, chosen))
        return log_p.gather(1, tokens[chosen][:, None]).squeeze(1)


class Critic(nn.Module):
    """Twin values Q of every word, and the value V of the state before it."""

    def __init__(self, recipe: LmrlRecipe, vocabulary: int) -> None:
        super().__init__()
        self.trunk = trunk(recipe, vocabulary)
        sizes = {"v": 1}
        if recipe.extracts:
            sizes |= {"q1": vocabulary, "q2": vocabulary}
        self.heads = nn.ModuleDict(
            {name: _head(recipe.hidden, size) for name, size in sizes.items()}
        )

    def values(self, states: Float[Tensor, "M H"]) -> dict[str, Float[Tensor, "M _"]]:
        """Returns ``v`` [M, 1] and, for methods that extract a policy, ``q1``, ``q2`` [M, V]."""
        return {name: head(states).float() for name, head in self.heads.items()}

    def forward(
        self, tokens: Int[Tensor, "U T"], chosen: Bool[Tensor, "U T"]
    ) -> dict[str, Float[Tensor, "M _"]]:
        """Returns the values at each chosen token, row by row."""
        return self.values(_states(self.trunk, tokens, chosen))


def _head(width: int, size: int) -> nn.Sequential:
    last = nn.Linear(2 * width, size)
    nn.init.normal_(last.weight, std=0.02)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), last)


class Agent(nn.Module):
    """What plays: a policy, and for MC and ILQL the critic that bends it."""

    beta: Tensor

    def __init__(self, recipe: LmrlRecipe, vocabulary: int) -> None:
        super().__init__()
        self.policy = Policy(recipe, vocabulary)
        self.critic = Critic(recipe, vocabulary) if recipe.extracts else None
        self.register_buffer("beta", torch.zeros(1))

    @property
    def bent(self) -> bool:
        """Whether the critic has a say."""
        return self.critic is not None and float(self.beta) > 0

    def log_probs(
        self, states: Float[Tensor, "B H"], valued: Float[Tensor, "B H"] | None
    ) -> Float[Tensor, "B V"]:
        """Returns log π, with π ∝ π_BC exp(β (min(Q1, Q2) - V)) where a critic is."""
        log_p = self.policy.log_probs(states)
        if self.critic is None or valued is None:
            return log_p
        found = self.critic.values(valued)
        gain = torch.minimum(found["q1"], found["q2"]) - found["v"]
        return (log_p + self.beta * gain).log_softmax(dim=-1)


def agent(recipe: LmrlRecipe, vocabulary: int, seed: int) -> Agent:
    """Builds the models before training; they depend on recipe and seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Agent(recipe, vocabulary)


def adamw(lr: float) -> Callable[[nn.Module], torch.optim.AdamW]:
    """Returns what makes AdamW, betas (0.9, 0.98), without decay."""

    def make(model: nn.Module) -> torch.optim.AdamW:
        return torch.optim.AdamW(
            model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True
        )

    return make
