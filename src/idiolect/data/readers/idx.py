"""Images in IDX files, as MNIST, Fashion-MNIST and EMNIST are distributed, gzipped or not."""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import IO, cast

import numpy as np
from numpy.typing import NDArray

from idiolect.data import images
from idiolect.data.dataset import Dataset
from idiolect.data.labels import numbered
from idiolect.errors import UsageError, said, unknown

FORM = "IDX files, a folder of them or one file of images beside its labels (.gz too)"
UINT8 = 8
KINDS = {8: "uint8", 9: "int8", 11: "int16", 12: "int32", 13: "float32", 14: "float64"}
TEST = ("t10k", "test")


def reads(path: Path) -> bool:
    if path.is_dir():
        return bool(_images(path))
    return path.is_file() and ("idx1" in path.name or "idx3" in path.name or _begins(path))


def load(
    path: Path,
    prefix: str | None = None,
    transpose: bool = False,
    classes: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    network: str | None = None,
) -> Dataset:
    """Files of images, each with its labels: `train-images-idx3-ubyte` and `train-labels-idx1-ubyte`, with or without
    .gz; the pair called t10k or test is the official test set. One file of images is read with the labels beside it.

    `prefix` chooses where a folder has several sets, as EMNIST's: emnist-balanced. `transpose` turns rows into columns,
    as EMNIST's images lie on their side. Normalised as `images.samples` says.
    """
    train, test = _pairs(path, prefix) if path.is_dir() else (path, None)
    held = [_read_pair(file) for file in (train, test) if file is not None]
    shapes = {pixels.shape[1:] for pixels, _ in held}
    if len(shapes) > 1:
        raise UsageError(f"Expected images of one size in '{path}', found {' and '.join(map(str, shapes))}.")
    pixels = np.concatenate([pixels for pixels, _ in held])
    y, found, called = numbered(f"in '{path}'", np.concatenate([labels for _, labels in held]), classes)
    return images.samples(
        path,
        (pixels.transpose(0, 2, 1) if transpose else pixels)[..., None],
        y,
        name=path.resolve().name.partition(".")[0],
        in_train=len(held[0][0]) if test is not None else None,
        classes=found,
        mean=mean,
        std=std,
        network=network,
        class_names=called,
    )


def _images(folder: Path) -> list[Path]:
    return sorted(f for f in folder.iterdir() if "images" in f.name and "idx3" in f.name and f.is_file())


def _pairs(folder: Path, prefix: str | None) -> tuple[Path, Path | None]:
    """The files of training and of test images."""
    sets: dict[str, dict[str, list[Path]]] = {}
    for file in _images(folder):
        before = file.name.partition("images")[0].rstrip("-_.")
        part = "test" if before.endswith(TEST) else "train"
        name = before.removesuffix("train").removesuffix("t10k").removesuffix("test").rstrip("-_.")
        sets.setdefault(name, {}).setdefault(part, []).append(file)
    if prefix is not None and prefix not in sets:
        raise unknown(f"prefix of the IDX files in '{folder}'", prefix, sets)
    if prefix is None and len(sets) != 1:
        raise UsageError(f"Expected one data set in '{folder}', found {', '.join(sets)}; choose by prefix={min(sets)}.")
    chosen = sets[prefix if prefix is not None else min(sets)]
    for part, files in chosen.items():
        if len(files) > 1:
            raise UsageError(
                f"Expected one file of {part} images in '{folder}', found {files[0].name} and {files[1].name}."
            )
    if "train" not in chosen:
        raise UsageError(f"Expected a file of training images in '{folder}', found '{chosen['test'][0].name}' alone.")
    return chosen["train"][0], chosen["test"][0] if "test" in chosen else None


def _read_pair(file: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    beside = _labels_of(file)
    pixels, labels = _read(file, 3, "images"), _read(beside, 1, "labels")
    if len(pixels) != len(labels):
        raise UsageError(f"Expected a label for each of the {len(pixels)} images of '{file}', found {len(labels)}.")
    return pixels, labels


def _labels_of(file: Path) -> Path:
    wanted = file.name.replace("images", "labels").replace("idx3", "idx1")
    plain = wanted.removesuffix(".gz")
    for name in (wanted, plain, f"{plain}.gz"):
        if name != file.name and (other := file.with_name(name)).is_file():
            return other
    if "images" not in file.name:
        raise UsageError(
            f"Expected a file of images, with 'images' in its name and its labels beside it, found '{file}'."
        )
    raise UsageError(f"Expected the labels of '{file.name}' in '{file.with_name(wanted)}', found nothing there.")


def _begins(file: Path) -> bool:
    """Whether the first bytes are those of an IDX file, gzipped or not."""
    try:
        with _open(file) as raw:
            head = raw.read(4)
    except (OSError, EOFError, zlib.error):
        return False
    return len(head) == 4 and head[:2] == b"\0\0" and head[2] in KINDS and head[3] in (1, 2, 3, 4)


def _open(file: Path) -> IO[bytes]:
    with file.open("rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
    return cast(IO[bytes], gzip.open(file)) if zipped else file.open("rb")


def _read(file: Path, dimensions: int, what: str) -> NDArray[np.uint8]:
    try:
        with _open(file) as raw:
            shape = _shape(file, raw.read(4 + 4 * dimensions), dimensions, what)
            data = raw.read()
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"Expected an IDX file, found '{file}' broken off or not whole: {said(error)}.") from None
    if len(data) != prod(shape):
        turned = prod(int.from_bytes(n.to_bytes(4, "big"), "little") for n in shape)
        hint = "its numbers have their bytes in the wrong order" if turned == len(data) else "download it again"
        raise UsageError(
            f"Expected {prod(shape):,} bytes of {what} after the head of '{file}', found {len(data):,}; {hint}."
        )
    return np.frombuffer(data, np.uint8).reshape(shape)


def _shape(file: Path, head: bytes, dimensions: int, what: str) -> tuple[int, ...]:
    """The sizes that an IDX file's head gives, which are big-endian."""
    wanted = bytes([0, 0, UINT8, dimensions])
    if head[:4] == wanted[::-1]:
        raise UsageError(f"'{file}' has its bytes in the wrong order: IDX is big-endian. Download it again.")
    if len(head) < 4 + 4 * dimensions or head[:2] != b"\0\0" or head[2] not in KINDS:
        raise UsageError(f"Expected an IDX file of {what}, found other bytes in '{file}'; download it again.")
    if head[:4] != wanted:
        raise UsageError(
            f"Expected {what} as uint8 in {dimensions} dimensions in '{file}', found {KINDS[head[2]]} in {head[3]}; "
            "is it the file it is named for?"
        )
    return struct.unpack(f">{dimensions}I", head[4:])
