"""Plays many episodes at once: the hot loop of the online methods and of every evaluation.

Keys and values of what was read stay in a cache from turn to turn; where contexts begin anew, equal
ones are read once; ended episodes leave the batch. What was sampled goes into the cache as it is.

Shapes: ``B`` episodes, ``R`` of them running, ``W`` tokens that are read, ``A`` of an action.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache, LlamaModel

from algorithms.lmrl.model import Agent
from envs.text.game import NEWLINE, PAD, Game
from heliostat import Weights


class Context:
    """What ``R`` episodes have read, for one trunk."""

    def __init__(self, trunk: LlamaModel, rows: int) -> None:
        self._trunk = trunk
        self._cache = DynamicCache(config=trunk.config)
        self._real: Bool[Tensor, "R _"] = torch.empty(rows, 0, dtype=torch.bool)

    def read(self, tokens: Int[Tensor, "R W"]) -> Float[Tensor, "R H"]:
        """Reads tokens, ``PAD`` on the right, and returns the state after each row's last one.

        A row of ``PAD`` alone reads nothing; its state means nothing.
        """
        real = tokens != PAD
        read = self._real.sum(dim=1, keepdim=True)
        self._real = torch.cat([self._real, real], dim=1)
        output = self._trunk(
            input_ids=tokens,
            attention_mask=self._real.long(),
            position_ids=(read + real.cumsum(dim=1) - 1).clamp(min=0),
            cache=self._cache,
            use_cache=True,
        )
        last = (real.sum(dim=1) - 1).clamp(min=0)
        return output.last_hidden_state[torch.arange(len(tokens)), last]

    def select(self, rows: Int[Tensor, " R"]) -> None:
        """Keeps these rows, in this order; a row may be taken several times."""
        self._cache.batch_select_indices(rows)
        self._real = self._real[rows]


class Player:
    """A policy of the shared actors."""

    def __init__(self, agent: Agent, game: Game) -> None:
        self._agent = agent.eval()
        self._longest = game.action_tokens
        self._key = ""
        self._contexts: list[Context] = []
        self._rows = np.empty(0, np.int64)
        """The episode of each row of the contexts."""
        self._unread = torch.empty(0, 1, dtype=torch.int64)
        """Each row's last token, which was said but not read."""

    def load(self, weights: Weights) -> None:
        """Copies new weights into the models; those they have already cost nothing."""
        if weights.key != self._key:
            weights.load_into(self._agent)
            self._key = weights.key

    @torch.inference_mode()
    def act(self, observations: np.ndarray, generator: torch.Generator) -> dict[str, np.ndarray]:
        """Says one action in each running episode.

        Args:
            observations: int16 [B, 1 + S]: whether contexts begin anew, and the messages.
            generator: gives every episode its own draws, however many others run.

        Returns:
            ``action`` int16 [B, A], ``PAD`` on the right, and ``log_probs`` float32 [B, A].
        """
        count = len(observations)
        uniforms = torch.rand(self._longest, count, generator=generator)
        actions = np.full((count, self._longest), PAD, np.int16)
        log_probs = np.zeros((count, self._longest), np.float32)
        states = self._read(observations)
        rows = self._rows
        uniforms = uniforms[:, torch.from_numpy(rows)]
        running = torch.ones(len(rows), dtype=torch.bool)
        for place in range(self._longest):
            log_p = self._agent.log_probs(*states)
            drawn = _draw(log_p, uniforms[place]).where(running, PAD)
            actions[rows, place] = drawn.numpy()
            scores = log_p.gather(1, drawn[:, None]).squeeze(1)
            log_probs[rows, place] = scores.where(running, 0.0).numpy()
            self._unread = drawn[:, None].where(running[:, None], self._unread)
            running = running & (drawn != NEWLINE)
            if place + 1 == self._longest or not running.any():
                break
            # a row that has ended its action keeps its last token for the next turn
            states = self._forward(drawn[:, None].where(running[:, None], PAD))
        return {"action": actions, "log_probs": log_probs}

    def _read(self, observations: np.ndarray) -> tuple[Tensor, Tensor | None]:
        """Reads the messages; returns the states after them."""
        fresh, messages = observations[0, 0] == 1, observations[:, 1:]
        alive = np.flatnonzero(messages[:, 0] != PAD)
        width = int((messages[alive] != PAD).sum(axis=1).max(initial=1))
        told = messages[alive, :width].astype(np.int64)
        if fresh:
            distinct, inverse = np.unique(told, axis=0, return_inverse=True)
            copies = torch.from_numpy(inverse)
            self._begin(len(distinct))
            policy, critic = self._forward(torch.from_numpy(distinct))
            for context in self._contexts:
                context.select(copies)
            self._rows, self._unread = alive, torch.full((len(alive), 1), PAD)
            return policy[copies], None if critic is None else critic[copies]
        kept = torch.from_numpy(np.flatnonzero(np.isin(self._rows, alive)))
        if len(kept) < len(self._rows):
            for context in self._contexts:
                context.select(kept)
            self._unread = self._unread[kept]
        self._rows = alive
        return self._forward(torch.cat([self._unread, torch.from_numpy(told)], dim=1))

    def _begin(self, rows: int) -> None:
        trunks = [self._agent.policy.trunk]
        if self._agent.critic is not None and self._agent.bent:
            trunks.append(self._agent.critic.trunk)
        self._contexts = [Context(trunk, rows) for trunk in trunks]

    def _forward(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        states = [context.read(tokens) for context in self._contexts]
        return states[0], states[1] if len(states) > 1 else None


def _draw(log_p: Float[Tensor, "R V"], uniforms: Float[Tensor, " R"]) -> Int[Tensor, " R"]:
    """Draws by inversion of the distribution function."""
    below = log_p.exp().cumsum(dim=-1)
    total = below[:, -1]
    # below the total even after rounding: a word of weight zero is never reached
    level = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(below, level[:, None], right=True).squeeze(1)
