"""What every split is: a frozen value, and a pure function from labels to the row numbers of each client."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from idiolect.data.apportion import Counts
from idiolect.data.ragged import Ragged
from idiolect.data.texts import written
from idiolect.errors import UsageError

Labels = NDArray[Any]
Rows = Ragged  # the row numbers of each client, ascending
EQUAL = 1e9  # an alpha as large as this gives equal shares; much larger ones have no finite sum


@dataclass(frozen=True)
class Split(ABC):
    """A split of rows over clients. A new one is a frozen dataclass with defaults and a `__call__`.

    `reads` says what it is given as labels: the "labels", the data's own clients ("group"), the "samples" themselves
    as one vector each, or anything of the right length ("rows"). `repeats`: a row may come more than once, at one
    client or at several. `verbatim`: in its text, all that follows the colon is one option.
    """

    reads: ClassVar[Literal["labels", "group", "samples", "rows"]] = "labels"
    repeats: ClassVar[bool] = False
    verbatim: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, labels: Labels, clients: int, seed: int) -> Rows:
        """The row numbers of each client: ascending, no row twice (unless it `repeats`), at least one row each. A list
        of arrays will do."""

    @classmethod
    def name(cls) -> str:
        return cls.__name__.lower()

    def __str__(self) -> str:
        """The text from which `parse` makes this split."""
        return written(self.name(), self)


@dataclass(frozen=True)
class Drawn(Split):
    """A split in proportions drawn from Dir(alpha), which leaves nobody with less than `minimum` rows."""

    alpha: float = 0.1
    minimum: int = 10

    def __post_init__(self) -> None:
        check_alpha(self, self.alpha)
        check_whole(self, "minimum", self.minimum)

    def check(self, rows: int, clients: int) -> None:
        """Refuse a minimum that the rows cannot give to all clients."""
        most = rows // self.minimum  # clients
        check_clients(rows, clients, f"{most} clients or fewer" if most else f"minimum=1 and {rows} clients or fewer")
        if self.minimum * clients > rows:
            raise UsageError(
                f"Expected at least minimum * clients = {self.minimum} * {clients} = {self.minimum * clients} rows, "
                f"found {rows}; the nearest that can be had is minimum={rows // clients}"
                + (f", or {most} clients." if most else ".")
            )


def check_clients(rows: int, clients: int, nearest: str = "") -> None:
    """Refuse a number of clients that leaves some without a row; `nearest` says what to ask for instead."""
    check_many(clients)
    if clients > rows:
        raise UsageError(
            f"Expected at least one row per client, found {rows} rows for {clients} clients; ask for "
            f"{nearest or f'{rows} clients or fewer'}."
        )


def check_many(clients: int) -> None:
    if not is_whole(clients, 1):
        raise UsageError(f"Expected a whole number of clients, at least 1, found {clients!r}.")


def check_alpha(split: Split, alpha: float) -> None:
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha <= EQUAL:
        raise UsageError(
            f"{split.name()}: expected a number alpha > 0 and <= {EQUAL:g} (equal shares), found {alpha!r}."
        )


def check_whole(split: Split, field: str, value: int) -> None:
    if not is_whole(value, 1):
        raise UsageError(f"{split.name()}: expected a whole number of at least 1 for {field}, found {value!r}.")


def is_whole(value: object, least: int) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= least)


def deal(rows: Rows, counts: Counts, random: np.random.Generator) -> Rows:
    """Shuffle each class's rows and give each client as many as `counts` [clients, classes] says: all of them."""
    clients = np.arange(len(counts), dtype=np.int32)
    owner = np.full(int(rows.rows.max(initial=-1)) + 1, -1, np.int32)
    for these, shares in zip(rows, counts.T, strict=True):
        owner[random.permutation(these)] = np.repeat(clients, shares)
    return Ragged.by_owner(owner, len(counts))


def rows_by_class(labels: Labels) -> Rows:
    """The rows of each class that occurs, in the order of the classes."""
    order = np.argsort(labels, kind="stable").astype(np.int64, copy=False)
    inner = np.flatnonzero(labels[order[1:]] != labels[order[:-1]]) + 1
    return Ragged(order, np.concatenate([[0], inner, [len(order)]]))
