"""Weights on their way from the learner to the actors: buckets of bytes, a version and a digest."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import xxhash

from heliostat.errors import WeightsDiffer

if TYPE_CHECKING:
    import torch

BUCKET_BYTES = 64 * 2**20
"""Most that a receiver holds beside its own model while it takes new weights."""
_ALIGNMENT = 64  # bytes: every array starts on a cache line, and a cut splits no number


class Entry(NamedTuple):
    """One array's place in the stream of all bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """In bytes."""

    @property
    def size(self) -> int:
        """Elements of the array."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return np.dtype(self.dtype).itemsize * self.size


class Piece(NamedTuple):
    """A run of one array's elements that lies in one bucket."""

    entry: Entry
    first: int
    """Its first element, counted over the flattened array."""
    values: np.ndarray
    """Read-only, flat, of the array's type."""


@runtime_checkable
class Bucket(Protocol):
    """Consecutive bytes of the stream, here or in an object store."""

    def read(self) -> np.ndarray:
        """Returns uint8 [bytes], read-only; whoever drops it gives its memory back."""
        ...


@dataclass(frozen=True, slots=True)
class Held:
    """A bucket in this process."""

    data: np.ndarray

    def read(self) -> np.ndarray:
        """Returns the data without a copy."""
        return self.data


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Weights:
    """A read-only snapshot of named arrays, stamped with the learner step that made it.

    The arrays lie in one stream of bytes that is cut into buckets. Ray stores each bucket once and
    maps it into every process of a node without a copy; a receiver reads one after the other and
    holds its model and one bucket. ``key`` is a digest of names, types, shapes and values: an actor
    that already holds them skips the load, and one that has loaded them proves it.
    """

    version: int
    key: str
    """32 hexadecimal digits, equal for equal weights whatever their version."""
    index: tuple[Entry, ...]
    """In the order given."""
    buckets: tuple[Bucket, ...] = field(repr=False)
    bucket_bytes: int = BUCKET_BYTES
    """Size of every bucket but the last."""

    @classmethod
    def of(
        cls, arrays: Mapping[str, np.ndarray], version: int, bucket_bytes: int = BUCKET_BYTES
    ) -> Self:
        """Copies ``arrays`` into new buckets; later changes to them do not show.

        Raises:
            ValueError: a bucket would split a number.
        """
        if bucket_bytes < 1 or bucket_bytes % _ALIGNMENT:
            raise ValueError(
                f"bucket_bytes: expected a multiple of {_ALIGNMENT}, found {bucket_bytes}"
            )
        index: list[Entry] = []
        end = 0
        for name, array in arrays.items():
            index.append(Entry(name, array.dtype.str, array.shape, end))
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        cuts = range(0, end, bucket_bytes)
        buckets = [np.zeros(min(bucket_bytes, end - cut), np.uint8) for cut in cuts]
        for entry, array in zip(index, arrays.values(), strict=True):
            given, place = _bytes(array), entry.start
            while len(given):
                number, offset = divmod(place, bucket_bytes)
                part = given[: bucket_bytes - offset]
                buckets[number][offset : offset + len(part)] = part
                given, place = given[len(part) :], place + len(part)
        for bucket in buckets:
            bucket.flags.writeable = False
        key = _digest(index, arrays.values())
        return cls(version, key, tuple(index), tuple(map(Held, buckets)), bucket_bytes)

    @classmethod
    def of_tensors(
        cls,
        tensors: Mapping[str, torch.Tensor],
        version: int,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> Self:
        """Snapshots tensors, such as a module's ``state_dict``; bfloat16 travels as float32."""
        arrays = {name: _array(tensor) for name, tensor in tensors.items()}
        return cls.of(arrays, version, bucket_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(entry.nbytes for entry in self.index)

    def moved(self, move: Callable[[np.ndarray], Bucket]) -> Self:
        """Returns the same weights with each bucket's data put elsewhere."""
        return replace(self, buckets=tuple(move(bucket.read()) for bucket in self.buckets))

    def pieces(self) -> Iterator[Piece]:
        """Yields all values, bucket after bucket; a bucket is given back before the next is read.

        Drop a piece before you ask for the next one, or its bucket stays.
        """
        waiting = deque(self.index)
        for number, bucket in enumerate(self.buckets):
            data = bucket.read()
            begin, end = number * self.bucket_bytes, number * self.bucket_bytes + len(data)
            while waiting and waiting[0].start < end:
                entry = waiting[0]
                low, high = max(entry.start, begin), min(entry.start + entry.nbytes, end)
                values = data[low - begin : high - begin].view(entry.dtype)
                yield Piece(entry, (low - entry.start) // values.itemsize, values)
                del values
                if entry.start + entry.nbytes > end:
                    break
                waiting.popleft()
            del data
        for entry in waiting:  # without elements, behind the last byte
            yield Piece(entry, 0, np.empty(0, entry.dtype))

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields (name, read-only array): a view where it lies in one bucket, else a copy."""
        parts: list[np.ndarray] = []
        for entry, first, values in self.pieces():
            parts.append(values if len(values) == entry.size else values.copy())
            if first + len(values) == entry.size:
                flat = parts[0] if len(parts) == 1 else np.concatenate(parts)
                flat.flags.writeable = False
                yield entry.name, flat.reshape(entry.shape)
                parts.clear()

    def load_into(self, module: torch.nn.Module) -> None:
        """Copies the arrays into the module's parameters and buffers, and proves that it did.

        Raises:
            KeyError: the module lacks one of the names or has others.
            RuntimeError: a shape differs, or a tensor of the module is not contiguous.
            WeightsDiffer: afterwards the module holds other values.
        """
        import warnings

        import torch

        targets: dict[str, Any] = dict(module.state_dict())
        names = {entry.name for entry in self.index}
        if names != set(targets):
            odd = sorted(names ^ set(targets))
            raise KeyError(f"weights and module differ in {len(odd)} names, first {odd[:3]}")
        for entry in self.index:
            if (found := tuple(targets[entry.name].shape)) != entry.shape:
                raise RuntimeError(f"{entry.name}: expected shape {entry.shape}, found {found}")
        with torch.no_grad(), warnings.catch_warnings():
            # the view is only read, so that its read-only flag does no harm
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            for entry, first, values in self.pieces():
                target = targets[entry.name].view(-1)[first : first + len(values)]
                target.copy_(torch.from_numpy(values))
                del values
        held = (_array(targets[entry.name]) for entry in self.index)
        if (found := _digest(self.index, held)) != self.key:
            raise WeightsDiffer(
                f"version {self.version}: the learner sent weights of digest {self.key}, the "
                f"model holds {found} after the load; its tensors must be of the types sent and "
                "nothing else may write to them"
            )


def _array(tensor: torch.Tensor) -> np.ndarray:
    """Returns a tensor's values on the CPU, without a copy where they are there already."""
    import torch

    value = tensor.detach().cpu()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _digest(index: Iterable[Entry], arrays: Iterable[np.ndarray]) -> str:
    """Returns 128 bits over names, types, shapes and values; not meant against forgers."""
    total = xxhash.xxh3_128()
    for entry, array in zip(index, arrays, strict=True):
        same = array if array.dtype.str == entry.dtype else array.astype(entry.dtype)
        total.update(repr((entry.name, entry.dtype, entry.shape)).encode())
        total.update(_bytes(same).data)
    return total.hexdigest()
