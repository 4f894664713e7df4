"""Tables to samples: columns of numbers are the features, one column is the label, and one may say whose a row is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from idiolect.data.dataset import Dataset
from idiolect.data.labels import numbered
from idiolect.errors import UsageError, said, unknown

if TYPE_CHECKING:
    import pyarrow as pa

Matrix = NDArray[np.float32]


class Options(TypedDict, total=False):
    """Those of `dataset` that a user gives."""

    label: str | int | None
    group: str | int | None
    features: Sequence[str | int] | None
    one_hot: bool | Sequence[str | int]
    standardise: bool
    mean: Sequence[float] | None
    std: Sequence[float] | None
    classes: int | None
    network: str | None


def dataset(
    where: Path,
    train: Mapping[Path, pa.Table],
    test: Mapping[Path, pa.Table],
    *,
    name: str,
    label: str | int | None = None,
    group: str | int | None = None,
    by_file: bool = False,
    features: Sequence[str | int] | None = None,
    one_hot: bool | Sequence[str | int] = False,
    standardise: bool = False,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    classes: int | None = None,
    network: str | None = None,
) -> Dataset:
    """The rows of these files, one after the other. Whole numbers and words may be labels (`numbered`).

    `features` names the columns taken; all but label and group, where not given. `one_hot` names columns that become a
    column of 0 and 1 for each of their values, in order; True is all that hold words. `standardise` subtracts each
    feature's mean and divides by its deviation over all rows of the training files (which the test rows of `merged`
    are among), or by `mean` and `std`, which may be given instead; a constant feature becomes 0. `by_file` makes a
    client of each file.
    """
    files = {**train, **test}
    first = next(iter(files.values()))
    label = _named(where, first, "label", "label" if label is None else str(label))
    owner = None if group is None else _named(where, first, "group", str(group))
    chosen = (
        [n for n in first.column_names if n not in (label, owner)] if features is None else list(map(str, features))
    )
    hot = set() if isinstance(one_hot, bool) else {_named(where, first, "one_hot", str(column)) for column in one_hot}
    _check_features(where, chosen, label, owner, hot)
    table = _joined(where, files, [*chosen, label, *([owner] if owner else [])])
    in_train = sum(len(one) for one in train.values())
    blocks = [_block(where, table, n, n in hot or (one_hot is True and _words(table, n))) for n in chosen]
    x = np.concatenate(blocks, axis=1)
    y, found, called = numbered(f"in column '{label}' of '{where}'", _values(where, table, label), classes)
    return Dataset(
        name,
        torch.from_numpy(_scaled(where, x, in_train, standardise, mean, std)),
        torch.from_numpy(y),
        found,
        network or "mlp",
        _values(where, table, owner) if owner else _stems(files) if by_file else None,
        official_test=np.arange(len(x)) >= in_train if test else None,
        class_names=called,
    )


def parts(where: Path, files: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Which files are for training and which for testing, by their names; all for training where none is `train`."""
    train, test = ([file for file in files if is_part(file, part)] for part in ("train", "test"))
    if not train:
        if test:
            raise UsageError(
                f"Expected training files beside '{test[0].name}' in '{where}', found none; name them train..."
            )
        return list(files), []
    if strange := [f.name for f in files if f not in train and f not in test]:
        raise UsageError(
            f"Expected files named train... and test... in '{where}', found '{strange[0]}' beside them; move it "
            "elsewhere."
        )
    return train, test


def is_part(file: Path, part: str) -> bool:
    return file.name.startswith((f"{part}.", f"{part}-", f"{part}_"))


def name_of(path: Path) -> str:
    """What a data set is called after its file, without suffixes, or after its folder."""
    name = path.resolve().name
    return name if path.is_dir() else name.partition(".")[0] or name


def check_names(where: Path, table: pa.Table) -> None:
    """Refuse columns that share a name, or have none, as the index that pandas writes."""
    names = table.column_names
    if (twice := {n for n in names if names.count(n) > 1}) and (first := min(twice)):
        raise UsageError(f"Expected columns of different names in '{where}', found '{first}' twice; rename one.")
    if "" in names:
        raise UsageError(
            f"Expected a name for every column of '{where}', found none for column {names.index('') + 1}; drop it if "
            "it is an index (pandas leaves it out with index=False), or name it."
        )


def numeric(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_decimal(kind)
    )


def _named(where: Path, table: pa.Table, role: str, column: str) -> str:
    if column in table.column_names:
        return column
    if role == "label" and column == "label":
        shown = ", ".join(table.column_names[:12]) + (", ..." if table.num_columns > 12 else "")
        raise UsageError(f"Expected a column 'label' in '{where}', found {shown or 'none'}; name the label by label=.")
    raise unknown(f"column of '{where}'", column, table.column_names)


