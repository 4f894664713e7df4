"""Arrays by their names, as one file holds them, to samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from idiolect.data import images
from idiolect.data.dataset import Dataset, from_arrays
from idiolect.errors import UsageError

Array = NDArray[Any]


class Options(TypedDict, total=False):
    """Those of `dataset` that a user gives."""

    classes: int | None
    network: str | None
    mean: Sequence[float] | None
    std: Sequence[float] | None
    channels: str | None


def dataset(
    where: Path,
    arrays: Mapping[str, Array],
    *,
    classes: int | None = None,
    network: str | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    channels: str | None = None,
) -> Dataset:
    """`x`, `y` and maybe `group`; or `x_train`, `y_train` and maybe `group_train`, with the same for `test`, which
    becomes the official test set. Checked as `from_arrays` checks them.

    `x` of uint8 with three or four dimensions holds pixels, which are scaled and normalised as `images.samples` says;
    `channels` tells where their channels are, "first" or "last", should the shape leave it open.
    """
    x, y, group, in_train = _parts(where, arrays)
    if classes is None and y.ndim == 1 and len(y) and (y == y[0]).all():
        raise UsageError(f"Expected labels of two classes or more in '{where}', found {y[0]} alone.")
    name = where.stem
    if x.dtype != np.uint8 or x.ndim not in (3, 4):
        if mean is not None or std is not None or channels is not None:
            raise UsageError(
                f"mean, std and channels are for pixels, uint8; x in '{where}' is {x.dtype} {list(x.shape)}."
            )
        return _marked(from_arrays(x, y, classes, name=name, network=network, group=group), in_train)
    checked = from_arrays(np.zeros((len(x), 1), np.float32), y, classes, name=name, group=group)  # all but the pixels
    return images.samples(
        where,
        _channels_last(where, x, channels),
        checked.y.numpy(),
        name=name,
        in_train=in_train,
        classes=checked.classes,
        mean=mean,
        std=std,
        network=network,
        group=checked.group,
    )


def _parts(where: Path, arrays: Mapping[str, Array]) -> tuple[Array, Array, Array | None, int | None]:
    """x, y, group, and how many of the first rows are for training where others are for testing."""
    if "x" in arrays and "x_train" in arrays:
        raise UsageError(f"Expected either x or x_train in '{where}', found both; leave one out.")
    if "x_train" not in arrays:
        if not {"x", "y"} <= arrays.keys():
            found = ", ".join(sorted(arrays)) or "none"
            raise UsageError(
                f"Expected arrays x and y in '{where}', found {found}; save them by these names, or as x_train, "
                "y_train, x_test, y_test."
            )
        return arrays["x"], arrays["y"], arrays.get("group"), None
    if "x_test" not in arrays and "y_test" not in arrays:
        return arrays["x_train"], _one(where, arrays, "y_train"), arrays.get("group_train"), None
    x, y = _both(where, arrays, "x"), _both(where, arrays, "y")
    named = "group_train" in arrays or "group_test" in arrays
    return x, y, _both(where, arrays, "group") if named else None, len(arrays["x_train"])


def _one(where: Path, arrays: Mapping[str, Array], name: str) -> Array:
    if name not in arrays:
        raise UsageError(
            f"Expected an array {name} in '{where}', found {', '.join(sorted(arrays))}; save it beside them."
        )
    if arrays[name].ndim == 0:
        raise UsageError(f"Expected an array {name} with a row for each sample in '{where}', found a single number.")
    return arrays[name]


def _both(where: Path, arrays: Mapping[str, Array], what: str) -> Array:
    train, test = (_one(where, arrays, f"{what}_{part}") for part in ("train", "test"))
    if train.shape[1:] != test.shape[1:] or (what == "x" and train.dtype != test.dtype):
        raise UsageError(
            f"Expected {what}_train and {what}_test of one kind in '{where}', found {train.dtype} {list(train.shape)} "
            f"and {test.dtype} {list(test.shape)}."
        )
    return np.concatenate([train, test])


def _marked(data: Dataset, in_train: int | None) -> Dataset:
    return data if in_train is None else replace(data, official_test=np.arange(len(data)) >= in_train)


def _channels_last(where: Path, x: Array, channels: str | None) -> images.Pixels:
    if x.ndim == 3:
        return x[..., None]
    if channels not in (None, "first", "last"):
        raise UsageError(f"Expected channels=first or channels=last, found {channels!r}.")
    first, last = x.shape[1] in (1, 3), x.shape[3] in (1, 3)
    if channels is None and first == last:
        raise UsageError(
            f"Expected pixels of 1 or 3 channels in '{where}', found x of shape {list(x.shape)}, which leaves open "
            "where they are; say channels=first or channels=last."
        )
    return np.moveaxis(x, 1, 3) if channels == "first" or (channels is None and first) else x
