"""Clients that differ in how much they have, not in what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from idiolect.data.apportion import apportion, reach_minimum
from idiolect.data.partition.split import Drawn, Labels, Rows, deal
from idiolect.data.ragged import Ragged
from idiolect.data.streams import stream


@dataclass(frozen=True)
class Quantity(Drawn):
    """Sizes in proportions drawn from Dir(alpha), brought to `minimum` from the largest; rows at random."""

    reads: ClassVar[Literal["labels", "group", "rows"]] = "rows"
    alpha: float = 0.5

    def __call__(self, labels: Labels, clients: int, seed: int) -> Rows:
        self.check(len(labels), clients)
        share = stream(seed, "quantity proportions").dirichlet(np.full(clients, float(self.alpha)))
        sizes = reach_minimum(apportion(share, len(labels))[:, None], self.minimum)
        return deal(Ragged.of([np.arange(len(labels))]), sizes, stream(seed, "quantity rows"))
