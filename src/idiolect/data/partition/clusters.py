"""Clients whose samples look alike."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from idiolect.data.apportion import apportion
from idiolect.data.partition.dirichlet import Dirichlet
from idiolect.data.partition.split import Labels, Rows, Split, check_alpha, check_clients, check_whole, is_whole
from idiolect.data.ragged import Ragged
from idiolect.data.streams import stream
from idiolect.errors import UsageError

FITTED = 20_000  # rows by which components and centres are found
COMPONENTS = 50
CHUNK = 8192  # rows placed at a time


@dataclass(frozen=True)
class Clusters(Split):
    """Semantic skew: `clusters` groups of like samples, by k-means on their principal components, whatever the labels.

    With alpha=0 each client's rows are of one cluster: clusters get clients in proportion to their rows, at least one,
    and these share them evenly at random. With alpha > 0 a cluster's rows are divided over all clients in proportions
    from Dir(alpha), as `dirichlet` divides a class's, and clients reach `minimum` rows in the same way.

    Yuan et al., ICLR 2022, partition by a mixture model of a pretrained network's features, class by class. Here
    samples stand for themselves, and up to 20,000 of them, drawn by the seed, give 50 components and the centres.
    Another processor may round a sample to another cluster; the split's hash tells.
    """

    reads: ClassVar[Literal["labels", "group", "samples", "rows"]] = "samples"
    clusters: int = 10
    alpha: float = 0.0
    minimum: int = 10

    def __post_init__(self) -> None:
        check_whole(self, "clusters", self.clusters)
        check_whole(self, "minimum", self.minimum)
        if self.alpha != 0 or isinstance(self.alpha, bool):
            check_alpha(self, self.alpha)

    def __call__(self, labels: Labels, clients: int, seed: int) -> Rows:
        rows = len(labels)
        check_clients(rows, clients, "" if self.alpha or self.clusters <= rows else f"clusters=1 and {rows} clients")
        if self.alpha:
            divide = Dirichlet(self.alpha, self.minimum)
            divide.check(rows, clients)
            return divide(self.found(labels, seed), clients, seed)
        if not is_whole(clients, self.clusters):
            either = f" or {self.clusters} clients" if self.clusters <= rows else ""
            raise UsageError(
                f"clusters: expected a client for each of clusters={self.clusters}, found {clients} clients; ask for "
                f"clusters={clients}{either}, or for alpha=0.1, where clients hold several clusters."
            )
        return self._apart(self.found(labels, seed), clients, seed)

    def found(self, samples: Labels, seed: int) -> NDArray[np.int64]:
        """The cluster of each sample."""
        from sklearn.cluster import KMeans
        from sklearn.decomposition import PCA
        from threadpoolctl import threadpool_limits

        if samples.ndim != 2 or samples.dtype.kind != "f":
            raise UsageError("clusters: expected samples as numbers, one vector a row; class numbers have no likeness.")
        random = stream(seed, "clusters")
        fitted = np.sort(random.permutation(len(samples))[:FITTED])
        state = int(random.integers(2**31))
        with threadpool_limits(1), warnings.catch_warnings(action="ignore"):  # sums in one order; equal samples
            reduce = PCA(min(COMPONENTS, *samples[fitted].shape), svd_solver="randomized", random_state=state)
            points = reduce.fit_transform(samples[fitted].astype(np.float64))
            centres = KMeans(min(self.clusters, len(fitted)), n_init=4, random_state=state).fit(points)
            chunks = (samples[a : a + CHUNK].astype(np.float64) for a in range(0, len(samples), CHUNK))
            return np.concatenate([centres.predict(reduce.transform(chunk)) for chunk in chunks]).astype(np.int64)

    def _apart(self, cluster: NDArray[np.int64], clients: int, seed: int) -> Rows:
        sizes = np.bincount(cluster, minlength=self.clusters)
        known = np.flatnonzero(sizes)
        most = sizes[known] - 1  # beside the one client that each has
        extra = _within(sizes[known], most, clients - len(known))
        owner, first = np.empty(len(cluster), np.int64), 0
        for number, members in zip(known, 1 + extra, strict=True):
            rows = stream(seed, f"rows of cluster {number}").permutation(np.flatnonzero(cluster == number))
            owner[rows] = first + np.arange(len(rows)) % members
            first += int(members)
        return Ragged.by_owner(owner, clients)


def _within(weights: NDArray[np.int64], most: NDArray[np.int64], total: int) -> NDArray[np.int64]:
    """`total` in proportion to `weights`, but nowhere more than `most`; what is too much goes to the others."""
    given = np.zeros_like(most)
    while total > given.sum():
        room = most - given
        given += np.minimum(apportion(weights * (room > 0), int(total - given.sum())), room)
    return given
