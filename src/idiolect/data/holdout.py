"""Which of a client's rows are kept from training."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from idiolect.data.apportion import Counts, Donors, apportion_each
from idiolect.data.partition.split import Rows, deal
from idiolect.data.ragged import Index, Ragged
from idiolect.data.streams import stream, streams


class Parts(NamedTuple):
    """The clients' rows, each array ascending."""

    train: Ragged
    validation: Ragged
    test: Ragged


class Cells(NamedTuple):
    """The classes of each client, client by client: `order` sorts the rows by client and class, and cell k is
    order[first[k] : first[k + 1]], rows of one class of client `owner[k]`."""

    order: Index
    first: Index
    owner: Index

    @property
    def held(self) -> Counts:
        return np.diff(self.first)


def carve(strata: Index, rows: Rows, test: float, validation: float, seed: int) -> Parts:
    """Divide each client's rows, each part with the client's own class proportions.

    The sizes are the rounded shares, where a share that is not 0 gives at least one row as long as one
    remains for training, test before validation. Within a part, classes get their rows by the largest
    remainder; lots decide ties. A client's lots depend on the seed and its number alone.
    """
    cells = _cells(strata, rows)
    for_test = _size(rows.sizes, test, rows.sizes - 1)
    for_validation = _size(rows.sizes, validation, rows.sizes - for_test - 1)
    lots, shuffled = _draw(cells, for_test + for_validation > 0, seed)
    tested = apportion_each(cells.held, cells.owner, for_test, lots[0])
    validated = apportion_each(cells.held - tested, cells.owner, for_validation, lots[1])
    trained = cells.held - tested - validated
    place = _places(cells)
    dealt = (place >= np.repeat(trained, cells.held)).astype(np.int8)
    dealt += place >= np.repeat(trained + validated, cells.held)
    part = np.empty_like(dealt)
    part[cells.order[np.repeat(cells.first[:-1], cells.held) + shuffled]] = dealt
    return Parts(*(rows.where(part == number) for number in range(3)))


def _cells(strata: Index, rows: Rows) -> Cells:
    key = rows.owner * (int(strata.max(initial=0)) + 1) + strata[rows.rows]
    order = np.argsort(key, kind="stable")
    key = key[order]
    first = np.concatenate([[0], np.flatnonzero(key[1:] != key[:-1]) + 1])
    return Cells(order, np.append(first, len(key)), rows.owner[order[first]])


def _places(cells: Cells) -> Index:
    """Each row's place in its cell: 0, 1, ..., cell by cell."""
    return np.arange(len(cells.order)) - np.repeat(cells.first[:-1], cells.held)


def _draw(cells: Cells, needed: NDArray[np.bool_], seed: int) -> tuple[tuple[Index, Index], Index]:
    """Two lots for each cell, and the places of each cell's rows shuffled; client by client, where needed."""
    bounds = np.searchsorted(cells.owner, np.arange(len(needed) + 1))
    number = np.arange(len(cells.owner)) - bounds[cells.owner]
    lots, places = (number, number.copy()), _places(cells)
    clients = np.flatnonzero(needed)
    of_client = zip(bounds[clients].tolist(), bounds[clients + 1].tolist(), strict=True)
    draws = streams(seed, (f"holdout of client {client}" for client in clients.tolist()))
    for random, (start, stop) in zip(draws, of_client, strict=True):
        random.shuffle(lots[0][start:stop])
        random.shuffle(lots[1][start:stop])
        edges = cells.first[start : stop + 1].tolist()
        for low, high in pairwise(edges):
            if high - low > 1:  # a single row takes no draw
                random.shuffle(places[low:high])
    return lots, places


def deal_official(strata: Index, owned: Rows, official: Index, seed: int) -> Rows:
    """Deal the official test rows so that each client's test set follows its own class proportions.

    A client that owns the share s of the training rows of a class gets the share s of that class's test rows.
    Rounding is carried from class to class, so that a client's test set as a whole has the right size, too. A
    class that nobody owns is left out. A client that rounding leaves with nothing is given one row, of a
    class that it owns.
    """
    classes = int(strata.max()) + 1
    held = np.bincount(owned.owner * classes + strata[owned.rows], minlength=len(owned) * classes)
    held = held.reshape(len(owned), classes)
    available = np.bincount(strata[official], minlength=classes)
    counts = _nobody_empty(_carried(held, available), held)
    rows = [official[strata[official] == number][: counts[:, number].sum()] for number in range(classes)]
    return deal(Ragged.of(rows), counts, stream(seed, "official test rows"))


def _size(rows: Counts, share: float, most: Counts) -> Counts:
    if share == 0:
        return np.zeros_like(rows)
    wanted = np.floor(rows * share + 0.5).astype(np.int64)
    return np.maximum(0, np.minimum(np.maximum(wanted, 1), most))


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
    donors = Donors(counts, 1)
    for client in np.flatnonzero((counts.sum(1) == 0) & (held.sum(1) > 0)).tolist():
        for number in np.argsort(-held[client], kind="stable")[: np.count_nonzero(held[client])].tolist():
            if (donor := donors.largest(number)) is not None:
                donors.give(donor, client, number, 1)
                break
    return donors.counts
