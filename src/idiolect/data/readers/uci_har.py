"""UCI's "Human activity recognition using smartphones", as unpacked, and others laid out like it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from idiolect.data import signals
from idiolect.data.dataset import Dataset
from idiolect.data.signals import Recording
from idiolect.errors import UsageError, said

FORM = "UCI's smartphone activities: a folder with train/Inertial Signals/*_train.txt, y_train.txt, subject_train.txt"
SIGNALS = "Inertial Signals"


def reads(path: Path) -> bool:
    return (path / "train" / SIGNALS).is_dir()


def load(
    folder: Path,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    network: str | None = None,
) -> Dataset:
    """The windows of `train` and, where there is one, `test`, [channels, 1, length], with the channels in the order of
    their files' names; `official_test` tells them apart, and `group` is the subject. Channels are standardised by the
    windows that are trained on, or by `mean` and `std`. UCI's own windows overlap by half.
    """
    parts = [part for part in ("train", "test") if (folder / part).is_dir()]
    channels = [_channels(folder, part) for part in parts]
    if channels[0] != channels[-1]:
        raise UsageError(f"Expected the same signals in train and test of '{folder}', found {channels}.")
    recordings = [_recordings(folder, part, channels[0]) for part in parts]
    return signals.dataset(
        folder,
        [one for part in recordings for one in part],
        length=recordings[0][0].readings.shape[2],
        stride=None,
        window_label="majority",
        mean=mean,
        std=std,
        network=network,
        in_train=len(recordings[0]) if len(parts) > 1 else None,
    )


def _channels(folder: Path, part: str) -> list[str]:
    end = f"_{part}.txt"
    found = sorted(file.name.removesuffix(end) for file in (folder / part / SIGNALS).glob(f"*{end}"))
    if not found:
        raise UsageError(f"Expected files *{end} in '{folder / part / SIGNALS}', found none; unpack the data again.")
    return found


def _recordings(folder: Path, part: str, channels: Sequence[str]) -> list[Recording]:
    """The windows of each subject, in the order of their numbers."""
    signal = [_numbers(folder / part / SIGNALS / f"{name}_{part}.txt", 2) for name in channels]
    y, subject = (_numbers(folder / part / f"{what}_{part}.txt", 1) for what in ("y", "subject"))
    sizes = {one.shape for one in signal} | {(len(one), *signal[0].shape[1:]) for one in (y, subject)}
    if len(sizes) > 1:
        raise UsageError(
            f"Expected a line for each window in all files of '{folder / part}', and as many readings in each, found "
            f"{' and '.join(map(str, sorted(sizes)))}; unpack the data again."
        )
    x = np.stack(signal, 1)
    return [
        signals.checked(f"'{folder / part}'", str(int(who)), x[subject == who], y[subject == who])
        for who in np.unique(subject)
    ]


def _numbers(file: Path, dimensions: Literal[1, 2]) -> NDArray[np.float64]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of a file without numbers
            return np.loadtxt(file, dtype=np.float64, ndmin=dimensions, encoding="utf-8-sig")
    except (OSError, ValueError, UserWarning) as error:
        raise UsageError(f"Expected numbers in '{file}', found something else: {said(error)}.") from None
