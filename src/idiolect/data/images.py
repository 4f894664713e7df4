"""Images: encoded bytes to pixels, and pixels to samples."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from idiolect.data.dataset import Dataset, count_classes, default_network
from idiolect.errors import UsageError

Pixels = NDArray[np.uint8]  # [rows, height, width, channels]


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
) -> Dataset:
    """Pixels scaled to [0, 1] and normalised per channel by `mean` and `std`, which are measured on the training images
    where not given (mean 0 and std 1 leave [0, 1] as it is). The first `in_train` rows are the training set, the others
    the official test set; all, where there is none."""
    if mean is None or std is None:
        measured = channel_statistics(pixels[:in_train])
        mean, std = measured[0] if mean is None else mean, measured[1] if std is None else std
    x = _normalise(where, pixels, mean, std)
    y = torch.from_numpy(labels.astype(np.int64))
    return Dataset(
        name,
        x,
        y,
        classes=classes or count_classes(name, y),
        network=network or default_network(x),
        group=group,
        official_test=None if in_train is None else np.arange(len(x)) >= in_train,
    )


def channel_statistics(pixels: Pixels) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel of pixels scaled to [0, 1]; exact, from the histogram."""
    values = np.arange(256) / 255
    means, stds = [], []
    for channel in range(pixels.shape[3]):
        share = np.bincount(pixels[..., channel].ravel(), minlength=256) / pixels[..., channel].size
        means.append(float(share @ values))
        stds.append(float(np.sqrt(share @ (values - means[-1]) ** 2)))
    return tuple(means), tuple(stds)


def decode(where: Path, blobs: Sequence[bytes | None]) -> Pixels:
    """PNG or JPEG files as one array. The first one decides the size, and whether there is colour."""
    pixels: Pixels | None = None
    mode = ""
    for row, blob in enumerate(blobs):
        picture = _open(where, row, blob)
        if pixels is None:
            mode = "L" if picture.mode in ("1", "L") else "RGB"
            pixels = np.empty((len(blobs), picture.height, picture.width, len(mode)), np.uint8)
        if (picture.height, picture.width) != pixels.shape[1:3]:
            raise UsageError(
                f"Expected images of one size in '{where}', found {pixels.shape[1]}x{pixels.shape[2]} "
                f"and, in row {row}, {picture.height}x{picture.width}; resize them first."
            )
        pixels[row] = np.asarray(picture if picture.mode == mode else picture.convert(mode)).reshape(pixels.shape[1:])
    if pixels is None:
        raise UsageError(f"Expected at least one row in '{where}', found none.")
    return pixels


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
    except (OSError, SyntaxError) as error:  # Pillow's two ways of saying that the bytes are broken
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


def _normalise(where: Path, pixels: Pixels, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    channels = pixels.shape[3]
    if len(mean) != channels or len(std) != channels or not min(std) > 0:
        raise UsageError(
            f"Expected mean and std > 0 for each of the {channels} channels of '{where}', found "
            f"mean={tuple(mean)} and std={tuple(std)}."
        )
    x = torch.from_numpy(pixels).permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
    by_channel = [torch.tensor(values, dtype=torch.float32).view(1, channels, 1, 1) for values in (mean, std)]
    return x.div_(255).sub_(by_channel[0]).div_(by_channel[1])
