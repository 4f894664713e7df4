"""Tables as text: .csv or .tsv, plain or .gz; one file, train and test, or a file a client."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from idiolect.data import tables
from idiolect.data.dataset import Dataset
from idiolect.errors import UsageError, said

if TYPE_CHECKING:
    import pyarrow as pa

FORM = "a .csv or .tsv table with a column of labels (.gz too), or a folder of them: train and test, or one a client"
SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz")


def reads(path: Path) -> bool:
    return path.name.lower().endswith(SUFFIXES) if path.is_file() else path.is_dir() and bool(_files(path))


def load(
    path: Path, header: bool | None = None, delimiter: str | None = None, **options: Unpack[tables.Options]
) -> Dataset:
    """A table of features with a column `label`, and maybe a column `group` that says whose a row is (`tables.dataset`
    tells of the other options). Of a folder, files named train... and test... are what they say, test rows becoming
    the official test set; in any other folder each file is a client, named after it, unless `group` says otherwise.

    `header`: whether the first line has the columns' names; where not given, it has if it names the label or the
    group, if none of its cells is a number, or if they count from 0. Without one the columns are called 0, 1, ...
    `delimiter`: a comma, or a tab in .tsv.
    """
    files = [path] if not path.is_dir() else _files(path)
    train, test = tables.parts(path, files) if path.is_dir() else (files, [])
    roles = {str(role) for role in (options.get("label") or "label", options.get("group")) if not _number(str(role))}
    by_file = path.is_dir() and not any(tables.is_part(file, "train") for file in train)
    return tables.dataset(
        path,
        {file: _table(file, header, delimiter, roles) for file in train},
        {file: _table(file, header, delimiter, roles) for file in test},
        name=tables.name_of(path),
        by_file=by_file,
        **options,
    )


def _files(folder: Path) -> list[Path]:
    return sorted(f for f in folder.iterdir() if f.name.lower().endswith(SUFFIXES) and not f.name.startswith("."))


def _table(file: Path, header: bool | None, delimiter: str | None, roles: set[str]) -> pa.Table:
    import pyarrow as pa
    from pyarrow import csv as arrow

    if delimiter is not None and (not isinstance(delimiter, str) or len(delimiter) != 1 or not delimiter.isascii()):
        raise UsageError(f"Expected a delimiter of one character, as ';', found {delimiter!r}.")
    delimiter = delimiter or ("\t" if ".tsv" in file.name.lower() else ",")
    first = _first_line(file, delimiter)
    named = _is_header(first, roles) if header is None else header
    read = arrow.ReadOptions(use_threads=False, column_names=None if named else [str(k) for k in range(len(first))])
    try:
        table = arrow.read_csv(file, read, arrow.ParseOptions(delimiter=delimiter, newlines_in_values=True))
        tables.check_names(file, table)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UsageError(f"Expected a table in '{file}', found: {said(error)}.") from None
    if table.num_columns == 1:
        raise UsageError(
            f"Expected columns divided by {delimiter!r} in '{file}', found one column, '{table.column_names[0]}'; name "
            "another divider, as delimiter=';'."
        )
    return table


def _first_line(file: Path, delimiter: str) -> list[str]:
    try:
        with gzip.open(file) if file.suffix.lower() == ".gz" else file.open("rb") as raw:
            rows = csv.reader(io.TextIOWrapper(raw, "utf-8-sig", newline=""), delimiter=delimiter)
            return next((row for row in rows if row), [])
    except UnicodeDecodeError:
        raise UsageError(
            f"Expected text in UTF-8 in '{file}', found something else; save the table as UTF-8."
        ) from None
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        raise UsageError(f"Expected a table in '{file}', found: {said(error)}.") from None


def _is_header(cells: list[str], roles: set[str]) -> bool:
    counted = [str(k) for k in range(len(cells))]
    return not roles.isdisjoint(cells) or cells == counted or not any(map(_number, cells))


def _number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
