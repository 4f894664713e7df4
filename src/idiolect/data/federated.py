"""A data set divided over clients: the rows that each client trains, validates and tests on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from idiolect.data.apportion import Counts
from idiolect.data.dataset import Dataset
from idiolect.data.holdout import Parts, carve, deal_official
from idiolect.data.partition import Given, Split, parse
from idiolect.data.partition.divided import Divided
from idiolect.data.partition.split import Rows
from idiolect.data.ragged import Index, Ragged, count_different
from idiolect.data.shift import Shift, Shifted
from idiolect.data.streams import stream
from idiolect.errors import UsageError

TestFrom = Literal["auto", "merged", "official"]
AT_ONCE = 20_000  # clients in one piece of work: what it makes meanwhile stays in the cache


@dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """Row numbers of `dataset` per client, ascending; any sequence of arrays may be given for a part.

    No row belongs to two clients or to two parts, unless the split repeats rows: then no row that anybody trains with
    is in another part of anybody. `split_hash` identifies the division; `recipe` says in words how it was made, and
    `made_with` the arguments of `federate`, where it was. Vocabularies and statistics of `dataset` are those of the
    rows of `train`. `shift` changes the samples of each client. `held_out` clients never train: they come last, and
    these are the numbers that they had before; nothing is fitted to their rows.
    """

    dataset: Dataset
    train: Ragged
    validation: Ragged
    test: Ragged
    split_hash: str
    recipe: str
    made_with: Mapping[str, Any] = field(default_factory=dict)
    shift: Shifted | None = None
    held_out: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for part in ("train", "validation", "test"):
            object.__setattr__(self, part, Ragged.of(getattr(self, part)))
        trained = self.train.rows[: self.train.bounds[self.clients - len(self.held_out)]]
        object.__setattr__(self, "dataset", self.dataset.fitted(trained))

    @property
    def clients(self) -> int:
        return len(self.train)

    def __repr__(self) -> str:
        return f"Federation({self.recipe!r}, split_hash={self.split_hash[:12]!r})"

    def shifted(self, shift: Shift, seed: int) -> Federation:
        """The same rows, with the samples of each client changed."""
        shift.check(self.dataset)
        recipe = f"{self.recipe}, shift {shift}"
        mark = _marked(self.split_hash, f"shift {shift}, seed {seed}")
        shifted = Shifted(shift, shift.places(self.clients, seed), seed)
        return replace(self, shift=shifted, recipe=recipe, split_hash=mark)

    def holding_out(self, count: int, seed: int) -> Federation:
        """The same clients, of which so many, chosen from the seed, never train. They are put last; the others, and
        they among themselves, keep their order."""
        away = np.sort(stream(seed, "held-out clients").permutation(self.clients)[:count])
        order = np.concatenate([np.setdiff1d(np.arange(self.clients), away), away])
        train, validation, test = (getattr(self, part).take(order) for part in ("train", "validation", "test"))
        mark = _marked(split_hash(train, validation, test), f"{count} held out")
        if self.shift is not None:
            mark = _marked(mark, f"shift {self.shift.shift}, seed {self.shift.seed}")
        shift = self.shift and replace(self.shift, places=self.shift.places[order])
        recipe = f"{self.recipe}, {count} clients held out"
        held_out = tuple(away.tolist())
        data = self.dataset.origin or self.dataset  # fitted anew, without their rows
        return Federation(data, train, validation, test, mark, recipe, self.made_with, shift, held_out)

    def histogram(self, clients: slice = slice(None)) -> Counts:
        """Rows of each class in all parts of each client: [clients, classes]; one class where there are no labels."""
        start, stop, _ = clients.indices(self.clients)
        classes, found = self._strata, np.zeros((stop - start) * self._strata, np.int64)
        for part in (self.train, self.validation, self.test):
            owner = np.repeat(np.arange(stop - start), part.sizes[start:stop])
            labels = self.dataset.strata[part.rows[part.bounds[start] : part.bounds[stop]]]
            found += np.bincount(owner * classes + labels, minlength=len(found))
        return found.reshape(-1, classes)

    def table(self, clients: slice = slice(None)) -> list[dict[str, Any]]:
        """One line per client: rows per part, rows per class in all parts, the entropy of these in bits."""
        labels = self.histogram(clients)
        columns = {
            "client": np.arange(self.clients)[clients],
            **{part: getattr(self, part).sizes[clients] for part in ("train", "validation", "test")},
            "labels": labels,
            "entropy": entropies(labels),
        }
        rows = zip(*(column.tolist() for column in columns.values()), strict=True)
        return [dict(zip(columns, row, strict=True)) for row in rows]

    @property
    def _strata(self) -> int:
        return self.dataset.classes if self.dataset.loss == "cross_entropy" else 1


def entropies(labels: Counts) -> NDArray[np.float64]:
    """The entropy of each row of counts, in bits."""
    share = labels / np.maximum(labels.sum(1, keepdims=True), 1)
    found: NDArray[np.float64] = -(share * np.log2(share, where=share > 0, out=np.zeros_like(share))).sum(1)
    return np.abs(found)


def federate(
    dataset: Dataset,
    split: Split | str,
    clients: int,
    seed: int,
    test: float = 0.25,
    validation: float = 0.0,
    test_from: TestFrom = "auto",
) -> Federation:
    """Split the rows over clients, and keep some of each client's rows from training, stratified by class.

    test_from="merged": all rows are split, and the share `test` of each client's is its test set. Every
    client with two rows or more gets at least one row to train with and one to test on; a single row is
    trained with.

    test_from="official": the training rows are split, and the official test rows are dealt so that each
    client's test set follows its own class proportions; `test` is not used.

    test_from="auto": official where the data has an official test set, merged otherwise.

    `validation` is a share of the rows that were split, in both cases.

    A split that repeats rows would bring a row to train one client and to test another. There the rows are divided
    first, by the same shares, and all clients draw from each part.

    Clients that come with their own test rows keep them: those of a `Divided` split, and with split "given" those of a
    data set with `own_test`. `test` and `test_from` are not used for them.
    """
    split = parse(split) if isinstance(split, str) else split
    if isinstance(split, Divided):
        parts = Parts(*map(Ragged.of, zip(*split.parts(dataset, clients), strict=True)))
        return Federation(dataset, *parts, split_hash(*parts), f"{dataset.name}, {split}, {clients} clients")
    own = dataset.own_test and isinstance(split, Given)
    test_from = "official" if own else _resolved(dataset, test_from)
    _check_shares(test, validation, test_from)
    pool = _pool(dataset, test_from)
    recipe = _recipe(dataset, split, clients, seed, test, validation, test_from, own)
    made_with = {"split": str(split), "clients": int(clients), "seed": int(seed), "test": float(test)}
    made_with |= {"validation": float(validation), "test_from": test_from}
    if split.repeats:
        parts = _drawn(dataset, split, pool, clients, seed, test, validation, test_from)
        return Federation(dataset, *parts, split_hash(*parts), recipe, made_with)
    owned = _checked(split, split(_keys(dataset, split)[pool], clients, seed), clients, len(pool))
    owned = Ragged(pool[owned.rows], owned.bounds)
    parts = carve(dataset.strata, owned, test if test_from == "merged" else 0.0, validation, seed)
    if test_from == "official":
        parts = parts._replace(test=_own(dataset, owned) if own else _official(dataset, owned, seed))
    return Federation(dataset, *parts, split_hash(*parts), recipe, made_with)


def _drawn(
    dataset: Dataset, split: Split, pool: Index, clients: int, seed: int, test: float, validation: float, test_from: str
) -> Parts:
    """The parts of all rows, stratified, and what each client draws of each of them."""
    whole = carve(dataset.strata, Ragged.of([pool]), test if test_from == "merged" else 0.0, validation, seed)
    if test_from == "official":
        whole = whole._replace(test=Ragged.of([np.setdiff1d(np.arange(len(dataset)), pool)]))
    keys = _keys(dataset, split)

    def draw(of: Index) -> Ragged:
        if not len(of):
            return Ragged(of, np.zeros(clients + 1, np.int64))
        found = Ragged.of(split(keys[of], clients, seed))
        return Ragged(of[found.rows], found.bounds)

    return Parts(*(draw(part.rows) for part in whole))


def split_hash(train: Iterable[Index], validation: Iterable[Index], test: Iterable[Index]) -> str:
    """SHA-256 over the number of clients and, client by client, length and numbers of its three arrays, all of them as
    little-endian integers of eight bytes."""
    parts = [Ragged.of(part) for part in (train, validation, test)]
    sizes = np.stack([part.sizes for part in parts], 1)  # [clients, 3]
    digest = hashlib.sha256(len(sizes).to_bytes(8, "little"))
    for start in range(0, len(sizes), AT_ONCE):
        digest.update(_words(parts, sizes[start : start + AT_ONCE], start).data)
    return digest.hexdigest()


def _words(parts: list[Ragged], sizes: Counts, start: int) -> Index:
    """What the hash is over, of some clients."""
    ends = np.cumsum(1 + sizes.ravel())
    places = (ends - sizes.ravel()).reshape(sizes.shape)  # of the first number of each array
    words = np.empty(ends[-1], "<i8")
    words[places - 1] = sizes
    for part, place in zip(parts, places.T, strict=True):
        bounds = part.bounds[start : start + len(sizes) + 1]
        within = np.arange(bounds[0], bounds[-1])
        words[np.repeat(place - bounds[:-1], np.diff(bounds)) + within] = part.rows[bounds[0] : bounds[-1]]
    return words


def _marked(known: str, more: str) -> str:
    """The hash of a division that has something to it."""
    return hashlib.sha256(f"{known}, {more}".encode()).hexdigest()


def _resolved(dataset: Dataset, test_from: TestFrom) -> TestFrom:
    if test_from not in ("auto", "merged", "official"):
        raise UsageError(f"Expected test_from to be 'auto', 'merged' or 'official', found {test_from!r}.")
    if test_from != "auto":
        return test_from
    return "merged" if dataset.official_test is None or not dataset.official_test.any() else "official"


def _check_shares(test: float, validation: float, test_from: str) -> None:
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
    if split.reads == "samples":
        if not dataset.x.dtype.is_floating_point:
            raise UsageError(
                f"Expected numbers as samples for split '{split}', found token ids in '{dataset.name}'; use another "
                "split."
            )
        return dataset.x[:].flatten(1).numpy()
    if split.reads == "labels" and dataset.loss != "cross_entropy":
        raise UsageError(
            f"Expected class labels for split '{split}', found numbers as targets in '{dataset.name}'; use "
            "'iid', 'quantity' or 'given'."
        )
    return dataset.strata


def _checked(split: Split, given: Iterable[Index], clients: int, rows: int) -> Ragged:
    """What a split returned, ascending for each client."""
    owned = Ragged.of(given)
    inside = owned.rows[(owned.rows >= 0) & (owned.rows < rows)]
    different = count_different([inside], rows)
    smallest = int(owned.sizes.min(initial=rows))
    expected = len(inside) if split.repeats else different
    if len(owned) != clients or smallest == 0 or expected != len(owned.rows):
        raise UsageError(
            f"Expected split '{split}' to give {clients} clients at least one row each, numbered below {rows}, and "
            f"none twice, found {len(owned)} clients with {len(owned.rows)} rows, {different} of them different, the "
            f"smallest with {smallest}."
        )
    return owned.ascending()


def _official(dataset: Dataset, owned: Rows, seed: int) -> Rows:
    official = np.arange(len(dataset))[dataset.official_test]
    if len(official) < len(owned):
        raise UsageError(
            f"Expected an official test row for each of {len(owned)} clients, found {len(official)} in "
            f"'{dataset.name}'; ask for {len(official)} clients or fewer, or use test_from='merged'."
        )
    left_out = np.setdiff1d(_pool(dataset, "official"), owned.rows)  # its share goes to nobody
    everything = Ragged(
        np.concatenate([owned.rows, left_out]), np.append(owned.bounds, len(owned.rows) + len(left_out))
    )
    dealt = deal_official(dataset.strata, everything, official, seed)
    return Ragged(dealt.rows[: dealt.bounds[-2]], dealt.bounds[:-1])


def _own(dataset: Dataset, owned: Rows) -> Rows:
    """The official test rows of the groups that each client holds."""
    assert dataset.group is not None
    assert dataset.official_test is not None
    groups, group = np.unique(dataset.group, return_inverse=True)
    client = np.full(len(groups), -1)
    client[group[owned.rows]] = owned.owner
    official = np.flatnonzero(dataset.official_test)
    return Ragged.by_owner(client[group[official]], len(owned), official)


def _recipe(
    dataset: Dataset,
    split: Split,
    clients: int,
    seed: int,
    test: float,
    validation: float,
    test_from: TestFrom,
    own: bool,
) -> str:
    dealt = "each with its own test rows" if own else "official test rows dealt"
    held_out = f"test {test:g} of each client's rows" if test_from == "merged" else dealt
    validated = f", validation {validation:g}" if validation else ""
    return f"{dataset.name}, {split}, {clients} clients, seed {seed}, {held_out}{validated}"
