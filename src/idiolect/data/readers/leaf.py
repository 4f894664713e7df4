"""LEAF's JSON files: `users`, `num_samples`, and for each user of `user_data` the lists x and y."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from idiolect.data import characters
from idiolect.data.dataset import Dataset, from_arrays
from idiolect.data.partition.split import is_whole
from idiolect.errors import UsageError

FORM = "LEAF's .json: one file, a folder of them, or one with train and test"

KEYS = (b'"users"', b'"num_samples"', b'"user_data"')
BEGINNING = 4096  # bytes in which one of them occurs


class User(NamedTuple):
    name: str
    x: list[Any]
    y: list[Any]


def reads(path: Path) -> bool:
    return any(_begins_so(file) for part in _files(path) for file in part)


def load(
    path: Path,
    shape: Sequence[int] | None = None,
    classes: int | None = None,
    min_count: int = 1,
    max_size: int | None = None,
    network: str | None = None,
) -> Dataset:
    """One file, a folder of them, or a folder with `train` and `test`, which `official_test` tells apart. `group` is
    the user.

    Numbers (FEMNIST) are vectors as they stand, or samples of `shape`, such as [1, 28, 28]; y are class numbers.
    Strings (Shakespeare) are rows of characters, all of one length, and y the character after them: ids of the
    vocabulary of the rows trained on (`min_count`, `max_size`).
    """
    parts = [[user for file in part for user in _users(file)] for part in _files(path)]
    users = [user for part in parts for user in part]
    if not users:
        raise UsageError(f"Expected users in '{path}', found none.")
    x, y = [row for user in users for row in user.x], [row for user in users for row in user.y]
    in_train = sum(len(user.y) for user in parts[0])
    official = np.arange(len(y)) >= in_train if parts[1] else None
    group = np.repeat(np.array([user.name for user in users]), [len(user.y) for user in users])
    name = path.resolve().stem
    if all(isinstance(row, str) for row in (*x, *y)):
        return characters.dataset(
            _rows(path, x, y), name=name, group=group, vocabulary=(min_count, max_size), network=network,
            official_test=official,
        )  # fmt: skip
    data = from_arrays(_numbers(path, x, shape), y, classes, name=name, network=network, group=group)
    return replace(data, official_test=official)


def _files(path: Path) -> tuple[list[Path], list[Path]]:
    """The files of the training set, and those of the test set."""
    if path.suffix == ".json" and path.is_file():
        return [path], []
    train, test = (sorted((path / part).glob("*.json")) for part in ("train", "test"))
    return (train, test) if train else (sorted(path.glob("*.json")), [])


def _begins_so(file: Path) -> bool:
    with file.open("rb") as opened:
        beginning = opened.read(BEGINNING)
    return any(key in beginning for key in KEYS)


def _users(file: Path) -> Iterator[User]:
    held = _parsed(file)
    for name in held["users"]:
        data = held["user_data"].get(name)
        if not isinstance(data, dict) or not all(isinstance(data.get(part), list) for part in ("x", "y")):
            raise UsageError(f"Expected the lists x and y of user '{name}' in 'user_data' of '{file}', found none.")
        user = User(name, data["x"], data["y"])
        if not user.y or len(user.x) != len(user.y):
            raise UsageError(
                f"Expected as many x as y of user '{name}' of '{file}', at least one, found {len(user.x)} and "
                f"{len(user.y)}; repair the file, or leave the user out of 'users'."
            )
        yield user


def _parsed(file: Path) -> dict[str, Any]:
    text = characters.read(file)
    try:
        held = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"Expected JSON in '{file}', found something else ({error}); download it again.") from None
    users, data = (held.get("users"), held.get("user_data")) if isinstance(held, dict) else (None, None)
    if not isinstance(users, list) or not all(isinstance(name, str) for name in users) or not isinstance(data, dict):
        raise UsageError(f"Expected LEAF's 'users', a list of names, and 'user_data' in '{file}', found others.")
    sizes = held.get("num_samples", [])
    found = [len(data[name]["y"]) for name in users] if sizes and _complete(data, users) else sizes
    if sizes != found:
        raise UsageError(f"Expected as many samples as 'num_samples' says in '{file}', found others; repair the file.")
    return dict(held)


def _complete(data: dict[str, Any], users: list[str]) -> bool:
    return all(isinstance(data.get(name), dict) and isinstance(data[name].get("y"), list) for name in users)


def _rows(path: Path, x: list[str], y: list[str]) -> characters.Codes:
    lengths = sorted({len(row) for row in x})
    if len(lengths) > 1 or not lengths[0] or any(len(row) != 1 for row in y):
        raise UsageError(
            f"Expected strings of one length as x and one character as y in '{path}', found strings of "
            f"{lengths[0]} to {lengths[-1]} and y such as {max(y, key=len)!r}."
        )
    return characters.codes("".join(a + b for a, b in zip(x, y, strict=True))).reshape(len(x), lengths[0] + 1)


def _numbers(path: Path, x: list[Any], shape: Sequence[int] | None) -> np.ndarray:
    if shape is not None and not all(is_whole(side, 1) for side in shape):
        raise UsageError(f"Expected a shape such as [1, 28, 28], found {list(shape)}.")
    try:
        array = np.array(x, np.float32)
    except (ValueError, TypeError, OverflowError) as error:
        raise UsageError(
            f"Expected x as strings with strings as y, or as lists of numbers of one length, in '{path}', found "
            f"something else ({error})."
        ) from None
    if shape is not None and (array.ndim < 2 or prod(shape) != prod(array.shape[1:])):
        raise UsageError(f"Expected samples of shape {list(shape)} in '{path}', found {list(array.shape[1:])}.")
    return array if shape is None else array.reshape(len(array), *shape)
