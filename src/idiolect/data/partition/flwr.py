"""The partitioners of flwr-datasets."""

from __future__ import annotations

import inspect
import tomllib
import warnings
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from idiolect.data.partition.split import Labels, Rows, Split, check_clients
from idiolect.data.ragged import Ragged
from idiolect.errors import UsageError, unknown

OURS = {"num_partitions": "the run's clients", "seed": "the run's seed"}


@dataclass(frozen=True)
class Flwr(Split):
    """A partitioner of flwr-datasets and its options, as `flwr:DirichletPartitioner,alpha=0.1`.

    It is given the number of clients and the seed, where it takes them, and a table with one column: "label", or with
    partition_by="group" (as NaturalIdPartitioner has it) "group", the clients that the data names. Its partitions are
    taken as they are. Options are written as in TOML: alpha=[0.1, 1.0], shuffle=false, mode=strict.
    """

    verbatim: ClassVar[bool] = True
    partitioner: str = "IidPartitioner"

    def __post_init__(self) -> None:
        name, options = self._parsed()
        for option in options:
            if option in OURS:
                raise UsageError(f"flwr: {option} is {OURS[option]}; leave it out of '{self}'.")
        by = options.get("partition_by", "group" if "NaturalId" in name else "label")
        if by not in ("label", "group"):
            raise UsageError(f"flwr: expected partition_by to be label or group, found {by!r}.")
        object.__setattr__(self, "reads", "group" if by == "group" else "labels")

    def __call__(self, labels: Labels, clients: int, seed: int) -> Rows:
        check_clients(len(labels), clients)
        name, options = self._parsed()
        kind, datasets = _partitioner(name), import_module("datasets")
        column = "group" if self.reads == "group" else "label"
        ours = {"num_partitions": clients, "seed": seed, "partition_by": column}
        known = inspect.signature(kind).parameters
        for option in options:
            if option not in known:
                raise unknown(f"option of {name}", option, known)
        table = datasets.Dataset.from_dict({column: labels.tolist(), "row": np.arange(len(labels))})
        given = {k: v for k, v in ours.items() if k in known} | options
        try:
            with warnings.catch_warnings(action="ignore"):  # of draws that were repeated, of rows left out
                parts = _partitions(kind, given, table)
        except (ValueError, TypeError, KeyError, IndexError, ArithmeticError, AttributeError, AssertionError) as error:
            raise UsageError(f"flwr: {name} refuses '{self}' for {clients} clients: {_first(error)}") from error
        if len(parts) != clients:
            raise UsageError(
                f"flwr: {name} makes {len(parts)} partitions of this data, found {clients} clients; ask for "
                f"{len(parts)} clients."
            )
        return Ragged.of(parts)

    def _parsed(self) -> tuple[str, dict[str, Any]]:
        """`DirichletPartitioner,alpha=0.1` -> its name, and its options by name."""
        name, _, rest = (part.strip() for part in self.partitioner.partition(","))
        options: dict[str, Any] = {}
        for part in _parts(rest):
            option, equals, value = (text.strip() for text in part.partition("="))
            if not option or not equals or not value:
                raise UsageError(f"flwr: expected options as name=value, found '{part}' in '{self.partitioner}'.")
            if option in options:
                raise UsageError(f"flwr: '{self.partitioner}' gives '{option}' twice; give it once.")
            options[option] = _value(value)
        return name, options


def _parts(text: str) -> list[str]:
    """The text between commas that stand in no list."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts] if text else []


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _partitioner(name: str) -> Any:
    try:
        package = import_module("flwr_datasets.partitioner")
    except ImportError as error:
        raise UsageError(
            f"Split 'flwr' needs flwr-datasets, which cannot be imported here ({error}); "
            "install it with: pip install 'idiolect[flwr-datasets]'."
        ) from error
    known = [kind for kind in package.__all__ if kind != "Partitioner" and not kind.startswith("Vertical")]
    if name not in known:
        raise unknown("partitioner of flwr-datasets", name, known)
    return getattr(package, name)


def _partitions(kind: Any, options: dict[str, Any], table: Any) -> list[NDArray[np.int64]]:
    partitioner = kind(**options)
    partitioner.dataset = table
    numbers = range(partitioner.num_partitions)
    return [np.sort(np.asarray(partitioner.load_partition(number)["row"], np.int64)) for number in numbers]


def _first(error: Exception) -> str:
    """The first sentence of what it says."""
    words = " ".join(str(error).split()) or type(error).__name__
    return words.partition(". ")[0].rstrip(".") + "."
