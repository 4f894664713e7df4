"""Which of a client's rows are kept from training."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from idiolect.data.apportion import Counts, apportion
from idiolect.data.partition.split import Rows, deal
from idiolect.data.streams import stream

Index = NDArray[np.int64]


class Parts(NamedTuple):
    """One client's rows, each array ascending."""

    train: Index
    validation: Index
    test: Index


def carve(strata: Index, rows: Index, test: float, validation: float, random: np.random.Generator) -> Parts:
    """Divide one client's rows, each part with the client's own class proportions.

    The sizes are the rounded shares, where a share that is not 0 gives at least one row as long as one
    remains for training, test before validation. Within a part, classes get their rows by the largest
    remainder; lots decide ties.
    """
    found, classes = np.unique(strata[rows], return_inverse=True)
    held = np.bincount(classes, minlength=len(found))
    for_test = apportion(held, _size(len(rows), test, len(rows) - 1), random.permutation(len(found)))
    rest = held - for_test
    for_validation = apportion(rest, _size(len(rows), validation, rest.sum() - 1), random.permutation(len(found)))
    counts = np.stack([rest - for_validation, for_validation, for_test])
    return Parts(*deal([rows[classes == number] for number in range(len(found))], counts, random))


def deal_official(strata: Index, owned: Rows, official: Index, seed: int) -> Rows:
    """Deal the official test rows so that each client's test set follows its own class proportions.

    A client that owns the share s of the training rows of a class gets the share s of that class's test rows.
    Rounding is carried from class to class, so that a client's test set as a whole has the right size, too. A
    class that nobody owns is left out. A client that rounding leaves with nothing is given one row, of a
    class that it owns.
    """
    classes = int(strata.max()) + 1
    held = np.stack([np.bincount(strata[rows], minlength=classes) for rows in owned])
    available = np.bincount(strata[official], minlength=classes)
    counts = _nobody_empty(_carried(held, available), held)
    rows = [official[strata[official] == number][: counts[:, number].sum()] for number in range(classes)]
    return deal(rows, counts, stream(seed, "official test rows"))


def _size(rows: int, share: float, most: int) -> int:
    wanted = int(np.floor(rows * share + 0.5))
    return 0 if share == 0 else max(0, min(max(wanted, 1), int(most)))


def _carried(held: Counts, available: Counts) -> Counts:
    counts, owed = np.zeros_like(held), np.zeros(len(held))
    for number in np.flatnonzero(held.sum(0)):
        quota = held[:, number] * float(available[number]) / held[:, number].sum()
        counts[:, number] = np.floor(quota)
        claim = np.where(held[:, number] > 0, quota - counts[:, number] + owed, -np.inf)
        left = available[number] - counts[:, number].sum()
        counts[np.argsort(-claim, kind="stable")[:left], number] += 1
        owed += quota - counts[:, number]
    return counts


def _nobody_empty(counts: Counts, held: Counts) -> Counts:
    counts = counts.copy()
    for client in np.flatnonzero((counts.sum(1) == 0) & (held.sum(1) > 0)):
        for number in np.argsort(-held[client], kind="stable")[: np.count_nonzero(held[client])]:
            donors = np.where(counts[:, number] > 0, counts.sum(1), 0)
            if donors.max() > 1:
                counts[donors.argmax(), number] -= 1
                counts[client, number] += 1
                break
    return counts
