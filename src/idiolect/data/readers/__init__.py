"""Files that a user brings, one reader a form, found by its file name. A reader has

FORM: the form in a few words, as a list of forms names it (its file name stands in where there is none);
BEFORE: the readers that it goes before where both read a path;
reads(path): whether what lies there has the form, from names and first bytes alone. True where it nearly has it too:
    `load` then says what is missing;
load(path, **options): the `Dataset`.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from pathlib import Path
from types import ModuleType

from idiolect.errors import UsageError, unknown


def readers() -> dict[str, ModuleType]:
    """Every reader by its name."""
    found = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name: import_module(f"{__name__}.{name}") for name in found}


def reader_of(path: Path, form: str | None = None) -> ModuleType | None:
    """The reader of what lies at this path: the one asked for, or the one that reads it. Of several the one that goes
    before the others; without such a one the user has to say."""
    known = readers()
    if form is not None:
        if form not in known:
            raise unknown("form of data", form, known)
        return known[form]
    claims = {name: reader for name, reader in known.items() if reader.reads(path)}
    behind = {other for reader in claims.values() for other in getattr(reader, "BEFORE", ())}
    first = [name for name in claims if name not in behind]
    if len(first) > 1:
        raise UsageError(
            f"'{path}' can be read as {' or as '.join(form_of(claims[name]) for name in first)}; say which by form=, "
            f"one of {', '.join(first)} (on the command line --data-options form={first[0]})."
        )
    return claims[first[0]] if first else None


def form_of(reader: ModuleType) -> str:
    return str(getattr(reader, "FORM", reader.__name__.rpartition(".")[2]))
