"""Label skew as PFLlib draws it: the Dirichlet distribution among the clients that are not full."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from idiolect.data.apportion import Counts, apportion, reach_minimum
from idiolect.data.partition.split import Drawn, Labels, Rows, check_clients, deal, rows_by_class
from idiolect.data.streams import stream


@dataclass(frozen=True)
class Balanced(Drawn):
    """PFLlib's Dirichlet: class by class in proportions from Dir(alpha), without the clients that are full.

    `separate_data(partition="dir")` of PFLlib, after Yurochkin et al., ICML 2019: a client that has come to the average
    number of rows gets nothing of the classes that follow, so that sizes differ less than under `dirichlet`.

    minimum: as there, never more than half of the average. 40 are a batch of 10 divided by the quarter of test rows,
    the bound of the versions that the papers used; later ones have 1. There everything is drawn again until the
    smallest client is large enough. Here the first draw stands, and clients below the minimum are filled up from the
    largest.
    """

    minimum: int = 40

    def __call__(self, labels: Labels, clients: int, seed: int) -> Rows:
        check_clients(len(labels), clients)
        rows = rows_by_class(labels)
        drawn = stream(seed, "balanced proportions").dirichlet(np.full(clients, float(self.alpha)), len(rows))
        counts = np.zeros((clients, len(rows)), np.int64)
        for number, (share, these) in enumerate(zip(drawn, rows, strict=True)):
            counts[:, number] = apportion(self._among(share, counts, len(labels) / clients), len(these))
        least = max(1, min(self.minimum, len(labels) // (2 * clients)))
        return deal(rows, reach_minimum(counts, least), stream(seed, "balanced rows"))

    @staticmethod
    def _among(share: np.ndarray, counts: Counts, average: float) -> np.ndarray:
        """The proportions of the clients with room; equal ones where the draw leaves all of them without any."""
        room = counts.sum(1) < average
        return share * room if (share * room).sum() > 0 else room.astype(float)
