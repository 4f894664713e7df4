"""Are these the data sets that they should be? Rows, classes, first labels, and each channel's mean and deviation over
the training images, as they are known, of folders named as below; exit code 1 where one differs.

    python benchmarks/known_data.py FOLDER [--json FILE]

The statistics are those given with most public code for these sets, the first labels those of torchvision, by whose
order of the rows FL-bench's partitions go. Each is checked from the samples as they are loaded
without a normalisation, and again as the mean 0 and deviation 1 of those normalised by what is known.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from idiolect.data import Dataset, load
from idiolect.data.readers import reader_of

PLACES = 4  # to which the known values are given
BLOCK = 1000  # rows


@dataclass(frozen=True)
class Known:
    shape: tuple[int, ...]
    classes: int
    train: int
    test: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    first: tuple[str, str]  # labels of training and test rows
    group: str | None = None
    groups: int | None = None


KNOWN = {
    "mnist": Known((1, 28, 28), 10, 60_000, 10_000, (0.1307,), (0.3081,), ("5041921314", "7210414959"), "writer", 836),
    "fashion_mnist": Known((1, 28, 28), 10, 60_000, 10_000, (0.2860,), (0.3530,), ("9003027255", "9211614657")),
    "cifar10": Known(
        (3, 32, 32), 10, 50_000, 10_000, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616),
        ("6994112783", "3880661631"),
    ),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where folders of these names lie: " + ", ".join(KNOWN))
    parser.add_argument("--json", type=Path, help="a file for what was found")
    given = parser.parse_args()
    found = {name: check(given.folder / name, known) for name, known in KNOWN.items() if (given.folder / name).is_dir()}
    text = json.dumps(found, indent=1)
    print(text)
    if given.json is not None:
        given.json.write_text(text + "\n")
    return 0 if found and all(one["as_known"] for one in found.values()) else 1


def check(folder: Path, known: Known) -> dict[str, Any]:
    start = time.perf_counter()
    plain = load(folder, mean=[0.0] * known.shape[0], std=[1.0] * known.shape[0])
    seconds = time.perf_counter() - start
    reader = reader_of(folder)
    assert reader is not None
    assert plain.official_test is not None
    mean, std = statistics(plain)
    owners = load(folder, group=known.group).group if known.group else None
    normalised = statistics(load(folder, mean=known.mean, std=known.std))
    measured = statistics(load(folder))
    facts = {
        "shape": plain.shape == known.shape,
        "classes": plain.classes == known.classes and len(plain.y.unique()) == known.classes,
        "train": int((~plain.official_test).sum()) == known.train,
        "test": int(plain.official_test.sum()) == known.test,
        "order": (digits(plain, ~plain.official_test), digits(plain, plain.official_test)) == known.first,
        "mean": rounded(mean) == list(known.mean),
        "std": rounded(std) == list(known.std),
        "normalised by the known": all(abs(m) < 5e-4 and abs(s - 1) < 5e-4 for m, s in zip(*normalised, strict=True)),
        "normalised by default": all(abs(m) < 1e-5 and abs(s - 1) < 1e-5 for m, s in zip(*measured, strict=True)),
        "groups": known.groups is None or (owners is not None and len(set(owners.tolist())) == known.groups),
    }
    return {
        "as_known": all(facts.values()), "not_as_known": [name for name, right in facts.items() if not right],
        "reader": reader.__name__, "shape": plain.shape, "classes": plain.classes,
        "rows": {"train": int((~plain.official_test).sum()), "test": int(plain.official_test.sum())},
        "mean": mean, "std": std, "groups": None if owners is None else len(set(owners.tolist())),
        "seconds": round(seconds, 2),
    }  # fmt: skip


def statistics(data: Dataset) -> tuple[list[float], list[float]]:
    """Mean and deviation per channel over the training rows, in float64, some rows at a time."""
    assert data.official_test is not None
    rows = torch.from_numpy(~data.official_test).nonzero().flatten()
    total = torch.zeros(2, data.shape[0], dtype=torch.float64)
    for some in rows.split(BLOCK):
        x = data.x[some].double()
        total += torch.stack([x.sum((0, 2, 3)), (x * x).sum((0, 2, 3))])
    mean, square = total / (len(rows) * data.shape[1] * data.shape[2])
    return mean.tolist(), (square - mean * mean).sqrt().tolist()


def digits(data: Dataset, rows: Any) -> str:
    """The first labels of these rows."""
    return "".join(map(str, data.y[torch.from_numpy(rows)][:10].tolist()))


def rounded(values: list[float]) -> list[float]:
    return [round(value, PLACES) for value in values]


if __name__ == "__main__":
    sys.exit(main())
