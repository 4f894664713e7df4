"""PFLlib's data sets: a folder with `train/N.npz` and `test/N.npz` of each client N, and `config.json`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from idiolect.data import restricted
from idiolect.data.dataset import Dataset, from_arrays
from idiolect.errors import UsageError

FORM = "a folder of PFLlib's, with train/N.npz and test/N.npz of each client N"

Samples = tuple[NDArray[Any], NDArray[Any]]


def reads(path: Path) -> bool:
    return path.is_dir() and bool(_numbers(path / "train"))


def load(folder: Path, classes: int | None = None, network: str | None = None) -> Dataset:
    """The clients' rows as they are in the files, which split 'given' leaves as they are: the same clients, and each
    with its own training and test rows. First come the training rows, client by client, then the test rows.

    `classes` is config.json's, where not given. The files hold pickles, of which only arrays are read.
    """
    config = _config(folder / "config.json")
    clients = _clients(folder, config)
    read = {part: [_samples(folder / part / f"{n}.npz") for n in clients] for part in ("train", "test")}
    for number, (_, y) in enumerate(read["train"]):
        if not len(y):
            raise UsageError(f"Expected every client in '{folder}' to train, found no row in train/{number}.npz.")
    samples = read["train"] + read["test"]
    _check_shapes(folder, read)
    data = from_arrays(
        np.concatenate([x for x, _ in samples if len(x)]),
        np.concatenate([y for _, y in samples if len(y)]),
        classes or config.get("num_classes"),
        name=folder.resolve().name,
        network=network,
        group=np.concatenate([np.full(len(y), n) for part in read.values() for n, (_, y) in enumerate(part)]),
    )
    in_train = sum(len(y) for _, y in read["train"])
    return replace(data, official_test=np.arange(len(data)) >= in_train, own_test=True)


def _numbers(folder: Path) -> list[int]:
    return sorted(int(file.stem) for file in folder.glob("*.npz") if file.stem.isdecimal())


def _config(file: Path) -> dict[str, int]:
    """What it says of clients and classes; nothing where there is none."""
    try:
        held = json.loads(file.read_text("utf-8"))
        return {name: int(held[name]) for name in ("num_clients", "num_classes") if name in held}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(
            f"Expected PFLlib's numbers of clients and classes in '{file}', found something else ({error}); mend or "
            "remove it."
        ) from None


def _clients(folder: Path, config: dict[str, int]) -> range:
    clients = range(config.get("num_clients", len(_numbers(folder / "train"))))
    for part in ("train", "test"):
        found = _numbers(folder / part)
        if odd := sorted(set(clients) ^ set(found)):
            raise UsageError(
                f"Expected a file for each of clients 0..{len(clients) - 1} in '{folder / part}', found "
                f"{'none' if odd[0] in clients else 'one'} for client {odd[0]}; make the folder again with PFLlib, or "
                "copy all of it."
            )
    return clients


def _samples(file: Path) -> Samples:
    """One client's x and y: arrays of these names, or a dictionary of them under the name data, as PFLlib has it."""
    held: Any = restricted.npz(file)
    if held.keys() == {"data"} and held["data"].shape == ():
        held = held["data"][()]
    if not isinstance(held, dict) or not {"x", "y"} <= held.keys():
        raise UsageError(f"Expected x and y of a client in '{file}', found none; make it again with PFLlib.")
    x, y = _tokens(file, held["x"]), _array(file, "y", held["y"])
    if x.ndim < 1 or y.ndim != 1 or len(x) != len(y):
        raise UsageError(
            f"Expected one label in y per row of x in '{file}', found x of shape {list(x.shape)} and y of shape "
            f"{list(y.shape)}; make it again with PFLlib."
        )
    return (x.astype(np.float32, copy=False) if x.dtype.kind == "f" else x), y


def _array(file: Path, name: str, values: Any) -> NDArray[Any]:
    try:
        found = np.asarray(values)
    except ValueError:
        found = np.empty(1, object)
    if found.dtype.kind not in "iuf" and found.size:
        raise UsageError(
            f"Expected numbers of one shape as {name} in '{file}', found something else; make it again with PFLlib."
        )
    return found


def _tokens(file: Path, x: Any) -> NDArray[Any]:
    """PFLlib's texts are pairs of padded token ids and their number; of these the ids."""
    pairs = isinstance(x, np.ndarray) and x.dtype.kind == "O" and x.ndim == 2 and x.shape[1] == 2
    return _array(file, "x", list(x[:, 0]) if pairs else x)


def _check_shapes(folder: Path, read: dict[str, list[Samples]]) -> None:
    first = read["train"][0][0].shape[1:]
    for part, samples in read.items():
        for number, (x, y) in enumerate(samples):
            if len(y) and x.shape[1:] != first:
                raise UsageError(
                    f"Expected samples of one shape in '{folder}', found {list(first)} in train/0.npz and "
                    f"{list(x.shape[1:])} in {part}/{number}.npz; make it again with PFLlib."
                )
