"""Labels as they stand in files, numbered from 0."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from idiolect.errors import UsageError

Names = tuple[str, ...]


def in_order(names: Iterable[str]) -> list[str]:
    """Names by their characters; by value where all of them are whole numbers, so that 10 comes after 9."""
    names = sorted(names)
    return sorted(names, key=int) if all(re.fullmatch(r"-?[0-9]{1,18}", name) for name in names) else names


def numbered(
    where: str, labels: NDArray[Any], classes: int | None = None
) -> tuple[NDArray[np.int64], int, Names | None]:
    """Each label as the number of its class, how many classes there are, and what they are called.

    Words are numbered in their order, and so are whole numbers that are not 0, 1, ..., C-1 as they stand. With
    `classes` whole numbers are taken as they are.
    """
    if labels.dtype.kind == "f":
        labels = _whole(where, labels)
    if classes is not None and labels.dtype.kind in "iu":
        return labels.astype(np.int64), classes, None
    kinds, y = np.unique(labels, return_inverse=True)
    if len(kinds) < 2:
        raise UsageError(
            f"Expected labels of two classes or more {where}, found {_shown(kinds)}; check that they are the labels."
        )
    if classes is not None and classes != len(kinds):
        raise UsageError(
            f"Expected {classes} classes {where}, found {len(kinds)} different words; leave classes= out, or number "
            "the classes yourself."
        )
    if labels.dtype.kind in "iu" and kinds.tolist() == list(range(len(kinds))):
        return y.astype(np.int64), len(kinds), None
    texts = kinds.astype(str).tolist()
    order = {name: k for k, name in enumerate(in_order(texts))}
    return np.array([order[name] for name in texts], np.int64)[y], len(kinds), tuple(order)


def _whole(where: str, labels: NDArray[Any]) -> NDArray[np.int64]:
    odd = labels[~(np.isfinite(labels) & (labels == np.round(labels)) & (abs(labels) < 2**53))]
    if len(odd):
        raise UsageError(
            f"Expected class labels {where}, whole numbers or words, found {odd[0]} among them; name another column "
            "by label=, or make classes of these numbers first."
        )
    return labels.astype(np.int64)


def _shown(kinds: NDArray[Any]) -> str:
    return f"'{kinds[0]}' alone" if len(kinds) else "no rows"
