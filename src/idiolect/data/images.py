"""Images: encoded bytes to pixels, and pixels to samples."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from idiolect.data import cache
from idiolect.data.dataset import Dataset, count_classes, default_network
from idiolect.data.stored import BLOCK, Pixels, Stored, blocks, normalised
from idiolect.errors import UsageError

FLOATS = 64 << 20  # bytes up to which images are kept as the floats that they become


def samples(
    where: Path,
    pixels: Pixels,
    labels: NDArray[Any],
    *,
    name: str,
    in_train: int | None = None,
    classes: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    network: str | None = None,
    group: NDArray[Any] | None = None,
    class_names: tuple[str, ...] | None = None,
) -> Dataset:
    """Pixels scaled to [0, 1] and normalised per channel by `mean` and `std`, which are measured on the training images
    where not given (mean 0 and std 1 leave [0, 1] as it is). Large sets stay pixels, which become floats row by row as
    they are asked for. The first `in_train` rows are the training set, the others the official test set; all, where
    there is none."""
    if mean is None or std is None:
        measured = channel_statistics(pixels[:in_train])
        mean, std = measured[0] if mean is None else mean, measured[1] if std is None else std
    x = _kept(where, pixels, mean, std)
    y = torch.from_numpy(labels.astype(np.int64))
    return Dataset(
        name,
        x,
        y,
        classes=classes or count_classes(name, y),
        network=network or default_network(x),
        group=group,
        official_test=None if in_train is None else np.arange(len(x)) >= in_train,
        class_names=class_names,
    )


def channel_statistics(pixels: Pixels) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel of pixels scaled to [0, 1]; exact, from the histogram."""
    values = np.arange(256) / 255
    channels = range(pixels.shape[3])
    counts = np.zeros((len(channels), 256), np.int64)
    for some in blocks(pixels):
        counts += [np.bincount(some[..., channel].ravel(), minlength=256) for channel in channels]
    shares = counts / (pixels.size // len(channels))
    means = [float(share @ values) for share in shares]
    stds = [float(np.sqrt(share @ (values - mean) ** 2)) for share, mean in zip(shares, means, strict=True)]
    return tuple(means), tuple(stds)


def decode(where: Path, blobs: Sequence[bytes | None], size: int | None = None) -> Pixels:
    """PNG or JPEG files as one array. The first one decides the size, and whether there is colour; with `size` each is
    cut to a square about its middle and scaled to size x size. The same bytes are decoded once, and from then on mapped
    from the cache (`data/cache.py`)."""
    import PIL

    if not len(blobs):
        raise UsageError(f"Expected at least one row in '{where}', found none.")
    if size is not None and size < 1:
        raise UsageError(f"Expected a size of at least 1 for the images of '{where}', found {size}.")
    how = f"Pillow {PIL.__version__}" + (f", {size}x{size}" if size else "")
    return cache.kept(cache.key(how, blobs), len(blobs), lambda: _decoded(where, blobs, size))


def _decoded(where: Path, blobs: Sequence[bytes | None], size: int | None = None) -> Iterator[Pixels]:
    """Some pictures at a time."""
    first = _scaled(_open(where, 0, blobs[0]), size)
    mode = "L" if first.mode in ("1", "L") else "RGB"
    shape = (first.height, first.width, len(mode))
    together = max(1, BLOCK // (shape[0] * shape[1] * shape[2]))
    for start in range(0, len(blobs), together):
        some = np.empty((min(together, len(blobs) - start), *shape), np.uint8)
        for row in range(start, start + len(some)):
            picture = _scaled(_open(where, row, blobs[row]), size)
            if (picture.height, picture.width) != shape[:2]:
                raise UsageError(
                    f"Expected images of one size in '{where}', found {shape[0]}x{shape[1]} and, in row {row}, "
                    f"{picture.height}x{picture.width}; resize them first (data as on the Hub: size={min(shape[:2])})."
                )
            some[row - start] = np.asarray(picture if picture.mode == mode else picture.convert(mode)).reshape(shape)
        yield some


def _scaled(picture: Any, size: int | None) -> Any:
    from PIL import Image, ImageOps

    if size is None:
        return picture
    mode = "L" if picture.mode in ("1", "L") else "RGB"  # in which colours may be averaged
    return ImageOps.fit(picture.convert(mode), (size, size), Image.Resampling.BILINEAR)


def _open(where: Path, row: int, blob: bytes | None) -> Any:
    from PIL import Image

    if blob is None:
        raise UsageError(
            f"Expected the image itself in row {row} of '{where}', found no bytes; save the data set with "
            "its images embedded."
        )
    try:
        picture = Image.open(io.BytesIO(blob), formats=("PNG", "JPEG"))
        picture.load()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # Pillow's ways of saying so
        raise UsageError(
            f"Expected a PNG or JPEG image in row {row} of '{where}', found bytes that cannot be "
            "decoded; download the file again."
        ) from error
    if picture.mode.startswith(("I", "F")):
        raise UsageError(
            f"Expected images of 8 bits per channel in '{where}', found mode {picture.mode} in row {row}; "
            "convert them first."
        )
    return picture


def _kept(where: Path, pixels: Pixels, mean: Sequence[float], std: Sequence[float]) -> Tensor | Stored:
    """Few images as the floats that they become, many as the pixels that they are."""
    channels = pixels.shape[3]
    if len(mean) != channels or len(std) != channels or not min(std) > 0:
        raise UsageError(
            f"Expected mean and std > 0 for each of the {channels} channels of '{where}', found "
            f"mean={tuple(mean)} and std={tuple(std)}."
        )
    if 4 * pixels.size <= FLOATS:
        return normalised(pixels, mean, std).contiguous()
    whole = isinstance(pixels, np.memmap) and isinstance(pixels.base, mmap)  # not a part of what the file holds
    return Stored(Path(pixels.filename) if whole else pixels, mean, std, where.name)  # type: ignore[attr-defined]
