"""Clients with a few pieces of the data sorted by label."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from idiolect.data.partition.split import Labels, Rows, Split, check_clients, check_whole, is_whole
from idiolect.data.ragged import Ragged
from idiolect.data.streams import stream
from idiolect.errors import UsageError


@dataclass(frozen=True)
class Shards(Split):
    """McMahan's shards: rows sorted by label, cut into equal shards, and `shards` of them dealt to each client.

    McMahan et al., AISTATS 2017, section 3: 200 shards of 300 digits, two for each of 100 clients. Within a label rows
    keep their order; sizes of shards differ by at most one. A client may get two shards of one label, and a shard may
    hold the end of one label and the beginning of the next; `pathological` gives each client distinct classes.
    """

    shards: int = 2

    def __post_init__(self) -> None:
        check_whole(self, "shards", self.shards)

    def __call__(self, labels: Labels, clients: int, seed: int) -> Rows:
        check_clients(len(labels), clients, self._nearest(len(labels), clients) if is_whole(clients, 1) else "")
        number = clients * self.shards
        if number > len(labels):
            raise UsageError(
                f"shards: expected a row for each of clients * shards = {clients} * {self.shards} = {number} shards, "
                f"found {len(labels)} rows; ask for {self._nearest(len(labels), clients)}."
            )
        shard = np.arange(len(labels)) * number // len(labels)  # of the rows in the order of their labels
        owner = np.empty(len(labels), np.int64)
        dealt = stream(seed, "shards").permutation(number) // self.shards
        owner[np.argsort(labels, kind="stable")] = dealt[shard]
        return Ragged.by_owner(owner, clients)

    def _nearest(self, rows: int, clients: int) -> str:
        either = [f"shards={rows // clients}"] if clients <= rows else []
        either += [f"{rows // self.shards} clients"] if self.shards <= rows else []
        return " or ".join(either) or f"shards=1 and {rows} clients"
