"""The arrays of an .npz file, as `numpy.savez(file, x=..., y=...)` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

import numpy as np

from idiolect.data import arrays
from idiolect.data.dataset import Dataset
from idiolect.data.stored import BROKEN
from idiolect.errors import UsageError

FORM = "an .npz file with x and y, or x_train, y_train, x_test and y_test"


def reads(path: Path) -> bool:
    return path.suffix.lower() == ".npz" and path.is_file()


def load(file: Path, **options: Unpack[arrays.Options]) -> Dataset:
    """`x`, `y` and, where there is one, `group`, which says whose a row is; or these for training and testing, as
    `arrays.dataset` takes them. Python objects, which are pickles, are refused unread."""
    return arrays.dataset(file, _held(file), **options)


def _held(file: Path) -> dict[str, arrays.Array]:
    try:
        opened = np.load(file, allow_pickle=False)
        if not isinstance(opened, np.lib.npyio.NpzFile):
            raise ValueError("one array, which has no name")
        with opened as held:
            found = {name: held[name] for name in held.files}
        if not all(isinstance(array, np.ndarray) for array in found.values()):
            raise ValueError("other files among the arrays, which come as bytes")
        return found
    except OSError as error:
        raise UsageError(f"Expected a file of arrays at '{file}': {error.strerror or error}.") from None
    except BROKEN:
        raise UsageError(
            f"Expected plain arrays in '{file}', found something else (objects, or bytes that are not whole); write it "
            "with numpy.savez."
        ) from None
