"""The interpreter of pickles that can call nothing; PFLlib's clients and FL-bench's partition file go through it."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np

from fuzzing import Harness
from idiolect.data import federate, from_arrays, parse, restricted

PLAIN = [
    {"a": [1, 2.5, None, True], "b": ("text", b"bytes", 2**40), "c": {"d": [[], {}, ()]}},
    {"x": np.arange(6.0).reshape(2, 3), "y": np.array([0, 1], ">i2"), "z": np.float32(0.5)},
    np.array([[1, "a"], [None, [2]]], object),
]
ROWS = [{"train": [0, 1, 2], "val": [3], "test": np.array([4, 5])}, {"train": [6, 7], "val": [], "test": [8]}]
DATA = from_arrays(np.arange(12, dtype="f4")[:, None], np.arange(12) % 2, name="rows")


def seeds(folder: Path) -> list[bytes]:
    held = [pickle.dumps(value, protocol) for value in PLAIN for protocol in (3, 4, 5)]
    return [*held, pickle.dumps({"data_indices": ROWS}, 4), pickle.dumps({"data_indices": dict(enumerate(ROWS))}, 5)]


def values(folder: Path, data: bytes) -> None:
    restricted.loads(data, folder / "a.pkl")


def partition(folder: Path, data: bytes) -> None:
    file = folder / "partition.pkl"
    file.write_bytes(data)
    federate(DATA, parse(f"flbench:{file}"), 2, seed=0)


HARNESSES = [Harness("pickles", seeds, values), Harness("split: FL-bench", seeds, partition)]
