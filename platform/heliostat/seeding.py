"""Independent random streams, named by a path instead of drawn in an order.

A stream depends on the run's seed and its own name only: not on which process, host or rank asks,
nor on what was drawn before. That is what makes a resumed run, a retried call and another number
of hosts give the same numbers.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def derive(seed: int, *path: str | int) -> int:
    """Returns a seed in [0, 2**63) for the stream named ``path`` under ``seed``.

    Example:
        ``derive(0, "answers", step, prompt)`` is the same on every machine and differs from
        ``derive(0, "answers", step, prompt + 1)`` as two unrelated seeds would.
    """
    name = repr((seed, *path)).encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1


def numpy_generator(seed: int, *path: str | int) -> np.random.Generator:
    """Returns NumPy's generator for the stream ``path``."""
    return np.random.default_rng(derive(seed, *path))


def torch_generator(seed: int, *path: str | int) -> torch.Generator:
    """Returns a CPU ``torch.Generator`` for the stream ``path``."""
    import torch

    return torch.Generator().manual_seed(derive(seed, *path))
