"""Token ids of the rows trained on alone: what nobody trained on is unknown."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from idiolect.data.dataset import Dataset
from idiolect.data.partition.split import is_whole
from idiolect.errors import UsageError
from idiolect.nets.text import PADDING

UNKNOWN = 1
SPECIAL = ("<padding>", "<unknown>")  # the words with the ids 0 and 1
CHUNK = 1 << 16  # rows at a time

Index = NDArray[np.int64]


@dataclass(frozen=True)
class Vocabulary:
    """The `fit` of a data set of tokens: from ids that number the tokens of all rows, in any order, to ids that number
    those of the rows trained on, the most frequent first (ties by the words themselves).

    A word that these rows have less than `min_count` times is unknown, and so is one beyond `max_size` ids, padding
    and unknown included. The last `buckets` ids are no words (hashed n-grams) and stay the last. `targets`: y are
    tokens too, and so a class is a token's id.
    """

    min_count: int = 1
    max_size: int | None = None
    buckets: int = 0
    targets: bool = False

    def __post_init__(self) -> None:
        least = len(SPECIAL) + 1
        if not is_whole(self.min_count, 1) or not (self.max_size is None or is_whole(self.max_size, least)):
            raise UsageError(
                f"Expected whole numbers, min_count of at least 1 and max_size of at least {least} (padding, unknown "
                f"and a word), found min_count={self.min_count} and max_size={self.max_size}."
            )

    def __call__(self, data: Dataset, rows: Index) -> Dataset:
        kept = self._kept(data, rows)
        size = len(data.words)
        known = len(SPECIAL) + len(kept)
        new = np.full(size + self.buckets, UNKNOWN)
        new[PADDING] = PADDING
        new[kept] = np.arange(len(SPECIAL), known)
        new[size:] = np.arange(known, known + self.buckets)
        table = torch.from_numpy(new)
        y, classes = (table[data.y], known) if self.targets else (data.y, data.classes)
        words = SPECIAL + tuple(data.words[k] for k in kept)
        return replace(
            data, x=table[cast(Tensor, data.x)], y=y, classes=classes, tokens=known + self.buckets, words=words
        )

    def _kept(self, data: Dataset, rows: Index) -> Index:
        """The words to keep, by their ids in `data`, in their new order."""
        count = counts(cast(Tensor, data.x), rows, len(data.words) + self.buckets)
        if self.targets:
            count += counts(data.y, rows, len(count))
        found = [k for k in range(len(SPECIAL), len(data.words)) if count[k] >= self.min_count]
        if not found:
            raise UsageError(
                f"{data.name}: expected a word that the training rows have at least min_count={self.min_count} times, "
                "found none; lower min_count."
            )
        found.sort(key=lambda k: (-count[k], data.words[k]))
        return np.array(found[: None if self.max_size is None else self.max_size - len(SPECIAL)])


def counts(ids: Tensor, rows: Index, size: int) -> Index:
    """How often these rows have each id."""
    total = np.zeros(size, np.int64)
    for start in range(0, len(rows), CHUNK):
        total += np.bincount(ids.numpy()[rows[start : start + CHUNK]].ravel(), minlength=size)
    return total
