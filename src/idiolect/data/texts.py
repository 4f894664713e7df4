"""Values as short texts: `dirichlet:0.1,minimum=5`, `noise:0.5`. A name, and after a colon the fields of its class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from idiolect.errors import UsageError, unknown


def read(what: str, text: str, known: Mapping[str, type]) -> Any:
    """The value of one of the `known` classes that a text names; `written` gives the text back.

    After the colon come the fields, in their order or by keyword. A class that is `verbatim` gets all of it as one.
    """
    name, colon, rest = text.strip().partition(":")
    if name not in known:
        raise unknown(what, name, known)
    kind: Any = known[name]
    defaults: dict[str, Any] = {field.name: field.default for field in fields(kind)}
    if colon and not defaults:
        raise UsageError(f"{what.capitalize()} '{name}' has no options, found '{text}'; write '{name}'.")
    if getattr(kind, "verbatim", False):
        return kind(rest) if colon else kind()
    given: dict[str, Any] = {}
    for place, part in enumerate(rest.split(",") if colon else []):
        key, equals, value = part.partition("=")
        if not equals:
            if place >= len(defaults) or list(given) != list(defaults)[:place]:
                raise _malformed(what, kind, text, part)
            key, value = list(defaults)[place], part
        key = key.strip()
        if key not in defaults:
            raise unknown(f"option of {what} '{name}'", key, defaults)
        if key in given:
            raise UsageError(f"{what.capitalize()} '{text}' gives '{key}' twice; give it once.")
        try:
            given[key] = _value(value.strip(), type(defaults[key]))
        except ValueError as error:
            raise _malformed(what, kind, text, part) from error
    return kind(**given)


def written(name: str, value: Any) -> str:
    """The text from which `read` makes this value: a number in first place, and what is not default."""
    parts = []
    for place, field in enumerate(fields(value)):
        own = getattr(value, field.name)
        if own != field.default or (place == 0 and not isinstance(own, str)):
            parts.append(word(own) if place == 0 else f"{field.name}={word(own)}")
    return name + (":" + ",".join(parts) if parts else "")


def options(kind: Any) -> str:
    """The fields of a class with their defaults."""
    return ", ".join(f"{field.name}={word(field.default)}" for field in fields(kind))


def word(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else str(value)


def _value(text: str, kind: type) -> Any:
    if kind is not bool:
        return kind(text)
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


def _malformed(what: str, kind: type, text: str, part: str) -> UsageError:
    return UsageError(
        f"Expected a {what} like '{kind()}' with the options {options(kind)}, found '{part.strip()}' in '{text}'; give "
        "each option as a number or word of its kind, the first ones in order."
    )
