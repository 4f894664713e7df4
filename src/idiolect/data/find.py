"""A data set by its name or by its path."""

from __future__ import annotations

import inspect
import os
import pkgutil
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from idiolect.data import sources
from idiolect.data.dataset import Dataset
from idiolect.errors import UsageError, unknown


def names() -> list[str]:
    """The known data sets: each is a file of that name in `data/sources`, with a function `load`."""
    return sorted(module.name for module in pkgutil.iter_modules(sources.__path__))


def load(name: str | os.PathLike[str], **options: Any) -> Dataset:
    """The data set `name`, or the one in an .npz file (`data/arrays.py`) or in a folder of Parquet files laid out as on
    the Hub (`data/hub.py`).

    A known name wins over a folder of the same name; write `./digits` for the folder.
    """
    if isinstance(name, str) and name in names():
        read: Callable[..., Dataset] = import_module(f"{sources.__name__}.{name}").load
        _check_options(name, read, options)
        return read(**options)
    folder = Path(name).expanduser()
    if folder.suffix == ".npz" and not folder.is_dir():
        from idiolect.data import arrays

        _check_options(str(name), arrays.load, options, given=("file",))
        return arrays.load(folder, **options)
    if folder.is_dir():
        from idiolect.data import hub

        _check_options(str(name), hub.load, options, given=("folder",))
        return hub.load(folder, **options)
    if isinstance(name, str) and os.sep not in name and not name.startswith((".", "~")):
        raise unknown("data set", name, names())
    raise UsageError(f"Expected a folder with train-*.parquet, found no folder at '{name}'; check the path.")


def _check_options(
    name: str, read: Callable[..., Dataset], options: Mapping[str, Any], given: tuple[str, ...] = ()
) -> None:
    known = [option for option in inspect.signature(read).parameters if option not in given]
    for option in options:
        if not known:
            raise UsageError(f"Data set '{name}' has no options, found '{option}'; leave it out.")
        if option not in known:
            raise unknown(f"option of data set '{name}'", option, known)
