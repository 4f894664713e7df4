"""Clients that know only a few classes each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from idiolect.data.apportion import Counts, apportion
from idiolect.data.partition.split import (
    Labels,
    Rows,
    Split,
    check_clients,
    check_whole,
    deal,
    is_whole,
    rows_by_class,
)
from idiolect.data.streams import stream
from idiolect.errors import UsageError


@dataclass(frozen=True)
class Pathological(Split):
    """Every client holds exactly `classes` classes; the numbers of holders per class differ by at most one.

    The name is that of McMahan et al. (AISTATS 2017), who deal two shards of label-sorted rows to each
    client; there a client may get two shards of one class. Here the classes of a client are distinct, which
    classes meet at a client is random, and a class's rows are divided evenly among its holders.
    """

    classes: int = 2

    def __post_init__(self) -> None:
        check_whole(self, "classes", self.classes)

    def __call__(self, labels: Labels, clients: int, seed: int) -> Rows:
        rows = rows_by_class(labels)
        self._check(rows, len(labels), clients)
        held = self._holdings(len(rows), clients, stream(seed, f"{self.name()} classes"))
        for these, holders in zip(rows, held.sum(0), strict=True):
            if holders * self._each > len(these):
                number = "a row" if self._each == 1 else f"each={self._each} rows"
                raise UsageError(
                    f"{self.name()}: expected {number} of each class for each of its holders, found {len(these)} rows "
                    f"of class {labels[these[0]]} for {holders} clients; ask for {self._nearest(rows, clients)}."
                )
        random = stream(seed, f"{self.name()} shares")
        counts = [self.shares(column, len(these), random) for column, these in zip(held.T, rows, strict=True)]
        return deal(rows, np.stack(counts, 1), stream(seed, f"{self.name()} rows"))

    @property
    def _each(self) -> int:
        """Rows that every holder of a class has of it at least."""
        return 1

    def shares(self, holds: Counts, rows: int, random: np.random.Generator) -> Counts:
        """A class's rows for each client: `holds` is 1 for its holders."""
        return apportion(holds, rows)

    def _check(self, rows: Rows, total: int, clients: int) -> None:
        check_clients(total, clients, self._nearest(rows, clients) if is_whole(clients, 1) else "")
        if self.classes > len(rows):
            raise UsageError(
                f"{self.name()}: expected at most {len(rows)} classes per client, as the data has no more, found "
                f"classes={self.classes}; ask for {self._nearest(rows, clients)}."
            )
        if clients * self.classes < len(rows):
            raise UsageError(
                f"{self.name()}: expected clients * classes of at least {len(rows)}, so that every class has a holder, "
                f"found {clients} * {self.classes}; ask for {self._nearest(rows, clients)}."
            )

    def _nearest(self, rows: Rows, clients: int) -> str:
        """What can be had whatever the lots decide: every class has a holder, and the smallest a row for each."""
        # that the holders have at most
        known, places = len(rows), len(rows) * (int(rows.sizes.min()) // self._each)

        def near(wanted: int, other: int, most: int) -> int | None:
            low, high = -(-known // other), min(most, places // other)
            return min(max(wanted, low), high) if low <= high else None

        found = []
        if (classes := near(self.classes, clients, known)) is not None:
            found.append(f"classes={classes}")
        if self.classes <= known and (others := near(clients, self.classes, places)) is not None:
            found.append(f"{others} clients")
        if not found and (others := near(clients, 1, places)) is not None:
            found.append(f"classes=1 and {others} clients")
        return " or ".join(found) or f"each=1,classes=1 and {known} clients"

    def _holdings(self, classes: int, clients: int, random: np.random.Generator) -> Counts:
        """1 where a client holds a class: [clients, classes].

        Each client in turn takes the classes with the fewest holders so far, lots deciding ties. So the
        numbers of holders never differ by more than one, and a client's classes are always distinct.
        """
        held, taken = np.zeros((clients, classes), np.int64), np.zeros(classes, np.int64)
        for client in random.permutation(clients):
            chosen = np.lexsort((random.permutation(classes), taken))[: self.classes]
            held[client, chosen] = 1
            taken[chosen] += 1
        return held
