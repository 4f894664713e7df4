"""Split files of `idiolect split`. With `MARK` the input is the facts that a whole file says of itself, signed anew."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from fuzzing import MARK, Harness
from idiolect.data import SplitFile, federate, from_arrays, split_file

DATA = from_arrays(np.arange(24, dtype="f4")[:, None], np.arange(24) % 3, name="rows")


def whole(folder: Path) -> Path:
    file = folder / "whole.parquet"
    if not file.exists():
        split_file.save(federate(DATA, "iid", 3, seed=0), file)
    return file


def facts(file: Path) -> dict:
    return json.loads(pq.read_schema(file).metadata[split_file.KEY])


def seeds(folder: Path) -> list[bytes]:
    file = whole(folder)
    return [b"\0" + file.read_bytes(), bytes([MARK]) + json.dumps(facts(file)).encode()]


def signed(text: bytes) -> bytes:
    with suppress(ValueError, RecursionError):
        if isinstance(said := json.loads(text), dict):
            said.pop("sha256", None)
            return json.dumps({**said, "sha256": split_file._seal(said)}).encode()
    return text


def attempt(folder: Path, data: bytes) -> None:
    file = folder / "tried.parquet"
    if data[:1] and data[0] & MARK:
        table = pq.read_table(whole(folder)).replace_schema_metadata({split_file.KEY: signed(data[1:])})
        pq.write_table(table, file, write_page_checksum=True)
    else:
        file.write_bytes(data[1:])
    named = SplitFile.named(file)
    assert named is not None
    named.open(DATA)


HARNESSES = [Harness("split files", seeds, attempt)]
