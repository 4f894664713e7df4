"""Windows of signals: readings of several channels over time, cut into samples with one activity each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from idiolect.data import windows
from idiolect.data.dataset import Dataset
from idiolect.errors import UsageError
from idiolect.nets.signals import SHORTEST

Readings = NDArray[np.float32]
WindowLabel = Literal["majority", "last"]
CHUNK = 1 << 14  # windows at a time


@dataclass(frozen=True)
class Recording:
    """What one subject recorded: `readings` [T, channels] with the activity at each time, or windows already cut,
    [windows, channels, length], with the activity of each."""

    subject: str
    readings: Readings
    activity: NDArray[Any]


def checked(where: str, subject: str, readings: NDArray[Any], activity: NDArray[Any]) -> Recording:
    """A recording of finite numbers, with activities that are words, or whole numbers in any type."""
    whole = activity.dtype.kind == "f" and bool((np.isfinite(activity) & (activity == activity.round())).all())
    activity = activity.astype(np.int64) if whole else activity
    if activity.dtype.kind not in "iuUS":
        raise UsageError(
            f"Expected activities in {where} as whole numbers or words, found {activity.dtype}; mend them."
        )
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes inf and is refused as such
        readings = readings.astype(np.float32)
    bad = ~np.isfinite(readings).all(tuple(range(1, readings.ndim)))
    if bad.any():
        raise UsageError(
            f"Expected finite numbers in {where}, found NaN or inf at {int(bad.sum())} times of subject '{subject}', "
            f"the first in its row {int(bad.argmax())}; fill the gaps, or drop those rows."
        )
    return Recording(subject, readings, activity)


@dataclass(frozen=True)
class Standard:
    """The `fit` of signals: each channel to mean 0 and deviation 1 over the windows trained on, or by what is given. A
    channel that never changes becomes 0."""

    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def __call__(self, data: Dataset, rows: NDArray[np.int64]) -> Dataset:
        x = cast(Tensor, data.x)
        mean, std = (x.new_tensor(self.mean or 0), x.new_tensor(self.std or 1))
        if self.mean is None or self.std is None:
            found = measured(x, rows)
            mean, std = (mean if self.mean else found[0], std if self.std else found[1])
        return replace(data, x=(x - column(mean)) / column(std))


def column(values: Tensor) -> Tensor:
    return values.to(torch.float32).view(1, -1, 1, 1)


def measured(x: Tensor, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel over these windows; 1 for a channel that does not change."""
    parts = [torch.from_numpy(rows[start : start + CHUNK]) for start in range(0, len(rows), CHUNK)]
    count = len(rows) * x[0, 0].numel()
    mean = torch.stack([x[part].double().sum((0, 2, 3)) for part in parts]).sum(0) / count
    off = torch.stack([(x[part].double() - mean.view(1, -1, 1, 1)).square().sum((0, 2, 3)) for part in parts]).sum(0)
    std = (off / count).sqrt()
    steady = std <= 1e-7 * mean.abs().clamp(min=1e-30)  # what float32 can tell apart
    return mean, torch.where(steady, 1.0, std)


def dataset(
    where: Path,
    recordings: Sequence[Recording],
    *,
    length: int,
    stride: int | None,
    window_label: WindowLabel,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    network: str | None,
    in_train: int | None = None,
) -> Dataset:
    """Samples [channels, 1, length], one every `stride` readings of a recording (by default every `length`, so that no
    reading is in two of them). A window's class is the activity of most of its readings (of several, the one that
    comes first among the classes), or of the last one. Classes are the activities in their order. `group` is the
    subject. The first `in_train` recordings are the training set, the others the official test set.
    """
    stride = length if stride is None else stride
    windows.check(str(where), length, stride)
    if window_label not in ("majority", "last"):
        raise UsageError(f"Expected window_label as 'majority' or 'last', found {window_label!r}.")
    names, numbers = activities(where, recordings)
    recordings = [replace(one, activity=part) for one, part in zip(recordings, numbers, strict=True)]
    _check_lengths(where, recordings, length)
    cut = [_windows(one, length, stride, window_label, len(names)) for one in recordings]
    sizes = [len(y) for _, y in cut]
    x = torch.from_numpy(np.concatenate([x for x, _ in cut])).unsqueeze(2)  # [windows, channels, 1, length]
    data = Dataset(
        where.resolve().stem,
        x,
        torch.from_numpy(np.concatenate([y for _, y in cut])),
        classes=len(names),
        network=network or ("harcnn" if x.shape[3] >= SHORTEST else "mlp"),
        group=np.repeat(np.array([one.subject for one in recordings]), sizes),
        official_test=None if in_train is None else np.arange(len(x)) >= sum(sizes[:in_train]),
        class_names=None if names == list(range(len(names))) else tuple(map(str, names)),
    )
    standard = Standard(*(_given(where, what, v, x.shape[1]) for what, v in (("mean", mean), ("std", std))))
    return replace(data, fit=standard)


def activities(where: Path, recordings: Sequence[Recording]) -> tuple[list[Any], list[NDArray[np.int64]]]:
    """The activities there are, in their order, and each recording's as their places."""
    kinds = {"words" if one.activity.dtype.kind in "US" else "numbers" for one in recordings}
    if len(kinds) > 1:
        raise UsageError(f"Expected activities all as words or all as numbers in '{where}', found both.")
    names, places = np.unique(np.concatenate([one.activity for one in recordings]), return_inverse=True)
    bounds = np.cumsum([len(one.activity) for one in recordings])[:-1]
    return names.tolist(), np.split(places.astype(np.int64), bounds)


def _check_lengths(where: Path, recordings: Sequence[Recording], length: int) -> None:
    shapes = {one.readings.shape[1:] if one.readings.ndim == 3 else one.readings.shape[1:2] for one in recordings}
    if len(shapes) > 1:
        found = " and ".join(map(str, sorted(shapes)))
        raise UsageError(f"Expected the same channels of every subject of '{where}', found {found}; take some out.")
    sizes: dict[str, int] = {}
    for one in recordings:
        enough = length if one.readings.ndim == 3 and len(one.readings) else len(one.readings)
        sizes[one.subject] = max(enough, sizes.get(one.subject, 0))
    windows.refuse_short(str(where), sizes, length, "readings")


def _windows(
    one: Recording, length: int, stride: int, window_label: str, classes: int
) -> tuple[Readings, NDArray[np.int64]]:
    if one.readings.ndim == 3:
        return one.readings, one.activity
    x = windows.cut(one.readings, length, stride)  # [windows, channels, length]
    y = windows.cut(one.activity, length, stride)  # [windows, length]
    if window_label == "last" or not len(y):
        return x, y[:, -1]
    at = np.arange(len(y))[:, None] * classes + y
    votes = np.bincount(at.ravel(), minlength=len(y) * classes).reshape(len(y), classes)
    return x, votes.argmax(1)


def _given(where: Path, what: str, values: Sequence[float] | None, channels: int) -> tuple[float, ...] | None:
    if values is None:
        return None
    found = tuple(float(value) for value in values)
    if len(found) != channels or not np.isfinite(found).all() or (what == "std" and min(found) <= 0):
        raise UsageError(
            f"Expected {what} as {channels} finite numbers, one a channel of '{where}'"
            f"{', above 0' if what == 'std' else ''}, found {list(values)}."
        )
    return found
