"""Weights on their way from the learner to the actors: one flat buffer and a version."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 64  # bytes: every array starts on a cache line


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Weights:
    """A read-only snapshot of named arrays, stamped with the learner step that made it.

    The arrays lie in one buffer, which Ray stores once and maps into every process of a node
    without a copy. ``key`` identifies the snapshot, so that an actor that already holds it can
    skip the load.
    """

    version: int
    buffer: np.ndarray
    """uint8 of shape [bytes], read-only."""
    index: tuple[tuple[str, str, tuple[int, ...], int], ...]
    """(name, dtype, shape, offset in bytes) of each array, in the order given."""
    key: str = field(default_factory=lambda: uuid.uuid4().hex, compare=False)

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray], version: int) -> Self:
        """Copies ``arrays`` into a new buffer; later changes to them do not show."""
        index: list[tuple[str, str, tuple[int, ...], int]] = []
        end = 0
        for name, array in arrays.items():
            index.append((name, array.dtype.str, array.shape, end))
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        buffer = np.zeros(end, np.uint8)
        for (_, _, _, start), array in zip(index, arrays.values(), strict=True):
            target = buffer[start : start + array.nbytes].view(array.dtype)
            np.copyto(target.reshape(array.shape), array)
        buffer.flags.writeable = False
        return cls(version, buffer, tuple(index))

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, torch.Tensor], version: int) -> Self:
        """Snapshots tensors, such as a module's ``state_dict``; bfloat16 travels as float32."""
        import torch

        arrays: dict[str, np.ndarray] = {}
        for name, value in tensors.items():
            tensor = value.detach().cpu()
            arrays[name] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
        return cls.of(arrays, version)

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields (name, read-only view of the buffer) without copying."""
        for name, dtype, shape, start in self.index:
            size = np.dtype(dtype).itemsize * int(np.prod(shape, dtype=np.int64))
            yield name, self.buffer[start : start + size].view(dtype).reshape(shape)

    def load_into(self, module: torch.nn.Module) -> None:
        """Copies the arrays into the module's parameters and buffers of the same names.

        Raises:
            KeyError: the module lacks one of the names or has others.
            RuntimeError: a shape differs.
        """
        import warnings

        import torch

        targets: dict[str, Any] = dict(module.state_dict())
        names = {name for name, *_ in self.index}
        if names != set(targets):
            odd = sorted(names ^ set(targets))
            raise KeyError(f"weights and module differ in {len(odd)} names, first {odd[:3]}")
        with torch.no_grad(), warnings.catch_warnings():
            # the view is only read, so that its read-only flag does no harm
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            for name, array in self.arrays():
                targets[name].copy_(torch.from_numpy(array))
