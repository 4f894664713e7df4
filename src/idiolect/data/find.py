"""A data set by its name or by its path."""

from __future__ import annotations

import os
import pkgutil
from collections import Counter
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from idiolect.data import online, options_of, sources
from idiolect.data.dataset import Dataset, from_arrays
from idiolect.data.readers import form_of, reader_of, readers
from idiolect.errors import UsageError, unknown

PICKLE = "a pickle can run any program when it is read, so none is; save the tensors x and y as .safetensors or .npz"
ARCHIVE = "unpack it, and give its folder"
OTHERS = {  # what to do with a form that nobody reads
    **dict.fromkeys((".pt", ".pth", ".pkl", ".pickle", ".joblib"), PICKLE),
    **dict.fromkeys((".zip", ".tar", ".tgz", ".gz", ".bz2", ".xz", ".7z", ".zst"), ARCHIVE),
    **dict.fromkeys((".xls", ".xlsx", ".ods"), "save the sheet as .csv"),
    **dict.fromkeys((".h5", ".hdf5", ".mat"), "save its arrays x and y as .npz by numpy.savez"),
    **dict.fromkeys((".arff", ".feather", ".arrow", ".jsonl"), "save the table as .csv or .parquet"),
}


def names() -> list[str]:
    """The known data sets: each is a file of that name in `data/sources`, with a function `load`."""
    return sorted(module.name for module in pkgutil.iter_modules(sources.__path__))


def load(name: str | os.PathLike[str], form: str | None = None, **options: Any) -> Dataset:
    """The data set of this name (`data/sources`), the Hub's of this name (`data/online.py`), or the one at this path,
    in any form that has a reader (`data/readers`), which `form` names where the path leaves it open.

    A known name wins over a folder of the same name; write `./digits` for the folder.
    """
    if isinstance(name, str) and name in names():
        read: Callable[..., Dataset] = import_module(f"{sources.__name__}.{name}").load
        options_of.check(name, options_of.kinds(read), options if form is None else {"form": form, **options})
        return read(**options)
    if isinstance(name, str) and online.named(name):
        return online.load(name, **options)
    path = Path(name).expanduser()
    reader = reader_of(path, form)
    if reader is None or (form is not None and not path.exists()):
        raise _nothing_there(name, path) if not path.exists() else _unread(path)
    options_of.check(str(name), options_of.kinds(reader.load, positional=1), options)
    read = reader.load
    return read(path, **options)


def taken(data: Any) -> Any:
    """What stands in a run for data that a user hands over: the path as text, or the data set of the arrays (x, y)."""
    if isinstance(data, os.PathLike):
        return os.path.join(os.curdir, data)  # so that no known name is meant
    if isinstance(data, tuple):
        if len(data) != 2:
            raise UsageError(f"data: expected two arrays, (x, y), found {len(data)}; for more see data.from_arrays.")
        return from_arrays(*data)
    return data


def _nothing_there(name: str | os.PathLike[str], path: Path) -> UsageError:
    if isinstance(name, str) and os.sep not in name and not path.suffix and not name.startswith((".", "~")):
        return unknown("data set", name, [*names(), *online.KNOWN])
    beside = [other.name for other in path.parent.glob("[!.]*")]
    near = get_close_matches(path.name, beside, n=1, cutoff=0.75)
    hint = f"did you mean '{path.parent / near[0]}'?" if near else "check the path."
    return UsageError(f"Expected a data set at '{name}', found nothing there; {hint}")


def _unread(path: Path) -> UsageError:
    if path.is_file() and path.suffix.lower() in OTHERS:
        return UsageError(f"Nobody reads '{path}', {_what(path)}; {OTHERS[path.suffix.lower()]}.")
    forms = "; ".join(form_of(reader) for reader in readers().values())
    return UsageError(f"Nobody reads '{path}', {_what(path)}. What can be read: {forms}.")


def _what(path: Path) -> str:
    """What lies there, as far as names tell."""
    if not path.is_dir():
        return f"a {path.suffix} file" if path.suffix else "a file without a suffix"
    inside = list(islice(path.iterdir(), 1000))
    kinds = Counter("folders" if one.is_dir() else f"{one.suffix or 'nameless'} files" for one in inside)
    return f"a folder with {', '.join(f'{n} {kind}' for kind, n in kinds.most_common(4)) or 'nothing in it'}"
