"""The cache of decoded images: each set once, in a file named by what it was decoded from.

A file is an array as `numpy.save` writes it, with a checksum of its bytes behind. It is written beside and renamed, so
that two processes may make the same one at once; what is cut off, altered or somebody else's is made anew. The folder
is that of the variable IDIOLECT_CACHE, or the platform's for caches; IDIOLECT_CACHE=off turns the cache off.
"""

from __future__ import annotations

import hashlib
import os
import struct
import sys
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from idiolect.data.stored import BLOCK, Pixels, mapped
from idiolect.errors import UsageError

TAIL = struct.Struct("<8sI")  # behind the array: a mark, and the CRC-32 of all before it
MARK = b"idiolect"


def directory() -> Path | None:
    """Where decoded images are kept; None where the cache is off."""
    asked = os.environ.get("IDIOLECT_CACHE")
    if asked is not None:
        return None if asked in ("", "off") else Path(asked).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "idiolect" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "idiolect"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "idiolect"


def key(how: str, parts: Iterable[bytes | None]) -> str:
    """A name for what these bytes become when they are read in this way: others have another one."""
    found = hashlib.sha256(how.encode())
    for part in parts:
        found.update(b"-" if part is None else len(part).to_bytes(8, "little"))
        found.update(part or b"")
    return found.hexdigest()[:40]


def kept(key: str, rows: int, make: Callable[[], Iterator[Pixels]]) -> Pixels:
    """`rows` pictures, which `make` gives some at a time: mapped from the file of this key, made first where there is
    no sound one; in memory where no file can be written."""
    folder = directory()
    if folder is None:
        return _gathered(rows, make())
    file = folder / f"{key}.npy"
    if (found := sound(file, rows)) is not None:
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(file, rows, make())
    except OSError as error:
        warnings.warn(
            f"Decoded images cannot be kept in '{folder}' ({error.strerror or error}): they will be decoded again next "
            "time; name another folder by IDIOLECT_CACHE, or turn the cache off by IDIOLECT_CACHE=off.",
            stacklevel=3,
        )
        return _gathered(rows, make())
    found = sound(file, rows)
    return _gathered(rows, make()) if found is None else found


def sound(file: Path, rows: int) -> Pixels | None:
    """The pictures of a file of the cache, if its checksum says that they are what was written."""
    try:
        with file.open("rb") as held:
            if not _checks(held):
                return None
        found = mapped(file)
    except (OSError, UsageError):
        return None
    return found if found.dtype == np.uint8 and found.ndim == 4 and len(found) == rows else None


def _checks(held: BinaryIO) -> bool:
    left = os.fstat(held.fileno()).st_size - TAIL.size
    checksum = 0
    while left > 0:
        checksum = zlib.crc32(part := held.read(min(left, BLOCK)), checksum)
        left -= len(part)
        if not part:
            return False
    return held.read() == TAIL.pack(MARK, checksum)


def _write(file: Path, rows: int, pictures: Iterator[Pixels]) -> None:
    """By plain writes: on a full disk these fail, where a map would end the process."""
    number, beside = tempfile.mkstemp(".part", file.stem, file.parent)
    try:
        with os.fdopen(number, "wb") as out:
            counted = _Counted(out)
            for place, some in enumerate(pictures):
                if place == 0:
                    form = {"descr": "|u1", "fortran_order": False, "shape": (rows, *some.shape[1:])}
                    np.lib.format.write_array_header_1_0(counted, form)  # type: ignore[arg-type]
                counted.write(np.ascontiguousarray(some).data)
            out.write(TAIL.pack(MARK, counted.checksum))
        os.replace(beside, file)
    except BaseException:
        with suppress(OSError):
            os.unlink(beside)
        raise


class _Counted:
    """A file with the checksum of what was written to it."""

    def __init__(self, out: BinaryIO) -> None:
        self.out, self.checksum = out, 0

    def write(self, part: Any) -> None:
        self.checksum = zlib.crc32(part, self.checksum)
        self.out.write(part)


def _gathered(rows: int, pictures: Iterator[Pixels]) -> Pixels:
    found: NDArray[np.uint8] | None = None
    at = 0
    for some in pictures:
        if found is None:
            found = np.empty((rows, *some.shape[1:]), np.uint8)
        found[at : at + len(some)] = some
        at += len(some)
    assert found is not None
    return found
