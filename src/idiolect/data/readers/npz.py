"""The arrays of an .npz file, as `numpy.savez(file, x=..., y=...)` writes them."""

from __future__ import annotations

from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from idiolect.data.dataset import Dataset, from_arrays
from idiolect.errors import UsageError


def reads(path: Path) -> bool:
    return path.suffix == ".npz" and not path.is_dir()


def load(file: Path, classes: int | None = None, network: str | None = None) -> Dataset:
    """`x`, `y` and, where there is one, `group`, which says whose a row is; checked as `from_arrays` checks them."""
    try:
        with np.load(file, allow_pickle=False) as held:
            arrays = {name: held[name] for name in held.files}
    except OSError as error:
        raise UsageError(f"Expected a file of arrays at '{file}': {error.strerror or error}.") from None
    except (ValueError, BadZipFile, EOFError):
        raise UsageError(
            f"Expected plain arrays in '{file}', found something else; write it with numpy.savez."
        ) from None
    if not {"x", "y"} <= arrays.keys():
        raise UsageError(
            f"Expected arrays x and y in '{file}', found {', '.join(arrays) or 'none'}; save them by these names."
        )
    return from_arrays(arrays["x"], arrays["y"], classes, name=file.stem, network=network, group=arrays.get("group"))
