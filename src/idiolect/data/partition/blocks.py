"""Neighbours that hold the same few classes, in unequal parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from idiolect.data.partition.split import Labels, Rows, Split, check_clients, check_whole, is_whole, rows_by_class
from idiolect.data.ragged import Ragged
from idiolect.data.streams import stream
from idiolect.errors import UsageError


@dataclass(frozen=True)
class Blocks(Split):
    """PFLlib's pathological split: a class goes to the first clients that still lack one, in parts of unequal size.

    `separate_data(partition="pat", class_per_client=classes)` of PFLlib: of the clients with fewer than `classes`
    classes the first ceil(clients / all classes * classes) hold the next class, so that consecutive clients share all
    of theirs. Each but the last draws its rows evenly between a tenth of the equal part and all of it; the last has the
    rest. Rows of a class are dealt in the order in which they stand. Where the division does not come out even, the
    last clients have fewer classes; there classes that find no client left are dropped, here they are refused.

    balance: equal parts in place of drawn ones. minimum: rows that every holder of a class gets at least of it.
    """

    classes: int = 2
    balance: bool = False
    minimum: int = 1

    def __post_init__(self) -> None:
        check_whole(self, "classes", self.classes)
        check_whole(self, "minimum", self.minimum)
        if not isinstance(self.balance, bool):
            raise UsageError(f"blocks: expected true or false for balance, found {self.balance!r}.")

    def __call__(self, labels: Labels, clients: int, seed: int) -> Rows:
        rows = rows_by_class(labels)
        check_clients(len(labels), clients, self._nearest(rows, clients) if is_whole(clients, 1) else "")
        holders = _holders(len(rows), clients, self.classes)
        if holders is None or not self._enough(rows, holders):
            raise UsageError(
                f"blocks: expected a place for each class and minimum={self.minimum} rows of it for each of its "
                f"holders, found {len(rows)} classes, the smallest of {min(map(len, rows))} rows, for {clients} "
                f"clients with classes={self.classes}; ask for {self._nearest(rows, clients)}."
            )
        random = stream(seed, "blocks sizes")
        owner = np.empty(len(labels), np.int64)
        for these, of in zip(rows, holders, strict=True):
            owner[these] = np.repeat(of, self._sizes(len(these), len(of), random))
        return Ragged.by_owner(owner, clients)

    def _sizes(self, rows: int, holders: int, random: np.random.Generator) -> list[int]:
        part = rows / holders
        low = max(int(part / 10), self.minimum)
        if self.balance or low >= int(part):
            first = [int(part)] * (holders - 1)
        else:
            first = random.integers(low, int(part), holders - 1).tolist()
        return [*first, rows - sum(first)]

    def _enough(self, rows: Rows, holders: list[range]) -> bool:
        return all(len(these) >= self.minimum * len(of) for these, of in zip(rows, holders, strict=True))

    def _nearest(self, rows: Rows, clients: int) -> str:
        """The nearest number of classes or of clients that can be had, found by trying."""
        places = sum(map(len, rows)) // self.minimum  # that the holders have at most

        def fits(classes: int, others: int) -> bool:
            holders = _holders(len(rows), others, classes)
            return holders is not None and self._enough(rows, holders)

        numbers = _outwards(self.classes, min(len(rows), places // clients))
        classes = next((c for c in numbers if fits(c, clients)), None)
        others = next((n for n in _outwards(clients, places // self.classes) if fits(self.classes, n)), None)
        either = [f"classes={classes}"] if classes else []
        either += [f"{others} clients"] if others else []
        return " or ".join(either) or f"classes=1,minimum=1 and {len(rows)} clients"


def _holders(known: int, clients: int, classes: int) -> list[range] | None:
    """The clients of each class, or None where one finds no place: `classes` of them in turn go to the same ones."""
    width = -(-clients * classes // known)
    first = [number // classes * width for number in range(known)]
    if classes > known or first[-1] >= clients:
        return None
    return [range(start, min(start + width, clients)) for start in first]


def _outwards(start: int, most: int) -> Iterator[int]:
    """1 to `most`, the nearest to `start` first."""
    start = min(max(start, 1), most)
    for distance in range(most):
        yield from (n for n in dict.fromkeys((start - distance, start + distance)) if 1 <= n <= most)
