"""The clients that the data itself names."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapreplace
from typing import ClassVar, Literal

import numpy as np

from idiolect.data.apportion import Counts
from idiolect.data.partition.split import Labels, Rows, Split, check_clients, rows_by_class
from idiolect.data.ragged import Ragged
from idiolect.errors import UsageError

SURPLUS = ("refuse", "largest", "merge")


@dataclass(frozen=True)
class Given(Split):
    """One client per group of the data set (`Dataset.group`), in the order of the groups' names.

    surplus: what to do with more groups than clients. "refuse" them; keep the "largest" groups, leaving out
    the rows of the others; or "merge" whole groups, the largest first, each into the client that is smallest
    so far.
    """

    reads: ClassVar[Literal["labels", "group", "rows"]] = "group"
    surplus: str = "refuse"

    def __post_init__(self) -> None:
        if self.surplus not in SURPLUS:
            raise UsageError(f"given: expected surplus to be one of {', '.join(SURPLUS)}, found {self.surplus!r}.")

    def __call__(self, labels: Labels, clients: int, seed: int) -> Rows:
        groups = rows_by_class(labels)
        check_clients(len(labels), clients, f"{len(groups)} clients")
        if len(groups) < clients or (len(groups) > clients and self.surplus == "refuse"):
            fewer = "" if len(groups) < clients else ", or 'given:largest' or 'given:merge'"
            raise UsageError(
                f"given: expected as many clients as the data has groups, found {len(groups)} groups for "
                f"{clients} clients; ask for {len(groups)} clients{fewer}."
            )
        by_size = np.argsort(-groups.sizes, kind="stable")
        client = np.full(len(groups), -1)  # of each group
        if self.surplus == "merge":
            client[by_size] = _smallest_so_far(groups.sizes[by_size], clients)
        else:
            client[np.sort(by_size[:clients])] = np.arange(clients)
        owner = np.empty(len(labels), np.int64)
        owner[groups.rows] = np.repeat(client, groups.sizes)
        return Ragged.by_owner(owner, clients)


def _smallest_so_far(sizes: Counts, clients: int) -> list[int]:
    """Who gets each group in turn: the first of the clients that have least."""
    heap, chosen = [(0, client) for client in range(clients)], []
    for more in sizes.tolist():
        size, client = heap[0]
        heapreplace(heap, (size + more, client))
        chosen.append(client)
    return chosen
