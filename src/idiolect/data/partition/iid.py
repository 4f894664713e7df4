"""Clients that are alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from idiolect.data.partition.split import Labels, Rows, Split, check_clients, deal
from idiolect.data.ragged import Ragged
from idiolect.data.streams import stream


@dataclass(frozen=True)
class IID(Split):
    """All rows shuffled and cut into parts whose sizes differ by at most one."""

    reads: ClassVar[Literal["labels", "group", "rows"]] = "rows"

    def __call__(self, labels: Labels, clients: int, seed: int) -> Rows:
        check_clients(len(labels), clients)
        sizes = len(labels) // clients + (np.arange(clients) < len(labels) % clients)
        return deal(Ragged.of([np.arange(len(labels))]), sizes[:, None], stream(seed, "iid rows"))
