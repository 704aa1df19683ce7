"""Sequences of a pass without their padding, and a prompt that several answers share just once.

Everything in a transformer but attention treats tokens one by one, so that it may run over the
distinct tokens of a pass, ``U`` of them on one flat axis. Attention alone needs rows: ``R``
sequences of at most ``W`` tokens, whose places point into the flat axis.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor


class Packed(NamedTuple):
    """Index tensors of one pass; what stands behind a row's last needed token is left out."""

    tokens: Int[Tensor, " U"]
    """The distinct tokens that are read, row by row."""
    positions: Int[Tensor, " U"]
    """Of each within its sequence, from 0."""
    rows: Int[Tensor, "R W"]
    """Flat index behind each place of the rows; 0 in the padding, which stands to the right."""
    source: Int[Tensor, " U"]
    """The place in the flattened rows, [0, R * W), that is read for each distinct token."""
    shared: Int[Tensor, " D"]
    """The places in the flattened rows that show a token which some earlier row owns."""
    scored: Int[Tensor, " M"]
    """Flat index of the token *before* each chosen one: its logits give the chosen one's."""
    targets: Int[Tensor, " M"]
    """The chosen tokens, row by row."""


def pack(
    tokens: Int[Tensor, "R T"],
    chosen: Bool[Tensor, "R T"],
    groups: Int[Tensor, " R"] | None = None,
) -> Packed:
    """Lays out padded rows without padding, and what rows of a group begin with only once.

    Args:
        tokens: Sequences, padded on the right with any token.
        chosen: Tokens to score; none in the first column.
        groups: Rows of equal number begin with the same tokens up to their first chosen one (a
            prompt and its answers); None where no two rows share anything.

    Returns:
        The layout; a group's prompt is owned by its first row.
    """
    count, width = tokens.shape[0], tokens.shape[1] - 1
    place = torch.arange(width, device=tokens.device)
    ahead = chosen[:, 1:]  # the token at a place gives the logits of the one behind it
    last = (ahead * (place + 1)).amax(dim=1, keepdim=True)  # tokens to read, 0 where none is chosen
    width = max(int(last.max()), 1)
    place, ahead, read = place[:width], ahead[:, :width], place[:width] < last
    number = torch.arange(count, device=tokens.device)
    groups = number if groups is None else groups
    same = (groups[:, None] == groups) & (last.T > 0)
    leader = same.int().argmax(dim=1)
    prompt = chosen.int().argmax(dim=1, keepdim=True)
    own = read & ((place >= prompt) | (leader == number)[:, None])
    index = own.flatten().cumsum(0).view(count, width) - 1
    rows = index.where(own, index[leader]).where(read, 0)
    return Packed(
        tokens=tokens[:, :width][own],
        positions=place.expand(count, width)[own],
        rows=rows,
        source=own.flatten().nonzero().squeeze(1),
        shared=(read & ~own).flatten().nonzero().squeeze(1),
        scored=rows[ahead],
        targets=tokens[:, 1 : width + 1][ahead],
    )
