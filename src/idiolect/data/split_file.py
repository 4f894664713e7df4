"""A split as a Parquet file: a row of row numbers per client, and what ties them to their data and their making."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from idiolect.data.dataset import Dataset, digest
from idiolect.data.federated import Federation, split_hash
from idiolect.data.ragged import Ragged, count_different
from idiolect.errors import UsageError, said

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

PARTS = ("train", "validation", "test")
KEY, FORMAT = b"idiolect.split", 1
FACTS = {"recipe": str, "made_with": dict, "clients": int, "repeats": bool, "split_hash": str, "data": dict}


@dataclass(frozen=True)
class SplitFile:
    """A split that lies in a file, known by the hash that it had when this was made: another one is refused later."""

    path: str
    split_hash: str
    facts: Mapping[str, Any] = field(repr=False, compare=False)

    @staticmethod
    def named(text: str | os.PathLike[str]) -> SplitFile | None:
        """The file that a text like "FILE.parquet" or "FILE.parquet#HASH" names, with the first digits of its hash or
        all of them; None if it names none."""
        found = re.fullmatch(r"(.+\.parquet)(?:#([0-9a-f]{8,64}))?", os.fspath(text), re.DOTALL)
        if found is None:
            return None
        path, expected = found.groups(default="")
        facts = _facts(path, _open(path).schema_arrow)
        if not facts["split_hash"].startswith(expected):
            raise UsageError(
                f"Expected the split {expected[:12]} in '{path}', found {facts['split_hash'][:12]}: the file has "
                "changed. Bring the old one back, or leave out '#' and the hash to go on with this one."
            )
        return SplitFile(path, facts["split_hash"], facts)

    def __str__(self) -> str:
        return f"{self.path}#{self.split_hash}"

    @property
    def clients(self) -> int:
        return int(self.facts["clients"])

    @property
    def made_with(self) -> Mapping[str, Any]:
        return dict(self.facts["made_with"])

    @cached_property
    def recipe(self) -> str:
        return f"{Path(self.path).name} ({self.facts['recipe']})"

    def open(self, dataset: Dataset) -> Federation:
        """The federation that it makes of this data set; refused where file or data are not those of then."""
        table = _read(self.path)
        facts = _facts(self.path, table.schema)
        train, validation, test = parts = [_ragged(self.path, table.column(part)) for part in PARTS]
        if table.num_rows != facts["clients"] or split_hash(*parts) != facts["split_hash"]:
            raise _damaged(self.path, "its rows are not those that its hash stands for")
        if facts["split_hash"] != self.split_hash:
            raise UsageError(f"'{self.path}' has changed since this run was made; make the run anew.")
        _check_data(self.path, facts["data"], dataset)
        _check_numbers(f"'{self.path}'", parts, len(dataset))
        if _repeats(parts, len(dataset)) and not facts["repeats"]:
            raise _damaged(self.path, "it gives a row twice, though it says that it gives none twice")
        return Federation(dataset, train, validation, test, self.split_hash, facts["recipe"], facts["made_with"])


def save(federation: Federation, path: str | os.PathLike[str]) -> None:
    """Write a federation's rows to a file, from which `Run(split=path)` has them again. Nothing is overwritten."""
    import pyarrow.parquet as pq

    path = Path(path)
    check_name(path)
    parts = [getattr(federation, part) for part in PARTS]
    if split_hash(*parts) != federation.split_hash:
        raise UsageError(f"Expected the split hash of {federation!r} to be that of its rows; give split_hash(*parts).")
    _check_numbers("The federation", parts, len(federation.dataset))
    beside = path.with_name(path.name + ".part")
    try:
        pq.write_table(
            _table(federation, parts), beside, compression="zstd", use_dictionary=False, write_page_checksum=True,
            column_encoding={f"{part}.list.element": "DELTA_BINARY_PACKED" for part in PARTS},
        )  # fmt: skip
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def check_name(path: Path) -> None:
    """Refuse a name that would not be known as a split's again, and one that is taken."""
    if path.suffix != ".parquet":
        raise UsageError(f"A split file's name ends in .parquet, by which '--split' knows it; found '{path}'.")
    if path.exists():
        raise UsageError(f"'{path}' is there already and is never overwritten; choose another name, or remove it.")


