"""Images in files laid out as on the Hugging Face Hub, read from a local folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from idiolect.data import images
from idiolect.data.dataset import Dataset
from idiolect.errors import UsageError, said, unknown

if TYPE_CHECKING:
    import pyarrow as pa

FORM = "a folder of images in train-*.parquet, as on the Hugging Face Hub"
HELD_OUT = ("test", "validation", "valid", "val", "dev")  # the first with labels is the official test set

Parts = Mapping[str, Sequence[Path]]  # the files of "train", "test", ...


def reads(path: Path) -> bool:
    return path.is_dir() and bool(_homes(path)) and not holds_texts(path)


class Options(TypedDict, total=False):
    """Those of `samples` that a user gives."""

    image: str | None
    label: str | None
    group: str | None
    mean: Sequence[float] | None
    std: Sequence[float] | None
    network: str | None
    size: int | None
    train: str
    test: str | None


def load(folder: Path, config: str | None = None, **options: Unpack[Options]) -> Dataset:
    """The images of `train-*.parquet` and, where there are any, `test-*.parquet`, with their labels.

    The files lie in the folder, in its `data/`, or in the folder of the configuration that `config` names; those that
    the library datasets saves to a disk (`train/data-*.arrow`) are read as well. Train and test are joined, and
    `official_test` tells them apart. Without a test set that has labels the validation set stands in for it, and the
    name says so. `train` and `test` name other parts, several with a plus: train="train+validation".

    Pixels are scaled to [0, 1] and normalised per channel by `mean` and `std`, which are measured on the training
    images where not given (mean 0 and std 1 leave [0, 1] as it is). `size` cuts every image to a square about its
    middle and scales it to size x size. `image` and `label` name columns where the files hold several; `group` names
    the column that says whose a row is.
    """
    return samples(folder, parts(folder, config), name=folder.resolve().name, **options)


def samples(
    where: Path,
    parts: Parts,
    *,
    name: str,
    image: str | None = None,
    label: str | None = None,
    group: str | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    network: str | None = None,
    size: int | None = None,
    train: str = "train",
    test: str | None = None,
    classes: int | None = None,
) -> Dataset:
    """What `load` says, of these files."""
    kinds = schema(where, parts, train)
    image, label = _image_column(where, kinds, image), label_column(where, kinds, label)
    table, in_train, test = rows(where, parts, [image, label, *([group] if group else [])], label, train, test)
    return images.samples(
        where,
        images.decode(where, Encoded(table.column(image)), size),
        values(where, table, label),
        name=called(name, train, test),
        in_train=in_train,
        classes=class_count(kinds, label) or classes,
        mean=mean,
        std=std,
        network=network,
        group=values(where, table, group) if group else None,
        class_names=class_names(kinds, label),
    )


class Encoded(Sequence[bytes | None]):
    """The files in a column of images, each read when it is asked for: a mapped table of any size will do."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self.chunks = column.chunks
        self.ends = np.cumsum([len(chunk) for chunk in self.chunks], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    @overload
    def __getitem__(self, row: int) -> bytes | None: ...
    @overload
    def __getitem__(self, row: slice) -> list[bytes | None]: ...
    def __getitem__(self, row: int | slice) -> bytes | list[bytes | None] | None:
        if isinstance(row, slice):
            return [self[k] for k in range(*row.indices(len(self)))]
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        k = int(np.searchsorted(self.ends, row, "right"))
        cell = self.chunks[k][row - int(self.ends[k]) + len(self.chunks[k])].as_py()
        return cell and cell["bytes"]


def parts(folder: Path, config: str | None = None) -> Parts:
    """The files of each part of the data set in this folder."""
    homes = _homes(folder) if config is None else [folder / config]
    if len(homes) > 1:
        raise UsageError(
            f"Expected one data set in '{folder}', found those of {', '.join(home.name for home in homes)}; name one "
            "by config=, or give its path."
        )
    found = {part: files for part in ("train", *HELD_OUT) if homes and (files := _files_of(homes[0], part))}
    if not found:
        raise UsageError(
            f"Expected train-*.parquet in '{homes[0] if config else folder}' or in its folder 'data', found none; "
            "check the path."
        )
    return found


def schema(where: Path, parts: Parts, train: str) -> pa.Schema:
    """The columns of the training set."""
    return _schema(_chosen(where, parts, train)[0])


def rows(
    where: Path, parts: Parts, columns: list[str], label: str, train: str, test: str | None
) -> tuple[pa.Table, int | None, str | None]:
    """The rows of the training set and, behind them, of the official test set; how many are the training set's, where
    there is a test set; and which part that is."""
    test = _held_out(where, parts, label, train) if test is None else test
    trained, tested = _chosen(where, parts, train), _chosen(where, parts, test) if test else []
    return _read(where, trained + tested, columns), sum(map(_rows, trained)) if test else None, test


def _held_out(where: Path, parts: Parts, label: str, train: str) -> str | None:
    """The part that is the official test set: the first that has labels and is not trained on."""
    for part in HELD_OUT:
        if part in parts and part not in train.split("+"):
            labels = _read(where, parts[part], [label]).column(label)
            if labels.null_count < len(labels) and np.any(labels.drop_null().to_numpy() >= 0):  # the Hub's -1: no label
                return part
    return None


def called(name: str, train: str, test: str | None) -> str:
    """The name, with what is not as usual."""
    odd = [
        *([f"train: {train}"] if train != "train" else []),
        *([f"test: {test}"] if test not in (None, "test") else []),
    ]
    return f"{name} ({', '.join(odd)})" if odd else name


def holds_texts(folder: Path) -> bool:
    """Whether the files lie so and hold strings and no images: what `readers/texts.py` reads."""
    try:
        return are_texts(folder, parts(folder))
    except UsageError:
        return False  # nothing that can be read, as `load` will say


def are_texts(where: Path, parts: Parts, train: str = "train") -> bool:
    import pyarrow as pa

    kinds = [field.type for field in schema(where, parts, train)]
    plain = all(is_text(kind) or pa.types.is_integer(kind) for kind in kinds)
    return plain and any(is_text(kind) for kind in kinds)


def is_text(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _homes(folder: Path) -> list[Path]:
    """Where the files may lie: here, in `data`, or in the folder of a configuration, of which there may be several."""
    for home in (folder, folder / "data"):
        if _files_of(home, "train"):
            return [home]
    return [home for home in sorted(folder.iterdir()) if home.is_dir() and _files_of(home, "train")]


def _files_of(home: Path, part: str) -> list[Path]:
    return sorted(home.glob(f"{part}-*.parquet")) or sorted(home.glob(f"{part}/data-*.arrow"))


def _chosen(where: Path, parts: Parts, names: str) -> list[Path]:
    """The files of parts named with a plus between them."""
    for name in names.split("+"):
        if name not in parts:
            raise unknown(f"part of '{where}'", name, parts)
    return [file for name in names.split("+") for file in parts[name]]


def _arrow(file: Path) -> pa.RecordBatchStreamReader:
    import pyarrow as pa

    return pa.ipc.open_stream(pa.memory_map(str(file)))


def _schema(file: Path) -> pa.Schema:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return _arrow(file).schema if file.suffix == ".arrow" else pq.read_schema(file)
    except (pa.ArrowInvalid, OSError) as error:
        kind = "an Arrow" if file.suffix == ".arrow" else "a Parquet"
        raise UsageError(f"Expected {kind} file, found something else in '{file}'; download it again.") from error


def _rows(file: Path) -> int:
    import pyarrow.parquet as pq

    return len(_table(file, [])) if file.suffix == ".arrow" else int(pq.read_metadata(file).num_rows)


def _table(file: Path, columns: list[str]) -> pa.Table:
    import pyarrow.parquet as pq

    if file.suffix == ".arrow":
        return _arrow(file).read_all().select(columns)
    with file.open("rb") as raw:  # a path would take key=value folders above it for columns
        return pq.read_table(raw, columns=columns)


def _read(folder: Path, files: Sequence[Path], columns: list[str]) -> pa.Table:
    import pyarrow as pa

    for file in files:
        for column in columns:
            if column not in _schema(file).names:
                raise unknown(f"column of '{file}'", column, _schema(file).names)
    try:
        return pa.concat_tables([_table(file, columns) for file in files], promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise UsageError(f"Expected train and test files of one layout in '{folder}', found: {said(error)}.") from error
    except OSError as error:
        kind = "Arrow" if files[0].suffix == ".arrow" else "Parquet"
        raise UsageError(
            f"Expected whole {kind} files in '{folder}', found: {said(error)}; download them again."
        ) from error


def features(schema: pa.Schema) -> dict[str, Any]:
    """What the Hub's metadata says of each column; nothing where the files carry none."""
    text = (schema.metadata or {}).get(b"huggingface")
    found: dict[str, Any] = json.loads(text)["info"]["features"] if text else {}
    return found


def _image_column(folder: Path, schema: pa.Schema, asked: str | None) -> str:
    import pyarrow as pa

    found = [
        field.name
        for field in schema
        if pa.types.is_struct(field.type) and any(part.name == "bytes" for part in field.type)
    ]
    if asked is not None and asked not in schema.names:
        raise unknown(f"column of '{folder}'", asked, schema.names)
    if (asked is not None and asked not in found) or not found:
        raise UsageError(
            f"Expected a column of images, struct{{bytes, path}}, in '{folder}', found the columns "
            f"{', '.join(schema.names)}; name it by image=, or read them otherwise: form=texts, form=parquet."
        )
    return asked or the_one(folder, "image", found)


def label_column(folder: Path, schema: pa.Schema, asked: str | None) -> str:
    import pyarrow as pa

    if asked is None:
        marked = [name for name, about in features(schema).items() if about.get("_type") == "ClassLabel"]
        asked = "label" if "label" in schema.names else the_one(folder, "label", marked)
    if asked not in schema.names:
        raise unknown(f"column of '{folder}'", asked, schema.names)
    if not pa.types.is_integer(schema.field(asked).type):
        raise UsageError(
            f"Expected integer labels in column '{asked}' of '{folder}', found "
            f"{schema.field(asked).type}; name another column by label=."
        )
    return asked


def the_one(folder: Path, role: str, found: list[str]) -> str:
    if len(found) != 1:
        raise UsageError(
            f"Expected one {role} column in '{folder}', found {', '.join(found) or 'none'}; name it by {role}=."
        )
    return found[0]


def class_names(schema: pa.Schema, label: str) -> tuple[str, ...] | None:
    names = features(schema).get(label, {}).get("names")
    return tuple(names) if names else None


def class_count(schema: pa.Schema, label: str) -> int | None:
    names = class_names(schema, label)
    return len(names) if names else None


def values(folder: Path, table: pa.Table, column: str) -> NDArray[Any]:
    data = table.column(column)
    if data.null_count:
        raise UsageError(
            f"Expected a value in every row of column '{column}' of '{folder}', found {data.null_count} "
            "without one; drop those rows."
        )
    values: NDArray[Any] = data.to_numpy()
    return values.astype(str) if is_text(data.type) else values
