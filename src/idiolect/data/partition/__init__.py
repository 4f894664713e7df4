"""How rows are split over clients: one file per split, and the short text that names it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from idiolect.data.partition.dirichlet import Dirichlet
from idiolect.data.partition.given import Given
from idiolect.data.partition.iid import IID
from idiolect.data.partition.pathological import Pathological
from idiolect.data.partition.quantity import Quantity
from idiolect.data.partition.split import Split
from idiolect.errors import UsageError, unknown

__all__ = ["IID", "Dirichlet", "Given", "Pathological", "Quantity", "Split", "parse"]

SPLITS: dict[str, type[Split]] = {split.name(): split for split in (Dirichlet, Given, IID, Pathological, Quantity)}


def parse(text: str) -> Split:
    """The split that a text like "iid", "dirichlet:0.1" or "dirichlet:0.1,minimum=5" names.

    After the colon come the split's fields, in their order or by keyword; `str(split)` gives the text back.
    """
    name, colon, rest = text.strip().partition(":")
    if name not in SPLITS:
        raise unknown("split", name, SPLITS)
    split = SPLITS[name]
    defaults: dict[str, Any] = {field.name: field.default for field in fields(split)}
    if colon and not defaults:
        raise UsageError(f"Split '{name}' has no options, found '{text}'; write '{name}'.")
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
            options[key] = type(defaults[key])(value.strip())
        except ValueError as error:
            raise _malformed(text, part) from error
    return split(**options)


def _malformed(text: str, part: str) -> UsageError:
    name = text.partition(":")[0].strip()
    known = ", ".join(f"{field.name}={field.default}" for field in fields(SPLITS[name]))
    return UsageError(
        f"Expected a split like '{SPLITS[name]()}' with the options {known}, found '{part.strip()}' in "
        f"'{text}'; give each option as a number or word of its kind, the first ones in order."
    )
