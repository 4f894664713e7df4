"""Tables in Parquet: one file, or a folder of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from idiolect.data import tables
from idiolect.data.dataset import Dataset
from idiolect.errors import UsageError, said

if TYPE_CHECKING:
    import pyarrow as pa

FORM = "a .parquet table with a column of labels, or a folder of such files"
BEFORE = ("hub",)  # a table in files named as on the Hub, with neither images nor texts in it
USUAL = {"label", "group", "client"}


def reads(path: Path) -> bool:
    if not path.is_dir():
        return path.suffix.lower() == ".parquet" and path.is_file()
    files = _files(path)
    as_on_hub = any(file.name.startswith("train-") for file in files)
    return bool(files) and (not as_on_hub or _numbers_alone(files[0]))


def load(path: Path, **options: Unpack[tables.Options]) -> Dataset:
    """A table of features with a column `label`, and maybe a column `group` that says whose a row is (`tables.dataset`
    tells of the other options). The files of a folder, or of its folder `data`, are the parts of one table; where
    there are any named train..., those named test... are the official test set."""
    train, test = tables.parts(path, _files(path)) if path.is_dir() else ([path], [])
    return tables.dataset(
        path,
        {file: _table(file) for file in train},
        {file: _table(file) for file in test},
        name=tables.name_of(path),
        **options,
    )


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.parquet")) or sorted(folder.glob("data/*.parquet"))


def _numbers_alone(file: Path) -> bool:
    """Columns of numbers, but for one that names classes or clients."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(file)
    except (pa.ArrowException, OSError, UnicodeDecodeError):
        return False
    return all(tables.numeric(field.type) or field.name in USUAL for field in schema)


def _table(file: Path) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with file.open("rb") as raw:  # a path would take key=value folders above it for columns
            table = pq.read_table(raw)
        table.validate(full=True)  # texts are read as they stand
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UsageError(f"Expected a Parquet file, found something else in '{file}': {said(error)}.") from None
    if any(pa.types.is_struct(field.type) for field in table.schema):
        raise UsageError(
            f"Expected a table of numbers in '{file}', found columns with parts, as images have; for images name the "
            "files train-....parquet and give their folder."
        )
    tables.check_names(file, table)
    return table
