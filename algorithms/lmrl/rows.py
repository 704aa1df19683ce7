"""Episodes as rows of tokens to learn from, without a token being written or read as text.

Turns whose contexts continue one another share a row; where the context begins anew so does a row.
On the flat axis ``M`` lie the tokens of actions, episode by episode and in the order of time, so
that the state after token m is that before token m + 1.

Shapes: ``N`` rows, ``T`` tokens of the longest, ``U`` distinct rows, ``M`` tokens of actions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from algorithms.lmrl.objective import discounted, edges_of
from envs.text.game import PAD, Bools, Floats, Ints, Recording, Tokens, squeeze
from heliostat.actors.environment import Episodes


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of whole episodes or of a part of one."""

    tokens: Tokens
    """int16 [N, T], ``PAD`` on the right."""
    chosen: Bools
    """[N, T]: tokens of actions."""
    episodes: Ints
    """[N], ascending."""
    rewards: Floats
    """float32 [M]; an action's reward lies on its last token."""
    ended: Bools
    """[M]: the game ended with this token; without it the next state goes on."""
    counts: Bools
    """[M]: False for a token that only shows the state it is said in."""
    returns: Floats
    """float32 [M]: discounted sum of rewards from this token to the end of the data."""
    log_probs: Floats
    """float32 [M]: of the player that said it; 0 where it is unknown."""

    @classmethod
    def of(cls, played: Recording, discount: float, log_probs: Floats | None = None) -> Rows:
        """Lays out a recording.

        Args:
            played: its ``cut`` episodes get one turn more, which does not count: a state to go on.
            discount: γ a token.
            log_probs: [turns, episodes, A] of the actions' tokens.
        """
        said = np.zeros(played.actions.shape, np.float32) if log_probs is None else log_probs
        turns = np.arange(len(played.fresh))[:, None]
        shown = turns < played.lengths + ~played.ended
        shown &= played.alive
        starts = np.flatnonzero(played.fresh)
        stops = [*starts[1:], len(played.fresh)]
        blocks = [
            _block(played, said, shown, range(start, stop))
            for start, stop in zip(starts, stops, strict=True)
        ]
        width = max(block[0].shape[1] for block in blocks)
        tokens, turn_of, scores = (
            np.concatenate([_wide(block[part], width, fill) for block in blocks])
            for part, fill in ((0, PAD), (1, -1), (2, 0))
        )
        owners = np.concatenate([block[3] for block in blocks])
        order = np.argsort(owners, kind="stable")
        return _flat(tokens[order], turn_of[order], scores[order], owners[order], played, discount)

    @classmethod
    def join(cls, parts: Sequence[Rows]) -> Rows:
        """Stacks rows; episodes of different parts stay apart."""
        width = max(part.tokens.shape[1] for part in parts)
        first = np.cumsum([0, *(part.episodes[-1] + 1 for part in parts[:-1])])
        joined: dict[str, Any] = {
            "tokens": np.concatenate([_wide(part.tokens, width, PAD) for part in parts]),
            "chosen": np.concatenate([_wide(part.chosen, width, 0) for part in parts]),
            "episodes": np.concatenate(
                [part.episodes + base for part, base in zip(parts, first, strict=True)]
            ),
        }
        for name in ("rewards", "ended", "counts", "returns", "log_probs"):
            joined[name] = np.concatenate([getattr(part, name) for part in parts])
        return cls(**joined)

    @property
    def owners(self) -> Ints:
        """The episode of each token of an action, [M]."""
        return np.repeat(self.episodes, self.chosen.sum(axis=1))

    def take(self, start: int, stop: int, seen: int = 0) -> Rows:
        """Returns rows ``start`` to ``stop``, and ``seen`` rows more that do not count."""
        edges = np.concatenate([[0], np.cumsum(self.chosen.sum(axis=1))])
        rows, flat = slice(start, stop + seen), slice(edges[start], edges[stop + seen])
        used = np.flatnonzero((self.tokens[rows] != PAD).any(axis=0))
        width = len(used)
        counts = self.counts[flat].copy()
        counts[edges[stop] - edges[start] :] = False
        return Rows(
            tokens=self.tokens[rows, :width],
            chosen=self.chosen[rows, :width],
            episodes=self.episodes[rows],
            rewards=self.rewards[flat],
            ended=self.ended[flat],
            counts=counts,
            returns=self.returns[flat],
            log_probs=self.log_probs[flat],
        )

    def chunks(self, rows: int) -> Iterator[Rows]:
        """Cuts every episode into parts of so many rows, each with a look at the next row."""
        for start, stop in pairwise(edges_of(self.episodes)):
            for first in range(start, stop, rows):
                last = min(first + rows, stop)
                part = self.take(first, last, seen=int(last < stop))
                if part.counts.any():
                    yield part

    def part(self, wanted: Bools) -> Rows:
        """Returns the same rows where only the tokens of ``wanted`` [episodes] count."""
        return replace(self, counts=self.counts & wanted[self.owners])

    def split(self, count: int) -> list[Rows]:
        """Cuts the rows between episodes into parts of nearly equally many episodes."""
        *starts, end = edges_of(self.episodes)
        edges = [*(starts[len(starts) * part // count] for part in range(count)), end]
        return [self.take(start, stop) for start, stop in pairwise(edges)]


def _block(
    played: Recording, said: Floats, shown: Bools, turns: range
) -> tuple[Tokens, Ints, Floats, Ints]:
    """Returns the rows of the turns of one context: tokens, turn of each, log-probs, episodes."""
    owners = np.flatnonzero(shown[turns.start])
    tokens: list[Tokens] = []
    places: list[Ints] = []
    scores: list[Floats] = []
    for turn in turns:
        show = shown[turn, owners, None]
        message, action = played.messages[turn, owners], played.actions[turn, owners]
        tokens += [np.where(show, message, PAD), np.where(show, action, PAD)]
        places += [np.full(message.shape, -1), np.full(action.shape, turn)]
        scores += [np.zeros(message.shape, np.float32), said[turn, owners]]
    row, place, score = squeeze(
        *(np.concatenate(part, axis=1) for part in (tokens, places, scores))
    )
    return row, np.where(row == PAD, -1, place), score, owners


def _flat(
    tokens: Tokens,
    turn_of: Ints,
    scores: Floats,
    owners: Ints,
    played: Recording,
    discount: float,
) -> Rows:
    chosen = turn_of >= 0
    turns, episodes = turn_of[chosen], np.repeat(owners, chosen.sum(axis=1))
    last = np.ones(len(turns), np.bool_)
    last[:-1] = (turns[1:] != turns[:-1]) | (episodes[1:] != episodes[:-1])
    counts = turns < played.lengths[episodes]
    rewards = np.where(last & counts, played.rewards[turns, episodes], 0).astype(np.float32)
    final = last & (turns == played.lengths[episodes] - 1)
    return Rows(
        tokens=tokens,
        chosen=chosen,
        episodes=owners,
        rewards=rewards,
        ended=final & played.ended[episodes],
        counts=counts,
        returns=discounted(rewards, episodes, discount).astype(np.float32),
        log_probs=scores[chosen],
    )


def _wide(array: npt.NDArray[Any], width: int, fill: int) -> npt.NDArray[Any]:
    return np.pad(array, ((0, 0), (0, width - array.shape[1])), constant_values=fill)


def recording(episodes: Episodes) -> Recording:
    """Returns what a player's actor played."""
    seen = episodes["observation"]
    return Recording(
        messages=seen[:, :, 1:],
        fresh=seen[:, 0, 0] == 1,
        actions=episodes["action"],
        rewards=episodes["reward"],
        alive=episodes["alive"],
    )


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows for the learner: equal ones are computed once."""

    tokens: Int[Tensor, "U T"]
    chosen: Bool[Tensor, "U T"]
    where: Int[Tensor, " M"]
    """Place of each token among the chosen ones of the distinct rows."""
    rewards: Float[Tensor, " M"]
    ended: Bool[Tensor, " M"]
    counts: Float[Tensor, " M"]
    """1 or 0."""
    returns: Float[Tensor, " M"]
    log_probs: Float[Tensor, " M"]
    owners: Int[Tensor, " M"]

    @classmethod
    def of(cls, rows: Rows, device: torch.device) -> Batch:
        """Moves rows to a device."""
        keys = rows.tokens.astype(np.int32) * 2 + rows.chosen
        _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        chosen = rows.chosen[first]
        sizes = chosen.sum(axis=1)
        starts = np.cumsum(sizes) - sizes
        lengths = sizes[inverse]
        before: Ints = np.cumsum(lengths) - lengths
        within: Ints = np.arange(int(lengths.sum())) - np.repeat(before, lengths)
        arrays: dict[str, npt.NDArray[Any]] = {
            "tokens": rows.tokens[first].astype(np.int64),
            "chosen": chosen,
            "where": np.repeat(starts[inverse], lengths) + within,
            "rewards": rows.rewards,
            "ended": rows.ended,
            "counts": rows.counts.astype(np.float32),
            "returns": rows.returns,
            "log_probs": rows.log_probs,
            "owners": rows.owners,
        }
        assert arrays.keys() == {item.name for item in fields(cls)}
        return cls(**{name: torch.from_numpy(array).to(device) for name, array in arrays.items()})
