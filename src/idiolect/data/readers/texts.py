"""Texts in Parquet files laid out as on the Hugging Face Hub, such as AG News, read from a local folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import numpy as np
import torch

from idiolect.data import words
from idiolect.data.dataset import Dataset
from idiolect.data.readers import hub
from idiolect.errors import UsageError, said, unknown

if TYPE_CHECKING:
    import pyarrow as pa

FORM = "a folder of texts with labels in train-*.parquet, as on the Hugging Face Hub"


def reads(path: Path) -> bool:
    return path.is_dir() and hub.holds_texts(path)


class Options(TypedDict, total=False):
    """Those of `samples` that a user gives."""

    text: str | None
    label: str | None
    group: str | None
    length: int
    ngrams: int
    buckets: int
    min_count: int
    max_size: int | None
    network: str | None
    train: str
    test: str | None


def load(folder: Path, config: str | None = None, **options: Unpack[Options]) -> Dataset:
    """The texts of `train-*.parquet` and, where there are any, `test-*.parquet`, with their labels, as token ids.

    The files lie, and `train`, `test` and `config` name them, as `readers/hub.py` says; train and test are joined, and
    `official_test` tells them apart.
    Words are those of `words.tokenise`, the first `length` of a text; 0 is padding, 1 is unknown. The vocabulary is
    that of the rows trained on, whatever the split makes them: words found there `min_count` times, the most frequent
    `max_size`, padding and unknown included. ngrams=2 adds pairs of words, hashed into `buckets` ids. `text`, `label`
    and `group` name columns. The defaults are those of AG News in PFLlib, whose settings FedAH shares.
    """
    return samples(folder, hub.parts(folder, config), name=folder.resolve().name, **options)


def samples(
    where: Path,
    parts: hub.Parts,
    *,
    name: str,
    text: str | None = None,
    label: str | None = None,
    group: str | None = None,
    length: int = 200,
    ngrams: int = 1,
    buckets: int = 10_000,
    min_count: int = 1,
    max_size: int | None = None,
    network: str | None = None,
    train: str = "train",
    test: str | None = None,
    classes: int | None = None,
) -> Dataset:
    """What `load` says, of these files."""
    schema = hub.schema(where, parts, train)
    text, label = _text_column(where, schema, text), hub.label_column(where, schema, label)
    table, in_train, test = hub.rows(where, parts, [text, label, *([group] if group else [])], label, train, test)
    data = words.dataset(
        where,
        _texts(where, table, text),
        torch.from_numpy(hub.values(where, table, label).astype(np.int64)),
        name=hub.called(name, train, test),
        length=length,
        ngrams=ngrams,
        buckets=buckets,
        vocabulary=(min_count, max_size),
        classes=hub.class_count(schema, label) or classes,
        network=network,
        group=hub.values(where, table, group) if group else None,
        official_test=None if in_train is None else np.arange(len(table)) >= in_train,
    )
    return replace(data, class_names=hub.class_names(schema, label))


def _text_column(folder: Path, schema: pa.Schema, asked: str | None) -> str:
    found = [field.name for field in schema if hub.is_text(field.type)]
    if asked is None:
        return "text" if "text" in found else hub.the_one(folder, "text", found)
    if asked not in schema.names:
        raise unknown(f"column of '{folder}'", asked, schema.names)
    if asked not in found:
        raise UsageError(
            f"Expected strings in column '{asked}' of '{folder}', found {schema.field(asked).type}; name a column of "
            f"texts by text=: {', '.join(found)}."
        )
    return asked


def _texts(folder: Path, table: pa.Table, column: str) -> list[str]:
    import pyarrow as pa

    data = table.column(column)
    if data.null_count:
        raise UsageError(
            f"Expected a text in every row of '{folder}', found {data.null_count} rows without one; drop those rows."
        )
    try:
        data.validate(full=True)
    except pa.ArrowInvalid as error:
        raise UsageError(f"Expected texts in UTF-8 in column '{column}' of '{folder}': {said(error)}.") from None
    texts: list[str] = data.to_pylist()
    return texts
