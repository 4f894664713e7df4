"""Signals by subject, such as acceleration with activities: a table of readings over time, or a folder of a file a
subject, as .csv, .npy or .npz."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from idiolect.data import signals
from idiolect.data.dataset import Dataset
from idiolect.data.signals import Recording, WindowLabel, checked
from idiolect.data.stored import BROKEN
from idiolect.errors import UsageError, said, unknown

if TYPE_CHECKING:
    import pyarrow as pa

FORM = (
    "signals by subject: a .csv with columns activity, subject and time, or a folder of a .csv, .npy or .npz a subject"
)
BEFORE = ("csv",)  # a table with a column of times is no table of samples
SUFFIXES = (".csv", ".npy", ".npz")
LABELS, GROUPS = ("activity", "label"), ("subject", "user", "participant")
TIMES = ("time", "timestamp", "seconds")


def reads(path: Path) -> bool:
    if not path.is_dir():
        return path.suffix == ".csv" and path.is_file() and all(_has(path, some) for some in (LABELS, GROUPS, TIMES))
    if not all(file.is_file() for file in _inside(path)):
        return False
    files = _files(path)
    return bool(files) and (files[0].suffix != ".csv" or all(_has(files[0], some) for some in (LABELS, TIMES)))


def load(
    path: Path,
    length: int = 128,
    stride: int | None = None,
    window_label: WindowLabel = "majority",
    label: str | None = None,
    group: str | None = None,
    channels: Sequence[str] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    network: str | None = None,
) -> Dataset:
    """Windows of `length` readings, [channels, 1, length], one every `stride` (default: `length`). A window's class is
    the activity of most of its readings, or of the last with window_label="last"; `group` is the subject. Channels are
    standardised by the windows that are trained on, or by `mean` and `std`.

    A .csv has a column of activities (`label`), and one of subjects (`group`); without it, in a folder, each file is a
    subject's, named after it. All other columns are channels, or those named by `channels`; not the time. A subject's
    readings count in the order of the file. An .npy is [time, channels + 1], with the activity in the last column; an
    .npz has x [time, channels] and y [time], or windows already cut, x [windows, channels, length] and y [windows].
    """
    files = _files(path)
    if not files:
        raise UsageError(f"Expected .csv, .npy or .npz files in '{path}', found none; check the path.")
    if files[0].suffix == ".csv":
        recordings = _by_subject(path, {file: _read(file) for file in files}, label, group, channels)
    else:
        recordings = [_arrays(file) for file in files]
    return signals.dataset(
        path, recordings, length=length, stride=stride, window_label=window_label, mean=mean, std=std, network=network
    )


def _inside(folder: Path) -> list[Path]:
    return [entry for entry in folder.iterdir() if not entry.name.startswith(".")]


def _files(path: Path) -> list[Path]:
    """The file, or all files of the first kind that the folder has."""
    if not path.is_dir():
        return [path]
    files = sorted(_inside(path))
    return next((of for suffix in SUFFIXES if (of := [file for file in files if file.suffix == suffix])), [])


def _has(file: Path, names: Iterable[str]) -> bool:
    with file.open(encoding="utf-8-sig", errors="replace", newline="") as opened:
        found = next(csv.reader(opened), [])
    return any(name.strip().lower() in names for name in found)


def _arrays(file: Path) -> Recording:
    try:
        held = np.load(file, allow_pickle=False)
        arrays = {"": held} if isinstance(held, np.ndarray) else {name: held[name] for name in held.files}
        if not all(isinstance(array, np.ndarray) for array in arrays.values()):
            raise ValueError("other files among the arrays, which come as bytes")
    except (OSError, *BROKEN) as error:
        raise UsageError(f"Expected plain arrays in '{file}', found something else ({said(error)}).") from None
    x, y = _last_column(file, arrays[""]) if "" in arrays else (arrays.get("x"), arrays.get("y"))
    if x is None or y is None or x.ndim not in (2, 3) or y.shape != x.shape[:1] or x.dtype.kind not in "iuf":
        found = ", ".join(f"{name or 'array'} {list(a.shape)} of {a.dtype}" for name, a in arrays.items()) or "none"
        raise UsageError(
            f"Expected numbers x [time, channels] and y [time] in '{file}', or windows x [windows, channels, length] "
            f"and y [windows], found {found}."
        )
    return checked(f"'{file}'", file.stem, x, y)


def _last_column(file: Path, array: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    if array.ndim != 2 or array.shape[1] < 2:
        raise UsageError(
            f"Expected an array [time, channels + 1] with the activity in the last column in '{file}', found "
            f"{list(array.shape)}."
        )
    return array[:, :-1], array[:, -1]


def _by_subject(
    path: Path, tables: dict[Path, pa.Table], label: str | None, group: str | None, channels: Sequence[str] | None
) -> list[Recording]:
    """One recording a subject of a file, in the order of their names. The first file decides the channels."""
    found: list[Recording] = []
    for file, table in tables.items():
        label = _column(file, table, "label", label, LABELS)
        if group is None and file != path and not any(name.strip().lower() in GROUPS for name in table.column_names):
            owner = np.repeat(np.array([file.stem]), len(table))
        else:
            group = _column(file, table, "group", group, GROUPS)
            owner = _values(file, table, group).astype(str)
        channels = channels or _channels(file, table, (label, group))
        activity, readings = _values(file, table, label), _readings(file, table, channels)
        found += [checked(f"'{file}'", who, readings[owner == who], activity[owner == who]) for who in np.unique(owner)]
    return found


def _read(file: Path) -> pa.Table:
    import pyarrow as pa
    from pyarrow import csv as arrow

    try:
        table = arrow.read_csv(file)
        names = table.column_names  # which may be no text
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UsageError(f"Expected a table in '{file}', found: {said(error)}.") from None
    twice = [name for name in names if names.count(name) > 1]
    if twice or not len(table):
        raise UsageError(
            f"Expected rows, and columns of different names, in '{file}', found "
            f"{f'two columns {twice[0]!r}' if twice else 'no rows'}."
        )
    return table


def _column(file: Path, table: pa.Table, role: str, asked: str | None, usual: tuple[str, ...]) -> str:
    names: list[str] = table.column_names
    if asked is not None and asked not in names:
        raise unknown(f"column of '{file}'", asked, names)
    found = [name for name in names if name.strip().lower() in usual] if asked is None else [asked]
    if len(found) != 1:
        raise UsageError(
            f"Expected one column called {' or '.join(usual)} in '{file}', found {', '.join(found) or 'none'}; name it "
            f"by {role}=."
        )
    return found[0]


def _values(file: Path, table: pa.Table, column: str) -> NDArray[Any]:
    import pyarrow as pa

    data = table.column(column)
    if data.null_count:
        raise UsageError(
            f"Expected a value in every row of column '{column}' of '{file}', found {data.null_count} without one; "
            "drop those rows."
        )
    if pa.types.is_binary(data.type):
        raise UsageError(f"Expected text in UTF-8 in column '{column}' of '{file}', found something else.")
    values = data.to_numpy()
    return values.astype(str) if pa.types.is_string(data.type) else values


def _channels(file: Path, table: pa.Table, others: tuple[str | None, ...]) -> list[str]:
    found = [n for n in table.column_names if n not in others and n.strip().lower() not in TIMES]
    if not found:
        raise UsageError(f"Expected columns of readings in '{file}', found none but {', '.join(table.column_names)}.")
    return found


def _readings(file: Path, table: pa.Table, channels: Sequence[str]) -> NDArray[Any]:
    import pyarrow as pa

    for name in channels:
        if name not in table.column_names:
            raise unknown(f"column of '{file}'", name, table.column_names)
        kind = table.schema.field(name).type
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            raise UsageError(
                f"Expected numbers in column '{name}' of '{file}', found {kind}; mend it, or name the columns of "
                "readings by channels=."
            )
    return np.stack([table.column(name).to_numpy() for name in channels], 1)  # what is missing becomes NaN
