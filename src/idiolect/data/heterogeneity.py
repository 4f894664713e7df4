"""How much the clients of a federation differ: in what they have, and in how much."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from idiolect.data.apportion import Counts
from idiolect.data.federated import AT_ONCE, Federation, entropies

Numbers = NDArray[np.float64]
DEFINITIONS = {
    "rows": "all of a client's rows: training, validation and test",
    "label_entropy_bits": "entropy of a client's class proportions, over clients; null where there are no classes",
    "total_variation": "half the sum over classes of the difference of two clients' proportions: the mean over all "
    "pairs of clients, exact for any number of them",
    "size_gini": "Gini coefficient of the clients' numbers of rows: 0 where all are equal, nearly 1 where one has all",
}


@dataclass(frozen=True)
class Profile:
    """What each client has, in numbers, and how far any two are apart."""

    sizes: Counts  # rows of each client
    classes: Counts  # how many classes each has
    entropies: Numbers
    total_variation: float | None
    labelled: bool

    @staticmethod
    def of(federation: Federation) -> Profile:
        sizes, classes, found, apart = [], [], [], _Apart()
        for _, labels in histograms(federation):
            sizes.append(labels.sum(1))
            classes.append(np.count_nonzero(labels, axis=1))
            found.append(entropies(labels))
            apart.add(labels / np.maximum(sizes[-1], 1)[:, None])
        labelled = federation.dataset.loss == "cross_entropy"
        mean = apart.mean(federation.clients) if labelled else None
        return Profile(np.concatenate(sizes), np.concatenate(classes), np.concatenate(found), mean, labelled)

    def measures(self) -> dict[str, Any]:
        return {
            "label_entropy_bits": _over_clients(self.entropies) if self.labelled else None,
            "total_variation": None if self.total_variation is None else {"mean": self.total_variation},
            "size_gini": gini(self.sizes),
            "rows": _over_clients(self.sizes),
        }


def histograms(federation: Federation) -> Iterator[tuple[int, Counts]]:
    """The first of some clients, and their rows of each class; all clients in turn, never all at once."""
    for start in range(0, federation.clients, AT_ONCE):
        yield start, federation.histogram(slice(start, start + AT_ONCE))


def gini(sizes: Counts) -> float:
    return differences(sizes) / (len(sizes) * float(sizes.sum())) if sizes.sum() else 0.0


def differences(values: NDArray[Any], zeros: int = 0) -> float:
    """The sum over all pairs of |a - b|, of these values and so many zeros; none of them negative.

    The k-th smallest of n values is the larger one of k pairs and the smaller one of n - 1 - k.
    """
    ranks = zeros + np.arange(len(values))
    return float(np.sort(values) @ (2.0 * ranks - (zeros + len(values)) + 1))


class _Apart:
    """Gathers proportions [clients, classes], as those that are not 0 of each class."""

    def __init__(self) -> None:
        self._found: list[tuple[NDArray[np.int64], Numbers]] = []

    def add(self, shares: Numbers) -> None:
        _, labels = np.nonzero(shares)
        self._found.append((labels, shares[shares > 0]))

    def mean(self, clients: int) -> float | None:
        if clients < 2:
            return None
        labels, shares = (np.concatenate(part) for part in zip(*self._found, strict=True))
        by_class = np.split(shares[np.argsort(labels, kind="stable")], np.cumsum(np.bincount(labels))[:-1])
        total = sum(differences(column, clients - len(column)) for column in by_class)
        return total / (clients * (clients - 1))


def _over_clients(values: NDArray[Any]) -> dict[str, float]:
    low, median, high = np.quantile(values, [0.1, 0.5, 0.9])
    found = {"mean": values.mean(), "min": values.min(), "q10": low, "median": median, "q90": high, "max": values.max()}
    return {name: float(value) for name, value in found.items()}