def _check_features(where: Path, chosen: list[str], label: str, owner: str | None, hot: set[str]) -> None:
    if not chosen:
        raise UsageError(f"Expected columns of features beside '{label}' in '{where}', found none.")
    for column in {label, owner} & set(chosen):
        raise UsageError(f"Column '{column}' of '{where}' is the label or the group; leave it out of the features.")
    if spare := sorted(hot - set(chosen)):
        raise UsageError(f"one_hot names '{spare[0]}', which is not a feature of '{where}'; leave it out.")


def _joined(where: Path, files: Mapping[Path, pa.Table], columns: list[str]) -> pa.Table:
    import pyarrow as pa

    for file, table in files.items():
        for column in columns:
            if column not in table.column_names:
                raise unknown(f"column of '{file}'", column, table.column_names)
        if not len(table):
            raise UsageError(f"Expected at least one row in '{file}', found none; leave the file out.")
        _check_complete(file, table.select(columns))
    try:
        return pa.concat_tables([table.select(columns) for table in files.values()], promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise UsageError(f"Expected the same kinds of columns in all files of '{where}': {said(error)}.") from None


def _check_complete(file: Path, table: pa.Table) -> None:
    """Refuse a row without a value, by row and column."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for name in table.column_names:
        column = table.column(name)
        gaps = pc.is_null(column, nan_is_null=pa.types.is_floating(column.type))
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            gaps = pc.or_(gaps, pc.equal(column, "").fill_null(True))
        if pc.any(gaps).as_py():
            raise UsageError(
                f"Expected a value in every row of '{file}', found none in row {pc.index(gaps, True).as_py() + 1} "
                f"(the first is 1), column '{name}', and {pc.sum(gaps).as_py()} such rows in all; fill them in or "
                "drop them."
            )


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    import pyarrow as pa

    return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column


def _words(table: pa.Table, name: str) -> bool:
    return not numeric(_plain(table.column(name)).type)


def _values(where: Path, table: pa.Table, name: str) -> NDArray[Any]:
    """A label or a group: whole numbers stay numbers, all else becomes words."""
    import pyarrow as pa

    column = _plain(table.column(name))
    if numeric(column.type) and not pa.types.is_boolean(column.type):
        kind = pa.float64() if pa.types.is_decimal(column.type) else column.type
        numbers: NDArray[Any] = column.cast(kind).to_numpy()
        return numbers
    try:
        return np.array(column.cast(pa.string()).to_pylist(), str)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise UsageError(
            f"Expected words or numbers in column '{name}' of '{where}', found {column.type}; name another column."
        ) from None


def _block(where: Path, table: pa.Table, name: str, hot: bool) -> Matrix:
    """A feature as one column, or as one for each of its values."""
    import pyarrow as pa

    column = _plain(table.column(name))
    if hot:
        kinds, value = np.unique(_values(where, table, name), return_inverse=True)
        return np.eye(len(kinds), dtype=np.float32)[value]
    if not numeric(column.type):
        raise UsageError(
            f"Expected numbers in column '{name}' of '{where}', found {column.type}, as '{column[0]}'; leave the "
            f"column out by features=, say by group={name} that it tells whose a row is, or make columns of 0 and 1 of "
            f'it by one_hot=true or one_hot=["{name}"].'
        )
    with np.errstate(over="ignore"):
        values = column.cast(pa.float64(), safe=False).to_numpy().astype(np.float32)[:, None]
    if not np.isfinite(values).all():
        row = int(np.argmin(np.isfinite(values)))
        raise UsageError(
            f"Expected finite numbers in column '{name}' of '{where}', found {column[row]}, which float32 does not "
            "hold; repair that row."
        )
    return values


def _scaled(
    where: Path, x: Matrix, in_train: int, standardise: bool, mean: Sequence[float] | None, std: Sequence[float] | None
) -> Matrix:
    if not standardise and mean is None and std is None:
        return x
    known = x[:in_train]
    centre = known.mean(0, dtype=np.float64) if mean is None else _given(where, "mean", mean, x.shape[1])
    spread = known.std(0, dtype=np.float64) if std is None else _given(where, "std", std, x.shape[1])
    return ((x - centre) / np.where(spread == 0, 1, spread)).astype(np.float32)


def _given(where: Path, what: str, values: Sequence[float], features: int) -> NDArray[np.float64]:
    array = np.asarray(values, np.float64)
    if array.shape != (features,) or not np.isfinite(array).all() or (what == "std" and (array <= 0).any()):
        positive = " above 0" if what == "std" else ""
        raise UsageError(
            f"Expected a {what}{positive} for each of the {features} features of '{where}', found {values}."
        )
    return array


def _stems(files: Mapping[Path, pa.Table]) -> NDArray[Any]:
    return np.repeat([file.name.partition(".")[0] for file in files], [len(table) for table in files.values()])