def _table(federation: Federation, parts: list[Ragged]) -> pa.Table:
    import pyarrow as pa

    from idiolect import __version__

    data = federation.dataset.origin or federation.dataset
    facts = {
        "format": FORMAT,
        "idiolect": __version__,
        "recipe": federation.recipe,
        "made_with": dict(federation.made_with),
        "clients": federation.clients,
        "repeats": _repeats(parts, len(data)),
        "split_hash": federation.split_hash,
        "data": {"name": data.name, "rows": len(data), "targets": digest([data.y])},
    }
    columns = [pa.LargeListArray.from_arrays(part.bounds, part.rows) for part in parts]
    return pa.Table.from_arrays(columns, PARTS, metadata={KEY: json.dumps({**facts, "sha256": _seal(facts)})})


def _seal(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _open(path: str) -> pq.ParquetFile:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path, page_checksum_verification=True)
    except FileNotFoundError:
        raise UsageError(f"Expected a split file at '{path}', found nothing there; check the path.") from None
    except (pa.ArrowException, OSError, ValueError) as error:  # also of names that are no text
        raise _damaged(path, said(error)) from None


def _read(path: str) -> pa.Table:
    import pyarrow as pa

    file = _open(path)
    try:
        return file.read()
    except (pa.ArrowException, OSError, ValueError) as error:  # also of names that are no text
        raise _damaged(path, said(error)) from None


def _facts(path: str, schema: pa.Schema) -> dict[str, Any]:
    """What the file says of itself."""
    text = (schema.metadata or {}).get(KEY)
    types = [(field.name, str(field.type)) for field in schema]
    if text is None or types != [(part, "large_list<element: int64>") for part in PARTS]:
        raise UsageError(
            f"Expected a split file at '{path}', found a Parquet file with other columns or none of a split's facts; "
            "'idiolect split' makes one."
        )
    try:
        facts = json.loads(text)
        sealed = facts.pop("sha256")
    except (ValueError, KeyError, AttributeError, TypeError):
        raise _damaged(path, "its facts cannot be read") from None
    if sealed != _seal(facts):
        raise _damaged(path, "its facts are not those that were written")
    if facts.get("format") != FORMAT:
        made_by = f"of format {facts.get('format')}, of idiolect {facts.get('idiolect')}"
        raise UsageError(f"'{path}' is {made_by}; use that version.")
    if wrong := [name for name, kind in FACTS.items() if not isinstance(facts.get(name), kind)]:
        raise _damaged(path, f"it does not say its {wrong[0]}")
    if not facts["data"].keys() >= {"name", "rows", "targets"}:
        raise _damaged(path, "it does not say what it was made of")
    return dict(facts)


def _ragged(path: str, column: pa.ChunkedArray) -> Ragged:
    lists = column.combine_chunks()
    rows = lists.flatten()
    if lists.null_count or rows.null_count:
        raise _damaged(path, "numbers are missing in it")
    bounds = np.asarray(lists.offsets, np.int64)
    return Ragged(np.array(rows, np.int64), bounds - bounds[0])  # a copy that may be written to, as torch wants it


def _check_data(path: str, made_for: Mapping[str, Any], dataset: Dataset) -> None:
    found = {"rows": len(dataset), "targets": digest([dataset.y])}
    for what, number in found.items():
        if number != made_for[what]:
            raise UsageError(
                f"The split in '{path}' divides '{made_for['name']}' with {what} {made_for[what]}, found "
                f"'{dataset.name}' with {what} {number}; give the data, and the data options, that it was made for."
            )


def _check_numbers(where: str, parts: list[Ragged], rows: int) -> None:
    if any(part.rows.min(initial=0) < 0 or part.rows.max(initial=0) >= rows for part in parts):
        raise UsageError(f"{where} holds row numbers that are not in 0..{rows - 1}, the rows of the data.")
    if any(part.ascending() is not part for part in parts):
        raise UsageError(f"{where} holds row numbers that do not ascend for each client; sort them.")


def _repeats(parts: list[Ragged], rows: int) -> bool:
    """Whether some row comes more than once."""
    return count_different((part.rows for part in parts), rows) < sum(len(part.rows) for part in parts)


def _damaged(path: str, why: str) -> UsageError:
    return UsageError(f"'{path}' is damaged, or no split file: {why.rstrip('.')}. Make it anew with 'idiolect split'.")
