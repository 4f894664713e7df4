"""Whole numbers in given proportions: how every count of rows in this package is rounded."""

from __future__ import annotations

from heapq import heappop, heapreplace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]


def apportion(weights: NDArray[Any], total: int, lots: NDArray[Any] | None = None) -> Counts:
    """Whole numbers that sum to `total`, proportional to `weights`, by the largest remainder (Hamilton).

    Equal remainders are decided by the smaller entry of `lots` (the position, without lots). An entry without
    weight gets nothing, and with whole-numbered weights and total <= sum of weights no entry gets more than
    its weight.
    """
    if total == 0:
        return np.zeros(len(weights), np.int64)
    quota: NDArray[np.float64] = weights * float(total) / weights.sum()
    counts: Counts = np.floor(quota).astype(np.int64)
    remainder = np.where(weights > 0, quota - counts, -1.0)
    order = np.lexsort((np.arange(len(weights)) if lots is None else lots, -remainder))
    counts[order[: total - counts.sum()]] += 1
    return counts


def apportion_each(weights: Counts, owner: Counts, totals: Counts, lots: Counts) -> Counts:
    """`apportion` for many at once: entry k is one of owner[k]'s, who gets totals[owner[k]] in all. Owners ascend."""
    sums = np.bincount(owner, weights, len(totals))
    quota = weights * totals[owner].astype(np.float64) / sums[owner]
    counts: Counts = np.floor(quota).astype(np.int64)
    remainder = np.where(weights > 0, quota - counts, -1.0)
    left = totals - np.bincount(owner, counts, len(totals)).astype(np.int64)
    order = np.lexsort((lots, -remainder, owner))
    first = np.searchsorted(owner, np.arange(len(totals)))
    counts[order] += np.arange(len(owner)) - first[owner] < left[owner]  # owner[order] is owner
    return counts


def reach_minimum(counts: Counts, minimum: int) -> Counts:
    """Move rows between clients until each has `minimum` of them; `counts` is [clients, classes].

    The poorest client comes first. It takes rows of the class that it already holds most, from the largest
    client that can spare some, so that label skew is kept. What a client gives never brings it below the
    minimum, so each step fills the receiver, exhausts a donor or empties one of a donor's classes: the steps
    are bounded, and nothing is drawn anew.
    """
    donors = Donors(counts, minimum)
    sizes = counts.sum(1)
    poor = np.flatnonzero(sizes < minimum)
    for receiver in poor[np.argsort(sizes[poor], kind="stable")].tolist():
        while (need := minimum - donors.sizes[receiver]) > 0:
            wanted = donors.offered(receiver)
            if wanted is None:  # it holds nothing that anybody can spare
                wanted = donors.commonest()
            donors.give(donors.largest(wanted), receiver, wanted, need)
    return donors.counts


class Donors:
    """Clients with more than `least` rows, found by size. `counts` [clients, classes] is copied, then kept up to date.

    A donor's size only falls and a receiver never becomes one, so the largest is on top of a heap whose entries
    are put right only when they get there.
    """

    def __init__(self, counts: Counts, least: int) -> None:
        self.counts, self.least = np.array(counts, np.int64, order="C"), least
        self._sizes = self.counts.sum(1)
        self.sizes, self._held = self._sizes.data, self.counts.data  # read a number at a time, faster than the arrays
        able = self._sizes > least
        self._heaps = [self._heap(able & (column > 0)) for column in self.counts.T]
        self._all = self._heap(able)

    def _heap(self, able: NDArray[np.bool_]) -> list[int]:
        """The able clients, the largest first, then by number; each as one integer. A sorted list is a heap."""
        clients = np.flatnonzero(able)
        keys: list[int] = np.sort(clients - self._sizes[clients] * len(able)).tolist()
        return keys

    def largest(self, of: int) -> int | None:
        """The largest client, the first of equals, that can spare rows of this class."""
        heap, sizes, held, clients = self._heaps[of], self.sizes, self._held, len(self.counts)
        while heap:
            below, client = divmod(heap[0], clients)
            size = sizes[client]
            if size <= self.least or held[client, of] == 0:
                heappop(heap)
            elif size < -below:
                heapreplace(heap, client - size * clients)
            else:
                return client
        return None

    def commonest(self) -> int:
        """The class of which the largest of all has most."""
        heap, clients = self._all, len(self.counts)
        while (size := self.sizes[client := heap[0] % clients]) < -(heap[0] // clients):
            heapreplace(heap, client - size * clients)
        return int(self.counts[client].argmax())

    def offered(self, to: int) -> int | None:
        """The class that this client holds most, among those that somebody can spare."""
        held = self.counts[to].tolist()
        for number in sorted(filter(held.__getitem__, range(len(held))), key=lambda number: -held[number]):
            if self.largest(number) is not None:
                return number
        return None

    def give(self, donor: int | None, receiver: int, of: int, most: int) -> None:
        """As many rows of a class as the donor can spare."""
        assert donor is not None  # `minimum` of all clients together is no more than there is
        moved = min(most, self.sizes[donor] - self.least, self._held[donor, of])
        for client, change in ((donor, -moved), (receiver, moved)):
            self._held[client, of] += change
            self.sizes[client] += change
