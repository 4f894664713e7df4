"""Label skew by the Dirichlet distribution, the usual one in the literature."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from idiolect.data.apportion import apportion, reach_minimum
from idiolect.data.partition.split import Drawn, Labels, Rows, deal, rows_by_class
from idiolect.data.streams import stream


@dataclass(frozen=True)
class Dirichlet(Drawn):
    """Each class is divided over all clients in proportions drawn from Dir(alpha); small alpha, strong skew.

    Hsu, Qi and Brown, 2019 (arXiv:1909.06335), with the proportions over clients as in most later code.
    Public code draws again until the smallest client is large enough, which for many clients may never end
    and favours balanced draws. Here the first draw stands, and clients below `minimum` rows are filled up
    from the largest ones.
    """

    def __call__(self, labels: Labels, clients: int, seed: int) -> Rows:
        self.check(len(labels), clients)
        rows = rows_by_class(labels)
        shares = stream(seed, "dirichlet proportions").dirichlet(np.full(clients, float(self.alpha)), len(rows))
        counts = np.stack([apportion(share, len(these)) for share, these in zip(shares, rows, strict=True)], 1)
        return deal(rows, reach_minimum(counts, self.minimum), stream(seed, "dirichlet rows"))
