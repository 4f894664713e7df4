"""Options that a user gives to what loads a data set: their names and kinds are those of its parameters, or of the
`TypedDict` that several of them share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from types import NoneType, UnionType
from typing import Any, Union, Unpack, get_args, get_origin, get_type_hints

from idiolect.errors import UsageError, unknown

WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a word", NoneType: "nothing"}


def kinds(function: Callable[..., Any], positional: int = 0) -> dict[str, Any]:
    """The kind of each option: of each parameter by name, after the first ones."""
    hints, found = get_type_hints(function), {}
    for p in list(inspect.signature(function).parameters.values())[positional:]:
        if p.kind is not p.VAR_KEYWORD:
            found[p.name] = hints[p.name]
        elif get_origin(hints[p.name]) is Unpack:
            found |= get_type_hints(get_args(hints[p.name])[0])
    return found


def check(name: str, known: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Refuse options that the data set of this name does not have, and values of another kind."""
    for option, value in options.items():
        if not known:
            raise UsageError(f"Data set '{name}' has no options, found '{option}'; leave it out.")
        if option not in known:
            raise unknown(f"option of data set '{name}'", option, known)
        if not _fits(value, known[option]):
            expected = " or ".join(_word(kind) for kind in _kinds(known[option]) if kind is not NoneType)
            raise UsageError(f"Data set '{name}': expected {option} as {expected}, found {value!r}.")


def _kinds(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a kind that an option is annotated with; what is none of these, the loader checks."""
    for one in _kinds(kind):
        if get_origin(one) is Sequence:
            if not isinstance(value, str | bytes | Mapping) and hasattr(value, "__len__"):
                return all(_fits(part, get_args(one)[0]) for part in value)
        elif one is float:
            if isinstance(value, Real) and not isinstance(value, bool):
                return True
        elif one not in WORDS or (isinstance(value, one) and not (one is int and isinstance(value, bool))):
            return True
    return False


def _word(kind: Any) -> str:
    return "a list, as [1, 2]" if get_origin(kind) is Sequence else WORDS.get(kind, str(kind))
