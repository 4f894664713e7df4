"""FL-bench's partition files, for those who compare with runs made there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from idiolect.data import restricted
from idiolect.data.partition.divided import Divided, Index, Listed
from idiolect.errors import UsageError

if TYPE_CHECKING:
    from idiolect.data.dataset import Dataset

PARTS = {"train": "train", "val": "validation", "test": "test"}
STATISTICS = "all_stats.json"


@dataclass(frozen=True)
class FLBench(Divided):
    """The clients of FL-bench's `data/NAME/partition.pkl`, to the row.

    It numbers the rows of torchvision's training set and, after them, those of its test set, so the data set must have
    its rows in that order. Where FL-bench's own `all_stats.json` lies beside the file, the classes that it counts at
    each client are compared with those found.
    """

    def parts(self, dataset: Dataset, clients: int) -> list[Listed]:
        held = restricted.read(path := Path(self.file).expanduser())
        found = [self._client(number, one, len(dataset)) for number, one in enumerate(self._clients(held))]
        if len(found) != clients:
            raise UsageError(
                f"flbench: expected as many clients as '{self.file}' lists, found {len(found)} there and {clients} "
                f"asked for; ask for {len(found)} clients."
            )
        self._check_disjoint(found, len(dataset))
        self._check_classes(path.parent / STATISTICS, found, dataset)
        return found

    def _clients(self, held: Any) -> list[Any]:
        indices = held.get("data_indices") if isinstance(held, Mapping) else None
        if isinstance(indices, Mapping):
            if missing := sorted(set(range(len(indices))) - indices.keys()):
                raise UsageError(
                    f"flbench: expected clients 0..{len(indices) - 1} in '{self.file}', found no client {missing[0]}; "
                    "make the file again."
                )
            indices = [indices[number] for number in range(len(indices))]
        if not isinstance(indices, Sequence) or isinstance(indices, str | bytes) or not indices:
            raise UsageError(
                f"flbench: expected a dictionary with the rows of each client as data_indices in '{self.file}', found "
                "none; give the partition.pkl that FL-bench's generate_data.py wrote."
            )
        return list(indices)

    def _client(self, number: int, held: Any, rows: int) -> Listed:
        if not isinstance(held, Mapping) or not {"train", "test"} <= held.keys() <= PARTS.keys():
            names = ", ".join(map(str, held)) if isinstance(held, Mapping) else type(held).__name__
            raise UsageError(
                f"flbench: expected train, test and, where there is one, val of client {number} in '{self.file}', "
                f"found {names or 'none'}; make the file again."
            )
        found = Listed(**{ours: self._rows(number, held.get(part, []), rows) for part, ours in PARTS.items()})
        if not len(found.train):
            raise UsageError(
                f"flbench: expected every client to train, found no training row of client {number} in "
                f"'{self.file}'; make it with FL-bench's --split sample."
            )
        return found

    def _rows(self, number: int, listed: Any, rows: int) -> Index:
        try:
            found = np.asarray(listed)
        except ValueError:
            found = np.asarray("ragged")
        if found.ndim != 1 or (found.dtype.kind not in "iu" and len(found)):
            raise UsageError(
                f"flbench: expected row numbers of client {number} in '{self.file}', found something else; make the "
                "file again."
            )
        outside = found[(found < 0) | (found >= rows)]
        if len(outside):
            raise UsageError(
                f"flbench: expected row numbers in 0..{rows - 1} in '{self.file}', found {outside[0]} at client "
                f"{number}; give the data set that the file is of, with its test set."
            )
        return np.sort(found.astype(np.int64))

    def _check_disjoint(self, found: list[Listed], rows: int) -> None:
        times = np.bincount(np.concatenate([part for one in found for part in one]), minlength=rows)
        if times.max() > 1:
            row = int(times.argmax())
            who = [number for number, one in enumerate(found) if any(row in part for part in one)]
            raise UsageError(
                f"flbench: expected every row once in '{self.file}', found row {row} {times[row]} times, at client "
                f"{' and '.join(map(str, who))}; make the file again."
            )

    def _check_classes(self, file: Path, found: list[Listed], dataset: Dataset) -> None:
        if dataset.loss != "cross_entropy" or (counted := _statistics(file)) is None:
            return
        for number, one in enumerate(found):
            classes, sizes = np.unique(dataset.strata[np.concatenate(one)], return_counts=True)
            own = {str(c): int(n) for c, n in zip(classes, sizes, strict=True)}
            theirs = counted.get(str(number), own)
            if theirs != own:
                raise UsageError(
                    f"flbench: expected at client {number} the classes that '{file}' counts, {_some(theirs)}, found "
                    f"{_some(own)} in '{dataset.name}'; give the data set that the file is of, its rows in "
                    "torchvision's order."
                )


def _statistics(file: Path) -> dict[str, dict[str, int]] | None:
    """Rows per class and client, as FL-bench counted them."""
    try:
        held = json.loads(file.read_text("utf-8"))
        return {
            number: {label: n for label, n in one["y"].items() if n} for number, one in held.items() if number.isdigit()
        }
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise UsageError(
            f"flbench: expected FL-bench's own counts in '{file}', found something else ({error}); make it again or "
            "remove it."
        ) from None


def _some(counts: Mapping[str, int]) -> str:
    shown = [f"{n} of class {label}" for label, n in sorted(counts.items())[:3]]
    return ", ".join([*shown, "..."] if len(counts) > 3 else shown)
