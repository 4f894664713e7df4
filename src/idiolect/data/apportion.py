"""Whole numbers in given proportions: how every count of rows in this package is rounded."""

from __future__ import annotations

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


def reach_minimum(counts: Counts, minimum: int) -> Counts:
    """Move rows between clients until each has `minimum` of them; `counts` is [clients, classes].

    The poorest client comes first. It takes rows of the class that it already holds most, from the largest
    client that can spare some, so that label skew is kept. What a client gives never brings it below the
    minimum, so each step fills the receiver, exhausts a donor or empties one of a donor's classes: the steps
    are bounded, and nothing is drawn anew.
    """
    counts = counts.copy()
    sizes = counts.sum(1)
    for receiver in np.argsort(sizes, kind="stable"):
        while sizes[receiver] < minimum:
            spare = sizes > minimum
            offered = counts[spare].any(0)
            wanted = int(np.where(offered, counts[receiver], -1).argmax())
            if counts[receiver, wanted] == 0:  # it holds nothing that anybody can spare
                wanted = int(counts[sizes.argmax()].argmax())
            donor = int(np.where(spare & (counts[:, wanted] > 0), sizes, -1).argmax())
            moved = min(minimum - sizes[receiver], sizes[donor] - minimum, counts[donor, wanted])
            counts[donor, wanted] -= moved
            counts[receiver, wanted] += moved
            sizes[donor] -= moved
            sizes[receiver] += moved
    return counts
