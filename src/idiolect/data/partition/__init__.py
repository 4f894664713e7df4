"""How rows are split over clients: one file per split, and the short text that names it."""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from inspect import getdoc, isabstract
from pkgutil import iter_modules
from typing import Any

from idiolect.data.partition.balanced import Balanced
from idiolect.data.partition.blocks import Blocks
from idiolect.data.partition.clusters import Clusters
from idiolect.data.partition.dirichlet import Dirichlet
from idiolect.data.partition.extended import Extended
from idiolect.data.partition.flwr import Flwr
from idiolect.data.partition.given import Given
from idiolect.data.partition.iid import IID
from idiolect.data.partition.pathological import Pathological
from idiolect.data.partition.quantity import Quantity
from idiolect.data.partition.resampled import Resampled
from idiolect.data.partition.shards import Shards
from idiolect.data.partition.split import Split
from idiolect.errors import UsageError, unknown

__all__ = [
    "IID", "Balanced", "Blocks", "Clusters", "Dirichlet", "Extended", "Flwr", "Given", "Pathological", "Quantity",
    "Resampled", "Shards", "Split", "describe", "parse",
]  # fmt: skip


def _found() -> dict[str, type[Split]]:
    """Every split, by the name of its file."""
    found: dict[str, type[Split]] = {}
    for file in iter_modules(__path__):
        module = import_module(f"{__name__}.{file.name}")
        own = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
        found |= {c.name(): c for c in own if issubclass(c, Split) and not isabstract(c)}
    return dict(sorted(found.items()))


SPLITS = _found()


def describe() -> list[tuple[str, str, str]]:
    """Of each split its name, its options with their defaults, and what it does in a line."""
    return [(name, _options(split), (getdoc(split) or "").partition("\n")[0]) for name, split in SPLITS.items()]


def parse(text: str) -> Split:
    """The split that a text like "iid", "dirichlet:0.1" or "dirichlet:0.1,minimum=5" names.

    After the colon come the split's fields, in their order or by keyword; `str(split)` gives the text back.
    """
    name, colon, rest = text.strip().partition(":")
    if name not in SPLITS:
        raise unknown("split", name, SPLITS)
    split: Any = SPLITS[name]
    defaults: dict[str, Any] = {field.name: field.default for field in fields(split)}
    if colon and not defaults:
        raise UsageError(f"Split '{name}' has no options, found '{text}'; write '{name}'.")
    if split.verbatim:
        return split(rest) if colon else split()
    options: dict[str, Any] = {}
    for place, part in enumerate(rest.split(",") if colon else []):
        key, equals, value = part.partition("=")
        if not equals:
            if place >= len(defaults) or list(options) != list(defaults)[:place]:
                raise _malformed(text, part)
            key, value = list(defaults)[place], part
        key = key.strip()
        if key not in defaults:
            raise unknown(f"option of split '{name}'", key, defaults)
        if key in options:
            raise UsageError(f"Split '{text}' gives '{key}' twice; give it once.")
        try:
            options[key] = _read(value.strip(), type(defaults[key]))
        except ValueError as error:
            raise _malformed(text, part) from error
    return split(**options)


def _read(value: str, kind: type) -> Any:
    if kind is not bool:
        return kind(value)
    if value.lower() not in ("true", "false"):
        raise ValueError(value)
    return value.lower() == "true"


def _options(split: type[Split]) -> str:
    return ", ".join(f"{field.name}={_word(field.default)}" for field in fields(split))


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _malformed(text: str, part: str) -> UsageError:
    name = text.partition(":")[0].strip()
    return UsageError(
        f"Expected a split like '{SPLITS[name]()}' with the options {_options(SPLITS[name])}, found '{part.strip()}' "
        f"in '{text}'; give each option as a number or word of its kind, the first ones in order."
    )
