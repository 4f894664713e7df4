"""Rows per client as two arrays: a million clients cost two arrays, not a million."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Ragged(Sequence[Index]):
    """Client k's row numbers are `rows[bounds[k] : bounds[k + 1]]`. Reads as a sequence of arrays, each a view."""

    rows: Index
    bounds: Index  # [clients + 1], from 0

    @staticmethod
    def of(parts: Iterable[NDArray[Any]]) -> Ragged:
        """The arrays given, one client's after another's."""
        if isinstance(parts, Ragged):
            return parts
        parts = [np.asarray(part, np.int64) for part in parts]
        bounds = np.concatenate([[0], np.cumsum([len(part) for part in parts], dtype=np.int64)])
        return Ragged(np.concatenate([np.empty(0, np.int64), *parts]), bounds)

    @staticmethod
    def by_owner(owner: NDArray[Any], clients: int, rows: Index | None = None) -> Ragged:
        """Row k belongs to client owner[k], or to nobody where that is negative; a client's rows keep their order.
        `rows` are their numbers, where they are not 0, 1, ..."""
        order = np.argsort(owner, kind="stable").astype(np.int64, copy=False)
        bounds = np.searchsorted(owner[order], np.arange(clients + 1)).astype(np.int64, copy=False)
        kept = order[bounds[0] : bounds[-1]]
        return Ragged(kept if rows is None else rows[kept], bounds - bounds[0])

    def ascending(self) -> Ragged:
        """The same rows, in order for each client."""
        starts = np.zeros(len(self.rows), bool)
        starts[self.bounds[:-1][self.sizes > 0]] = True
        if ((np.diff(self.rows) >= 0) | starts[1:]).all():
            return self
        return Ragged(self.rows[np.lexsort((self.rows, self.owner))], self.bounds)

    def where(self, kept: NDArray[np.bool_]) -> Ragged:
        """Those entries of `rows` for which `kept` holds."""
        return Ragged(self.rows[kept], np.concatenate([[0], np.cumsum(kept)])[self.bounds])

    @property
    def sizes(self) -> Index:
        return np.diff(self.bounds)

    @property
    def owner(self) -> Index:
        """The client of each entry of `rows`."""
        return np.repeat(np.arange(len(self)), self.sizes)

    def take(self, clients: Index) -> Ragged:
        """These clients, in this order."""
        sizes = self.sizes[clients]
        bounds = np.concatenate([[0], np.cumsum(sizes)])
        return Ragged(self.rows[np.repeat(self.bounds[clients] - bounds[:-1], sizes) + np.arange(bounds[-1])], bounds)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @overload
    def __getitem__(self, client: int) -> Index: ...
    @overload
    def __getitem__(self, client: slice) -> list[Index]: ...
    def __getitem__(self, client: int | slice) -> Index | list[Index]:
        if isinstance(client, slice):
            return [self[k] for k in range(*client.indices(len(self)))]
        if not -len(self) <= client < len(self):
            raise IndexError(f"client {client} of {len(self)}")
        client %= len(self)
        return self.rows[self.bounds[client] : self.bounds[client + 1]]

    def __iter__(self) -> Iterator[Index]:
        return (self[client] for client in range(len(self)))


def count_different(parts: Iterable[Index], rows: int) -> int:
    """How many of the numbers 0, ..., rows - 1 occur in these arrays."""
    seen = np.zeros(rows, np.bool_)
    for part in parts:
        seen[part] = True
    return int(np.count_nonzero(seen))
