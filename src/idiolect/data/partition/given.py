"""The clients that the data itself names."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapreplace
from typing import ClassVar, Literal

import numpy as np

from idiolect.data.apportion import Counts
from idiolect.data.partition.split import Labels, Rows, Split, check_clients, check_many, check_whole, rows_by_class
from idiolect.data.ragged import Ragged
from idiolect.errors import UsageError

SURPLUS = ("refuse", "largest", "merge")


@dataclass(frozen=True)
class Given(Split):
    """One client per group of the data set (`Dataset.group`), in the order of the groups' names.

    surplus: what to do with more groups than clients. "refuse" them; keep the "largest" groups, leaving out
    the rows of the others; or "merge" whole groups, the largest first, each into the client that is smallest
    so far.
    minimum: groups with fewer rows are left out first.
    """

    reads: ClassVar[Literal["labels", "group", "rows"]] = "group"
    surplus: str = "refuse"
    minimum: int = 1

    def __post_init__(self) -> None:
        check_whole(self, "minimum", self.minimum)
        if self.surplus not in SURPLUS:
            raise UsageError(f"given: expected surplus to be one of {', '.join(SURPLUS)}, found {self.surplus!r}.")

    def __call__(self, labels: Labels, clients: int, seed: int) -> Rows:
        check_many(clients)
        found = rows_by_class(labels)
        groups = np.flatnonzero(found.sizes >= self.minimum)
        if not len(groups):
            largest = int(found.sizes.max())
            raise UsageError(
                f"given: expected a group with at least minimum={self.minimum} rows, the largest has {largest}; ask "
                f"for minimum={largest} and {(found.sizes == largest).sum()} clients."
            )
        check_clients(len(labels), clients, f"{len(groups)} clients")
        if len(groups) < clients or (len(groups) > clients and self.surplus == "refuse"):
            fewer = "" if len(groups) < clients else ", or 'given:largest' or 'given:merge'"
            raise UsageError(
                f"given: expected as many clients as the data has groups{self._of_size}, found {len(groups)} groups "
                f"for {clients} clients; ask for {len(groups)} clients{fewer}."
            )
        by_size = groups[np.argsort(-found.sizes[groups], kind="stable")]
        client = np.full(len(found), -1)  # of each group
        if self.surplus == "merge":
            client[by_size] = _smallest_so_far(found.sizes[by_size], clients)
        else:
            client[np.sort(by_size[:clients])] = np.arange(clients)
        owner = np.empty(len(labels), np.int64)
        owner[found.rows] = np.repeat(client, found.sizes)
        return Ragged.by_owner(owner, clients)

    @property
    def _of_size(self) -> str:
        return f" of {self.minimum} rows or more" if self.minimum > 1 else ""


def _smallest_so_far(sizes: Counts, clients: int) -> list[int]:
    """Who gets each group in turn: the first of the clients that have least."""
    heap, chosen = [(0, client) for client in range(clients)], []
    for more in sizes.tolist():
        size, client = heap[0]
        heapreplace(heap, (size + more, client))
        chosen.append(client)
    return chosen
