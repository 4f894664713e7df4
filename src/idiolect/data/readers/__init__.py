"""Files that a user brings, one reader a form: `reads(path)` says whether a path has it, from names and first bytes
alone, and `load(path, **options)` reads it. A reader is found by its file name."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from pathlib import Path
from types import ModuleType


def reader_of(path: Path) -> ModuleType | None:
    """The reader of what lies at this path."""
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        reader = import_module(f"{__name__}.{module.name}")
        if reader.reads(path):
            return reader
    return None
