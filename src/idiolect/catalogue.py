"""Methods by name. `fedrep` is methods/fedrep.py; `fedrep+fedlag` is wrap/fedlag.py around it; a wrapper's bare name
wraps FedAvg. Hyper-parameters are set by their names: `head_epochs`, or `fedlag.top_k` where two of them share one."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from idiolect.errors import UsageError, unknown
from idiolect.method import Method, Wrapper


@cache
def _found() -> dict[str, type[Method]]:
    found: dict[str, type[Method]] = {}
    for package in ("idiolect.methods", "idiolect.wrap"):
        for file in iter_modules(import_module(package).__path__):
            module = import_module(f"{package}.{file.name}")
            own = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
            classes = [c for c in own if issubclass(c, Method)]
            if len(classes) != 1:
                raise ImportError(f"{module.__name__} must define exactly one Method, found {len(classes)}.")
            found[file.name] = classes[0]
    return found


def names() -> list[str]:
    """Every method and wrapper, sorted."""
    return sorted(_found())


def wraps(name: str) -> bool:
    return issubclass(find(name), Wrapper)


def find(name: str) -> type[Method]:
    """The class of one method or wrapper."""
    if name not in _found():
        raise unknown("method", name, _found())
    return _found()[name]


def build(name: str, settings: Mapping[str, Any] | None = None) -> Method:
    """The method of that name with these hyper-parameters; values may be text, as on a command line."""
    parts = split(name)
    sorted_out = _sort_out(parts, settings or {})
    method: Method | None = None
    for part in parts:
        inner = {} if method is None else {"inner": method}
        method = find(part)(**inner, **sorted_out[part])
    assert method is not None
    return method


def split(name: str) -> list[str]:
    """`fedrep+fedlag` -> fedrep, fedlag; with FedAvg where nothing is wrapped."""
    parts = name.strip().lower().split("+")
    for part in parts:
        find(part)
    if wraps(parts[0]):
        parts = ["fedavg", *parts]
    for part in parts[1:]:
        if not wraps(part):
            able = ", ".join(filter(wraps, names()))
            raise UsageError(f"'{part}' wraps nothing and cannot follow a '+'; wrappers: {able}.")
    if len(set(parts)) < len(parts):
        raise UsageError(f"'{name}' holds the same part twice.")
    return parts


def settings(method: Method) -> dict[str, Any]:
    """All hyper-parameters of a method and what it wraps, by the names that `build` takes."""
    own = method.name.rsplit("+", 1)[-1]
    if isinstance(method, Wrapper):
        return settings(method.inner) | {f"{own}.{k}": v for k, v in method.fields().items()}
    return {f"{own}.{k}": v for k, v in method.fields().items()}


def share_out(names: Sequence[str], settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The settings of a comparison: each to all the methods that have its part."""
    parts = {name: split(name) for name in names}
    fields = {part: _fields(find(part)) for of in parts.values() for part in of}
    placed = [(*_place(name, fields), value) for name, value in settings.items()]
    return {name: {f"{p}.{field}": value for p, field, value in placed if p in of} for name, of in parts.items()}


def _sort_out(parts: list[str], settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Each setting to the part that has a field of that name, its value in the field's type."""
    fields = {part: _fields(find(part)) for part in parts}
    found: dict[str, dict[str, Any]] = {part: {} for part in parts}
    for name, value in settings.items():
        part, field = _place(name, fields)
        found[part][field] = convert(value, fields[part][field], f"{part}.{field}")
    return found


def _place(name: str, fields: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
    """The part and the field that a setting is for: `ditto.lam`, or `lam` where one part alone has it."""
    part, _, field = name.rpartition(".")
    if part and part not in fields:
        raise unknown("method in --set", part, fields)
    holders = [p for p in ([part] if part else fields) if field in fields[p]]
    if not holders:
        known = {f for p in ([part] if part else fields) for f in fields[p]}
        if not known:
            raise UsageError(f"{part or '+'.join(fields)} has no hyper-parameters; '{name}' cannot be set.")
        raise unknown(f"hyper-parameter of {part or ', '.join(fields)}", field, known)
    if len(holders) > 1:
        choices = " or ".join(f"{p}.{field}" for p in holders)
        raise UsageError(f"'{field}' is a field of {' and of '.join(holders)}; write {choices}.")
    return holders[0], field


def _fields(kind: type[Method]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind) if f.name != "inner"}


def convert(value: Any, kind: Any, name: str) -> Any:
    """A value in a field's type, from text where it came from a command line."""
    kinds = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    if (value is None or (isinstance(value, str) and value.lower() == "none")) and type(None) in kinds:
        return None
    for k in kinds:
        if k is bool:
            if isinstance(value, bool):
                return value
            if isinstance(value, str) and value.lower() in ("true", "false", "yes", "no", "on", "off"):
                return value.lower() in ("true", "yes", "on")
        elif k in (int, float) and not isinstance(value, bool):
            try:
                number = float(value)
            except (TypeError, ValueError, OverflowError):
                continue
            if k is float:
                return number
            if number.is_integer():
                return int(number)
        elif k is str and isinstance(value, str):
            return value
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", type(None): "none"}
    expected = " or ".join(words[k] for k in kinds if k in words)
    raise UsageError(f"{name} must be {expected}; found '{value}'.")
