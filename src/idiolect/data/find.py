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
from idiolect.data.readers import reader_of
from idiolect.errors import UsageError, unknown


def names() -> list[str]:
    """The known data sets: each is a file of that name in `data/sources`, with a function `load`."""
    return sorted(module.name for module in pkgutil.iter_modules(sources.__path__))


def load(name: str | os.PathLike[str], **options: Any) -> Dataset:
    """The data set of this name (`data/sources`), or the one at this path, in any form that has a reader
    (`data/readers`).

    A known name wins over a folder of the same name; write `./digits` for the folder.
    """
    if isinstance(name, str) and name in names():
        read: Callable[..., Dataset] = import_module(f"{sources.__name__}.{name}").load
        _check_options(name, read, options)
        return read(**options)
    path = Path(name).expanduser()
    if (reader := reader_of(path)) is not None:
        _check_options(str(name), reader.load, options, positional=1)
        read = reader.load
        return read(path, **options)
    if isinstance(name, str) and os.sep not in name and not name.startswith((".", "~")):
        raise unknown("data set", name, names())
    if not path.exists():
        raise UsageError(f"Expected a data set at '{name}', found nothing there; check the path.")
    raise UsageError(
        f"Expected an .npz file or a folder with train-*.parquet in it or in its folder 'data', found neither at "
        f"'{name}'; check the path."
    )


def _check_options(name: str, read: Callable[..., Dataset], options: Mapping[str, Any], positional: int = 0) -> None:
    known = list(inspect.signature(read).parameters)[positional:]
    for option in options:
        if not known:
            raise UsageError(f"Data set '{name}' has no options, found '{option}'; leave it out.")
        if option not in known:
            raise unknown(f"option of data set '{name}'", option, known)
