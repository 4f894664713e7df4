"""A few classes for each client, in skewed amounts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from idiolect.data.apportion import Counts, apportion
from idiolect.data.partition.pathological import Pathological
from idiolect.data.partition.split import check_alpha, check_whole


@dataclass(frozen=True)
class Extended(Pathological):
    """Extended Dirichlet: each client gets `classes` classes, and each class is divided by Dir(alpha) among its own.

    Li and Lyu, NeurIPS 2023 (arXiv:2311.03154), ExDir(C, alpha). Classes are dealt as by `pathological`, which this
    approaches for a large alpha; with all classes it is `dirichlet`.

    each: rows of each of its classes that a client has before the rest is divided: nobody is left without, and nothing
    is drawn again.
    """

    alpha: float = 0.1
    each: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_alpha(self, self.alpha)
        check_whole(self, "each", self.each)

    @property
    def _each(self) -> int:
        return self.each

    def shares(self, holds: NDArray[np.int64], rows: int, random: np.random.Generator) -> Counts:
        drawn = np.zeros(len(holds))
        drawn[holds > 0] = random.dirichlet(np.full(holds.sum(), float(self.alpha)))
        return holds * self.each + apportion(drawn, rows - int(holds.sum()) * self.each)
