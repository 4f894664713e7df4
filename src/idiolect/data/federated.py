"""A data set divided over clients: the rows that each client trains, validates and tests on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from idiolect.data.dataset import Dataset
from idiolect.data.holdout import Index, Parts, carve, deal_official
from idiolect.data.partition import Split, parse
from idiolect.data.partition.split import Rows
from idiolect.data.ragged import Ragged
from idiolect.data.streams import stream
from idiolect.errors import UsageError

TestFrom = Literal["merged", "official"]


@dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """Row numbers of `dataset` per client, ascending; any sequence of arrays may be given for a part.

    No row belongs to two clients or to two parts. `split_hash` identifies the division; `recipe` says in
    words how it was made.
    """

    dataset: Dataset
    train: Ragged
    validation: Ragged
    test: Ragged
    split_hash: str
    recipe: str

    def __post_init__(self) -> None:
        for part in ("train", "validation", "test"):
            if not isinstance(rows := getattr(self, part), Ragged):
                object.__setattr__(self, part, Ragged.of(rows))

    @property
    def clients(self) -> int:
        return len(self.train)

    def __repr__(self) -> str:
        return f"Federation({self.recipe!r}, split_hash={self.split_hash[:12]!r})"

    def table(self) -> list[dict[str, Any]]:
        """One line per client: rows per part, rows per class in all parts, the entropy of these in bits."""
        lines = []
        for client, parts in enumerate(zip(self.train, self.validation, self.test, strict=True)):
            labels = np.bincount(self.dataset.strata[np.concatenate(parts)], minlength=self._strata)
            share = labels[labels > 0] / labels.sum()
            train, validation, test = map(len, parts)
            lines.append(
                {
                    "client": client,
                    "train": train,
                    "validation": validation,
                    "test": test,
                    "labels": labels.tolist(),
                    "entropy": abs(float(share @ np.log2(share))),
                }
            )
        return lines

    @property
    def _strata(self) -> int:
        return self.dataset.classes if self.dataset.loss == "cross_entropy" else 1


def federate(
    dataset: Dataset,
    split: Split | str,
    clients: int,
    seed: int,
    test: float = 0.25,
    validation: float = 0.0,
    test_from: TestFrom = "merged",
) -> Federation:
    """Split the rows over clients, and keep some of each client's rows from training, stratified by class.

    test_from="merged": all rows are split, and the share `test` of each client's is its test set. Every
    client with two rows or more gets at least one row to train with and one to test on; a single row is
    trained with.

    test_from="official": the training rows are split, and the official test rows are dealt so that each
    client's test set follows its own class proportions; `test` is not used.

    `validation` is a share of the rows that were split, in both cases.
    """
    split = parse(split) if isinstance(split, str) else split
    _check_shares(test, validation, test_from)
    pool = _pool(dataset, test_from)
    owned = [pool[rows] for rows in split(_keys(dataset, split)[pool], clients, seed)]
    _check_disjoint(split, owned, clients)
    share = test if test_from == "merged" else 0.0
    parts = [
        carve(dataset.strata, rows, share, validation, stream(seed, f"holdout of client {client}"))
        for client, rows in enumerate(owned)
    ]
    if test_from == "official":
        parts = [part._replace(test=rows) for part, rows in zip(parts, _official(dataset, owned, seed), strict=True)]
    return _federation(dataset, parts, _recipe(dataset, split, clients, seed, test, validation, test_from))


def split_hash(parts: Iterable[tuple[Index, Index, Index]]) -> str:
    """SHA-256 over the number of clients and, client by client, length and bytes of its three arrays."""
    parts = list(parts)
    digest = hashlib.sha256(len(parts).to_bytes(8, "little"))
    for client in parts:
        for rows in client:
            digest.update(len(rows).to_bytes(8, "little"))
            digest.update(rows.astype("<i8").tobytes())
    return digest.hexdigest()


def _check_shares(test: float, validation: float, test_from: str) -> None:
    if test_from not in ("merged", "official"):
        raise UsageError(f"Expected test_from to be 'merged' or 'official', found {test_from!r}.")
    held_out = (test if test_from == "merged" else 0.0) + validation
    if not (0 <= test < 1 and 0 <= validation < 1 and held_out < 1):
        raise UsageError(
            "Expected shares of at least 0 for test and validation that leave something for training, found "
            f"test={test} and validation={validation}; their sum must be less than 1."
        )


def _pool(dataset: Dataset, test_from: TestFrom) -> Index:
    """The rows to be split."""
    if test_from == "merged":
        return np.arange(len(dataset))
    if dataset.official_test is None or not dataset.official_test.any():
        raise UsageError(
            f"Expected an official test set for test_from='official', found none in '{dataset.name}'; use "
            "test_from='merged'."
        )
    return np.flatnonzero(~dataset.official_test)


def _keys(dataset: Dataset, split: Split) -> np.ndarray:
    if split.reads == "group":
        if dataset.group is None:
            raise UsageError(
                f"Expected clients named by the data for split '{split}', found none in '{dataset.name}'; "
                "load it with group=COLUMN, or use another split."
            )
        return dataset.group
    if split.reads == "labels" and dataset.loss != "cross_entropy":
        raise UsageError(
            f"Expected class labels for split '{split}', found numbers as targets in '{dataset.name}'; use "
            "'iid', 'quantity' or 'given'."
        )
    return dataset.strata


def _check_disjoint(split: Split, owned: Rows, clients: int) -> None:
    rows = np.concatenate(owned)
    if len(owned) != clients or min(map(len, owned)) == 0 or len(np.unique(rows)) != len(rows):
        raise UsageError(
            f"Expected split '{split}' to give {clients} clients at least one row each and none twice, found "
            f"{len(owned)} clients with {len(rows)} rows, {len(np.unique(rows))} of them different, the "
            f"smallest with {min(map(len, owned))}."
        )


def _official(dataset: Dataset, owned: Rows, seed: int) -> Rows:
    official = np.arange(len(dataset))[dataset.official_test]
    if len(official) < len(owned):
        raise UsageError(
            f"Expected an official test row for each of {len(owned)} clients, found {len(official)} in "
            f"'{dataset.name}'; ask for {len(official)} clients or fewer, or use test_from='merged'."
        )
    left_out = np.setdiff1d(_pool(dataset, "official"), np.concatenate(owned))  # its share goes to nobody
    return deal_official(dataset.strata, [*owned, left_out], official, seed)[: len(owned)]


def _recipe(
    dataset: Dataset,
    split: Split,
    clients: int,
    seed: int,
    test: float,
    validation: float,
    test_from: TestFrom,
) -> str:
    held_out = f"test {test:g} of each client's rows" if test_from == "merged" else "official test rows dealt"
    validated = f", validation {validation:g}" if validation else ""
    return f"{dataset.name}, {split}, {clients} clients, seed {seed}, {held_out}{validated}"


def _federation(dataset: Dataset, parts: list[Parts], recipe: str) -> Federation:
    train, validation, test = map(Ragged.of, zip(*parts, strict=True))
    return Federation(dataset, train, validation, test, split_hash(parts), recipe)
