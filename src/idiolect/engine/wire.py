"""How states and replies cross a process boundary: tensors as bytes in a buffer, the rest as small plain tuples.

`pack` replaces every tensor of a nested value by its address; `unpack` puts them back. An `Arena` is a buffer that
gives out addresses; a `Layout` is the fixed record of a value whose names, shapes and dtypes never change (a client's
private state).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from idiolect.tree import Tree

Address = tuple[int, torch.dtype, tuple[int, ...]]
ALIGNED = 64


def pack(value: Any, put: Callable[[Tensor], Any]) -> Any:
    """The value with every tensor replaced by what `put` makes of it, in plain tuples."""
    if isinstance(value, Tree):
        return ("T", tuple(value.keys()), tuple([put(v) for v in value.values()]))
    if isinstance(value, Tensor):
        return ("t", put(value))
    if isinstance(value, dict | Mapping):  # dict first: asking an abstract class takes ten times as long
        return ("d", tuple(value), tuple([pack(v, put) for v in value.values()]))
    if isinstance(value, list | tuple):
        return ("l", tuple([pack(v, put) for v in value]))
    return ("=", value)


def unpack(packed: Any, get: Callable[[Any], Tensor]) -> Any:
    kind = packed[0]
    if kind == "t":
        return get(packed[1])
    if kind == "T":
        return Tree(zip(packed[1], map(get, packed[2]), strict=True))
    if kind == "d":
        return {k: unpack(v, get) for k, v in zip(packed[1], packed[2], strict=True)}
    if kind == "l":
        return [unpack(v, get) for v in packed[1]]
    return packed[1]


def tensors(value: Any) -> list[Tensor]:
    """Every tensor of a nested value."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, Tree):
        found.extend(value.values())
    elif isinstance(value, dict | Mapping):
        for v in value.values():
            _collect(v, found)
    elif isinstance(value, list | tuple):
        for v in value:
            _collect(v, found)


def nbytes(value: Any) -> int:
    """Bytes of a nested value's tensors; one that stands in several places is sent once."""
    distinct = {(t.data_ptr(), t.dtype, t.shape): t.nbytes for t in tensors(value)}
    return sum(distinct.values())


def sizes(values: Iterable[list[Any]]) -> Iterator[int]:
    """Bytes of one list of values after another; the same objects again are counted up once."""
    known: dict[tuple[int, ...], tuple[list[Any], int]] = {}  # an identity holds while the object lives
    for value in values:
        key = tuple(map(id, value))
        if key not in known:
            known[key] = value, nbytes(value)
        yield known[key][1]


def shared_bytes(size: int) -> Tensor:
    """A zeroed buffer in shared memory that has no name: it is gone with the last process that holds it. Pages that
    are never touched cost nothing."""
    return torch.tensor([], dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(max(size, 1)))


def view(buffer: Tensor, address: Address) -> Tensor:
    offset, dtype, shape = address
    count = 1
    for s in shape:
        count *= s
    return buffer.narrow(0, offset, count * dtype.itemsize).view(dtype).view(shape)


class Arena:
    """A buffer that is filled from its start and emptied at once. `grow` makes a larger one where it is full."""

    def __init__(self, size: int = 1 << 16) -> None:
        self.buffer = shared_bytes(size)
        self.grown = True  # the other side does not have this buffer yet
        self.clear()

    def clear(self) -> None:
        self.used = 0
        self._places: dict[tuple[int, torch.dtype, torch.Size, tuple[int, ...]], Address] = {}
        self._held: list[Tensor] = []

    def reserve(self, size: int) -> None:
        """Room for `size` bytes in an empty arena."""
        if size > len(self.buffer):
            self.buffer = shared_bytes(2 * size)
            self.grown = True

    def put(self, tensor: Tensor) -> Address:
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if place not in self._places:
            address = (self.used, tensor.dtype, tuple(tensor.shape))
            view(self.buffer, address).copy_(tensor.detach())
            self.used += -(-tensor.numel() * tensor.element_size() // ALIGNED) * ALIGNED
            self._places[place] = address
            self._held.append(tensor)  # an address is only an identity while the tensor lives
        return self._places[place]

    def fill(self, value: Any) -> Any:
        """Empty the arena and pack the value into it."""
        self.clear()
        self.reserve(room(value))
        return pack(value, self.put)

    def get(self, address: Address) -> Tensor:
        return view(self.buffer, address)


def room(value: Any) -> int:
    """Bytes that a value needs in an arena at most."""
    return sum(-(-t.numel() * t.element_size() // ALIGNED) * ALIGNED for t in tensors(value)) + ALIGNED


class Layout:
    """A fixed record: where each tensor of a value lies in `size` bytes."""

    def __init__(self, example: Any) -> None:
        self.size = 0
        self.entries: list[Address] = []
        self.packed = pack(example, self._place)

    def _place(self, tensor: Tensor) -> Address:
        address = (self.size, tensor.dtype, tuple(tensor.shape))
        self.size += -(-tensor.numel() * tensor.element_size() // ALIGNED) * ALIGNED
        self.entries.append(address)
        return address

    def write(self, buffer: Tensor, base: int, value: Any) -> None:
        held = buffer.untyped_storage().data_ptr()
        # a value may be a view of another entry, which must not have changed when its turn comes
        values = [t.clone() if t.untyped_storage().data_ptr() == held else t for t in tensors(value)]
        for (offset, dtype, shape), tensor in zip(self.entries, values, strict=True):
            view(buffer, (base + offset, dtype, shape)).copy_(tensor.detach())

    def read(self, buffer: Tensor, base: int) -> Any:
        return unpack(self.packed, lambda a: view(buffer, (base + a[0], a[1], a[2])))
