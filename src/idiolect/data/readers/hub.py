"""Images in Parquet files laid out as on the Hugging Face Hub, read from a local folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from idiolect.data import images
from idiolect.data.dataset import Dataset
from idiolect.errors import UsageError, unknown

if TYPE_CHECKING:
    import pyarrow as pa

FORM = "a folder of images in train-*.parquet, as on the Hugging Face Hub"


def reads(path: Path) -> bool:
    return path.is_dir() and bool(_files(path, "train")) and not holds_texts(path)


def load(
    folder: Path,
    image: str | None = None,
    label: str | None = None,
    group: str | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    network: str | None = None,
) -> Dataset:
    """The images of `train-*.parquet` and, where there are any, `test-*.parquet`, with their labels.

    The files lie in the folder or in its `data/`. Train and test are joined, and `official_test` tells them
    apart. Pixels are scaled to [0, 1] and normalised per channel by `mean` and `std`, which are measured on
    the training images where not given (mean 0 and std 1 leave [0, 1] as it is). `image` and `label` name
    columns where the files hold several; `group` names the column that says whose a row is.
    """
    train, test = _files(folder, "train"), _files(folder, "test")
    if not train:
        raise UsageError(f"Expected train-*.parquet in '{folder}' or in its folder 'data', found none; check the path.")
    schema = _schema(train[0])
    image, label = _image_column(folder, schema, image), _label_column(folder, schema, label)
    table = _read(folder, train + test, [image, label, *([group] if group else [])])
    in_train = sum(_rows(file) for file in train)
    pixels = images.decode(folder, [cell and cell["bytes"] for cell in table.column(image).to_pylist()])
    return images.samples(
        folder,
        pixels,
        _values(folder, table, label),
        name=folder.resolve().name,
        in_train=in_train if test else None,
        classes=_class_count(schema, label),
        mean=mean,
        std=std,
        network=network,
        group=_values(folder, table, group) if group else None,
    )


def holds_texts(folder: Path) -> bool:
    """Whether the files lie so and hold strings and no images: what `readers/texts.py` reads."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = _files(folder, "train")
    try:
        kinds = [field.type for field in pq.read_schema(files[0])] if files else []
    except (pa.ArrowInvalid, OSError):
        return False  # no Parquet, as `load` will say
    plain = all(_is_text(kind) or pa.types.is_integer(kind) for kind in kinds)
    return plain and any(_is_text(kind) for kind in kinds)


def _is_text(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _files(folder: Path, part: str) -> list[Path]:
    return sorted(folder.glob(f"{part}-*.parquet")) or sorted(folder.glob(f"data/{part}-*.parquet"))


def _schema(file: Path) -> pa.Schema:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_schema(file)
    except (pa.ArrowInvalid, OSError) as error:
        raise UsageError(f"Expected a Parquet file, found something else in '{file}'; download it again.") from error


def _rows(file: Path) -> int:
    import pyarrow.parquet as pq

    return int(pq.read_metadata(file).num_rows)


def _read(folder: Path, files: list[Path], columns: list[str]) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for file in files:
        for column in columns:
            if column not in _schema(file).names:
                raise unknown(f"column of '{file}'", column, _schema(file).names)
    try:
        return pa.concat_tables([pq.read_table(file, columns=columns) for file in files], promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise UsageError(f"Expected train and test files of one layout in '{folder}', found: {error}.") from error
    except OSError as error:
        raise UsageError(f"Expected whole Parquet files in '{folder}', found: {error}; download them again.") from error


def _features(schema: pa.Schema) -> dict[str, Any]:
    """What the Hub's metadata says of each column; nothing where the files carry none."""
    text = (schema.metadata or {}).get(b"huggingface")
    features: dict[str, Any] = json.loads(text)["info"]["features"] if text else {}
    return features


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
            f"{', '.join(schema.names)}; only images are read from folders so far, no texts or tables."
        )
    return asked or _the_one(folder, "image", found)


def _label_column(folder: Path, schema: pa.Schema, asked: str | None) -> str:
    import pyarrow as pa

    if asked is None:
        marked = [name for name, about in _features(schema).items() if about.get("_type") == "ClassLabel"]
        asked = "label" if "label" in schema.names else _the_one(folder, "label", marked)
    if asked not in schema.names:
        raise unknown(f"column of '{folder}'", asked, schema.names)
    if not pa.types.is_integer(schema.field(asked).type):
        raise UsageError(
            f"Expected integer labels in column '{asked}' of '{folder}', found "
            f"{schema.field(asked).type}; name another column by label=."
        )
    return asked


def _the_one(folder: Path, role: str, found: list[str]) -> str:
    if len(found) != 1:
        raise UsageError(
            f"Expected one {role} column in '{folder}', found {', '.join(found) or 'none'}; name it by {role}=."
        )
    return found[0]


def _class_count(schema: pa.Schema, label: str) -> int | None:
    about = _features(schema).get(label, {})
    return len(about["names"]) if about.get("names") else None


def _values(folder: Path, table: pa.Table, column: str) -> NDArray[Any]:
    data = table.column(column)
    if data.null_count:
        raise UsageError(
            f"Expected a value in every row of column '{column}' of '{folder}', found {data.null_count} "
            "without one; drop those rows."
        )
    values: NDArray[Any] = data.to_numpy()
    return values.astype(str) if _is_text(data.type) else values
