"""The clients that the data itself names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from idiolect.data.partition.split import Labels, Rows, Split, check_clients, rows_by_class
from idiolect.errors import UsageError

SURPLUS = ("refuse", "largest", "merge")


@dataclass(frozen=True)
class Given(Split):
    """One client per group of the data set (`Dataset.group`), in the order of the groups' names.

    surplus: what to do with more groups than clients. "refuse" them; keep the "largest" groups, leaving out
    the rows of the others; or "merge" whole groups, the largest first, each into the client that is smallest
    so far.
    """

    reads: ClassVar[Literal["labels", "group", "rows"]] = "group"
    surplus: str = "refuse"

    def __post_init__(self) -> None:
        if self.surplus not in SURPLUS:
            raise UsageError(f"given: expected surplus to be one of {', '.join(SURPLUS)}, found {self.surplus!r}.")

    def __call__(self, labels: Labels, clients: int, seed: int) -> Rows:
        groups = rows_by_class(labels)
        check_clients(len(labels), clients, f"{len(groups)} clients")
        if len(groups) < clients or (len(groups) > clients and self.surplus == "refuse"):
            fewer = "" if len(groups) < clients else ", or 'given:largest' or 'given:merge'"
            raise UsageError(
                f"given: expected as many clients as the data has groups, found {len(groups)} groups for "
                f"{clients} clients; ask for {len(groups)} clients{fewer}."
            )
        by_size = sorted(range(len(groups)), key=lambda group: -len(groups[group]))
        if self.surplus == "merge":
            return _merge([groups[group] for group in by_size], clients)
        return [groups[group] for group in sorted(by_size[:clients])]


def _merge(groups: Rows, clients: int) -> Rows:
    hands: list[Rows] = [[] for _ in range(clients)]
    sizes = np.zeros(clients, np.int64)
    for rows in groups:
        smallest = int(sizes.argmin())
        hands[smallest].append(rows)
        sizes[smallest] += len(rows)
    return [np.sort(np.concatenate(hand)) for hand in hands]
