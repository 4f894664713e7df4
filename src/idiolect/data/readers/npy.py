"""Large arrays as a folder: x.npy, y.npy and, where there is one, group.npy, as `numpy.save` writes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from idiolect.data import images
from idiolect.data.dataset import Dataset, count_classes, default_network, to_labels
from idiolect.data.stored import Stored, mapped
from idiolect.errors import UsageError

FORM = "a folder with x.npy, y.npy and maybe group.npy, which stay in their files"
BEFORE = ("signals",)  # x.npy and y.npy are no subjects


def reads(path: Path) -> bool:
    return (path / "x.npy").is_file()


def load(
    folder: Path,
    classes: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    network: str | None = None,
) -> Dataset:
    """`x` stays in its file: a row is read, and checked, when a client needs it. `y` is read and checked here; `group`
    says whose a row is.

    x holds floats of any kind, token ids, or uint8 pixels [rows, height, width, channels], scaled to [0, 1] and
    normalised per channel by `mean` and `std`; these are 0 and 1 where not given, as measuring them would read all.
    """
    file, name = folder / "x.npy", folder.resolve().name
    if not (folder / "y.npy").is_file():
        raise UsageError(f"Expected x.npy and y.npy in '{folder}', found no y.npy; save the labels by this name.")
    values, y = mapped(file), to_labels(name, np.array(mapped(folder / "y.npy")))
    group = mapped(folder / "group.npy") if (folder / "group.npy").is_file() else None
    classes = count_classes(name, y) if classes is None else classes
    if values.dtype == np.uint8 and values.ndim == 4:
        channels = values.shape[3]
        statistics = {
            "mean": [0.0] * channels if mean is None else mean,
            "std": [1.0] * channels if std is None else std,
        }
        about = {"name": name, "classes": classes, "network": network, "group": group}
        return images.samples(folder, values, y.numpy(), **about, **statistics)  # type: ignore[arg-type]
    if values.dtype == np.uint8 or mean is not None or std is not None:
        raise UsageError(
            f"Expected uint8 pixels [rows, height, width, channels] in '{file}', found {values.dtype} "
            f"{list(values.shape)}; reshape them, or save other numbers as float32 or int64 and leave mean and std out."
        )
    x = Stored(file, name=name)
    return Dataset(name, x, y, classes, network or default_network(x), group)
