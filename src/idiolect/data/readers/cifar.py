"""CIFAR-10 and CIFAR-100 in their own binary files; their Python version, which is pickles, is refused unread."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from idiolect.data import images
from idiolect.data.dataset import Dataset
from idiolect.errors import UsageError

FORM = "the folder of CIFAR-10's or CIFAR-100's binary version"
PIXELS = 3 * 32 * 32
INNER = ("cifar-10-batches-bin", "cifar-100-binary", "cifar-10-batches-py", "cifar-100-python")
TEN = tuple(f"data_batch_{k}.bin" for k in range(1, 6))
PLACES = {"fine": (1, 100, "fine_label_names.txt"), "coarse": (0, 20, "coarse_label_names.txt")}  # byte, classes, names


def reads(path: Path) -> bool:
    folder = _inside(path)
    ten, hundred, pickled = _kinds(folder)
    return path.is_dir() and (ten or hundred or pickled)


def load(
    folder: Path,
    label: str | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    network: str | None = None,
) -> Dataset:
    """data_batch_1.bin to data_batch_5.bin and test_batch.bin; or train.bin and test.bin, with `label` fine (100
    classes) or coarse (20). The test file is the official test set. Normalised as `images.samples` says."""
    folder = _inside(folder)
    ten, hundred, _ = _kinds(folder)
    if not ten and not hundred:
        raise _pickled(folder)
    if label not in (None, *(PLACES if hundred else ())):
        raise UsageError(
            f"Expected {'label=fine or label=coarse' if hundred else 'no label= for CIFAR-10'}, found '{label}'."
        )
    place, classes, called = PLACES[label or "fine"] if hundred else (0, 10, "batches.meta.txt")
    train = [folder / name for name in (("train.bin",) if hundred else TEN)]
    test = folder / ("test.bin" if hundred else "test_batch.bin")
    for file in train:
        if not file.is_file():
            raise UsageError(f"Expected '{file.name}' in '{folder}', found none; unpack the archive again.")
    held = [
        _records(file, 2 if hundred else 1, place, classes) for file in [*train, *([test] if test.is_file() else [])]
    ]
    return images.samples(
        folder,
        np.concatenate([pixels for _, pixels in held]),
        np.concatenate([labels for labels, _ in held]),
        name="cifar100" if hundred else "cifar10",
        in_train=sum(len(labels) for labels, _ in held[: len(train)]) if test.is_file() else None,
        classes=classes,
        mean=mean,
        std=std,
        network=network,
        class_names=_names(folder / called, classes),
    )


def _inside(folder: Path) -> Path:
    """The folder that the archive holds, if this is the one it was unpacked in."""
    return next((folder / name for name in INNER if (folder / name).is_dir()), folder)


def _kinds(folder: Path) -> tuple[bool, bool, bool]:
    """Whether there are CIFAR-10's binary files, CIFAR-100's, and pickles of either."""
    there = [any((folder / name).is_file() for name in names) for names in (TEN, ("train.bin",), ("data_batch_1",))]
    hundred = all((folder / name).is_file() for name in ("train", "test", "meta"))
    return there[0], there[1], there[2] or hundred


def _pickled(folder: Path) -> UsageError:
    number = 10 if (folder / "data_batch_1").is_file() else 100
    return UsageError(
        f"'{folder}' holds CIFAR-{number}'s Python version: pickles, which can run any program when they are read, so "
        f"none is. Download cifar-{number}-binary.tar.gz, the 'binary version (suitable for C programs)', from "
        "https://www.cs.toronto.edu/~kriz/cifar.html and give the folder it unpacks to."
    )


def _records(file: Path, labels: int, place: int, classes: int) -> tuple[NDArray[np.uint8], images.Pixels]:
    """A record is one or two labels and the pixels, red, green, blue."""
    size = labels + PIXELS
    data = np.fromfile(file, np.uint8)
    if not len(data) or len(data) % size:
        raise UsageError(
            f"Expected records of {size:,} bytes in '{file}', found {len(data):,} bytes, which is no number of them; "
            "unpack the archive again."
        )
    records = data.reshape(-1, size)
    if (largest := int(records[:, place].max())) >= classes:
        raise UsageError(f"Expected labels in 0..{classes - 1} in '{file}', found {largest}; is it CIFAR's own file?")
    return records[:, place], records[:, labels:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def _names(file: Path, classes: int) -> tuple[str, ...] | None:
    """What the classes are called, if the archive's list of them is there and whole."""
    try:
        found = tuple(file.read_text("utf-8").split())
    except (OSError, UnicodeDecodeError):
        return None
    return found if len(found) == classes else None
