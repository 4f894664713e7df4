"""Each reader of data: one of a small data set's files is replaced by the input, and the data set is read.

The first byte says which file. With `MARK` the rest is what is packed in it: a checksum or a compression would
otherwise keep nearly every change from the code behind it.
"""

from __future__ import annotations

import gzip
import io
import zipfile
from functools import partial
from pathlib import Path

from forms import FORMS, OTHERS

import fuzzing
from fuzzing import MARK, Harness
from idiolect.data import load


def packed(file: Path, content: bytes) -> bytes:
    if file.suffix == ".gz":
        return gzip.compress(content, 1)
    if file.suffix == ".npz":
        held = io.BytesIO()
        with zipfile.ZipFile(held, "w") as members:
            for name, part in zip(("x.npy", "y.npy", "data.npy"), content.split(b"\xff|"), strict=False):
                members.writestr(name, part)
        return held.getvalue()
    return content


def unpacked(file: Path) -> bytes | None:
    if file.suffix == ".gz":
        return gzip.decompress(file.read_bytes())
    if file.suffix == ".npz":
        with zipfile.ZipFile(file) as members:
            return b"\xff|".join(members.read(name) for name in sorted(members.namelist(), reverse=True))
    return None


def place(folder: Path, form: str) -> tuple[Path, dict, list[tuple[Path, bytes]]]:
    """The data set's path and options, and its files with what they hold when they are whole."""
    home = folder / form
    made = home / "made"
    if not made.exists():
        home.mkdir(parents=True, exist_ok=True)
        path, options = (FORMS | OTHERS)[form](home)
        made.touch()
        KNOWN[form] = path, options, [(file, file.read_bytes()) for file in fuzzing.files(path)]
    return KNOWN[form]


KNOWN: dict[str, tuple] = {}


def seeds(form: str, folder: Path) -> list[bytes]:
    _, _, whole = place(folder, form)
    held = [bytes([k]) + content for k, (_, content) in enumerate(whole)]
    return held + [bytes([MARK | k]) + inner for k, (f, _) in enumerate(whole) if (inner := unpacked(f)) is not None]


def attempt(form: str, folder: Path, data: bytes) -> None:
    path, options, whole = place(folder, form)
    first, content = data[0] if data else 0, data[1:]
    file, before = whole[(first & ~MARK) % len(whole)]
    file.write_bytes(packed(file, content) if first & MARK else content)
    try:
        read = load(path, **options)
        read.x[: min(3, len(read))]
    finally:
        file.write_bytes(before)


HARNESSES = [Harness(f"data: {form}", partial(seeds, form), partial(attempt, form)) for form in FORMS | OTHERS]
