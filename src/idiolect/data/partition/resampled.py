"""Clients that draw their rows from all, with replacement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from idiolect.data.partition.split import EQUAL, Labels, Rows, Split, check_alpha, check_many, rows_by_class
from idiolect.data.ragged import Ragged
from idiolect.data.streams import stream
from idiolect.errors import UsageError


@dataclass(frozen=True)
class Resampled(Split):
    """Each client draws its label proportions from Dir(alpha) and then rows of each class, with replacement.

    FedLAG (Nguyen et al., 2024) names its split "Dirichlet sampling with replacement" and says no more. Here all
    clients have equally many rows, `share` times the data's rows in all; a row may occur at several clients, and
    several times at one. Rows are divided into those to train, to validate and to test with before anybody draws, and
    each client draws from all of these with the same proportions: what anybody trains with, nobody is tested on.
    """

    repeats: ClassVar[bool] = True
    alpha: float = 0.1
    share: float = 1.0

    def __post_init__(self) -> None:
        check_alpha(self, self.alpha)
        if isinstance(self.share, bool) or not isinstance(self.share, int | float) or not 0 < self.share <= EQUAL:
            raise UsageError(f"resampled: expected a number share > 0 and <= {EQUAL:g}, found {self.share!r}.")

    def __call__(self, labels: Labels, clients: int, seed: int) -> Rows:
        check_many(clients)
        rows = rows_by_class(labels)
        size = max(1, round(self.share * len(labels) / clients))
        random = stream(seed, "resampled rows")
        counts = random.multinomial(size, self._proportions([labels[of[0]] for of in rows], clients, seed))
        known, starts = np.array([len(of) for of in rows]), np.cumsum([0, *map(len, rows)])[:-1]
        drawn = np.repeat(np.tile(np.arange(len(rows)), clients), counts.ravel())  # the class of each row to draw
        picked = starts[drawn] + (random.random(len(drawn)) * known[drawn]).astype(np.int64)
        found = np.concatenate(rows)[picked].reshape(clients, size)
        return Ragged(np.sort(found, 1).ravel(), np.arange(clients + 1) * size)

    def _proportions(self, classes: list[int], clients: int, seed: int) -> np.ndarray:
        """Dir(alpha) as normalised Gamma variables, a stream for each class: a class that one pool lacks changes
        nothing of the others. In logarithms, as alpha < 1 draws numbers that no float holds."""
        drawn = np.empty((clients, len(classes)))
        for number, label in enumerate(classes):
            random = stream(seed, f"resampled proportion of class {label}")
            boosted = np.log(random.gamma(self.alpha + 1.0, size=clients))  # Gamma(a) is Gamma(a + 1) U^(1 / a)
            drawn[:, number] = boosted + np.log1p(-random.random(clients)) / self.alpha
        weights = np.exp(drawn - drawn.max(1, keepdims=True))
        return np.asarray(weights / weights.sum(1, keepdims=True))
