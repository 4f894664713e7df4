"""Windows of characters whose class is the character that comes next."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from idiolect.data.dataset import Dataset
from idiolect.data.vocabulary import SPECIAL, Vocabulary
from idiolect.errors import UsageError

Codes = NDArray[np.uint32]
LAST = 0x110000  # one more than the largest code point


def read(file: Path, encoding: str = "utf-8") -> str:
    """The text of a file; a byte order mark is no part of it, and lines end in one character."""
    try:
        text = file.read_bytes().decode("utf-8-sig" if encoding.lower() in ("utf-8", "utf8") else encoding)
    except OSError as error:
        raise UsageError(f"Cannot read '{file}': {error.strerror}.") from None
    except LookupError:
        raise UsageError(f"Unknown encoding '{encoding}'; expected one such as utf-8, utf-16 or latin-1.") from None
    except UnicodeError as error:
        raise UsageError(
            f"Expected text in {encoding} in '{file}', found something else ({error}); save it as UTF-8, or give its "
            "encoding=."
        ) from None
    if "\0" in text:
        raise UsageError(
            f"Expected text in {encoding} in '{file}', found characters 0, as in binary files and in UTF-16; save it "
            "as UTF-8, or give its encoding=."
        )
    return text.replace("\r\n", "\n").replace("\r", "\n")


def codes(text: str) -> Codes:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


def dataset(
    windows: Codes,
    *,
    name: str,
    group: NDArray[np.str_],
    vocabulary: tuple[int, int | None],
    network: str | None = None,
    official_test: NDArray[np.bool_] | None = None,
) -> Dataset:
    """Of each row all characters but the last are x, and the last is y: both as ids of the same vocabulary, of the rows
    trained on. `vocabulary` is (min_count, max_size)."""
    seen = np.zeros(LAST, np.bool_)
    seen[windows] = True
    alphabet = np.flatnonzero(seen)
    ids = np.zeros(LAST, np.int64)
    ids[alphabet] = np.arange(len(SPECIAL), len(SPECIAL) + len(alphabet))
    numbered = torch.from_numpy(ids[windows])
    words = SPECIAL + tuple(map(chr, alphabet))
    return Dataset(
        name,
        numbered[:, :-1].contiguous(),
        numbered[:, -1].contiguous(),
        classes=len(words),
        network=network or "nplm",
        group=group,
        official_test=official_test,
        tokens=len(words),
        words=words,
        fit=Vocabulary(*vocabulary, targets=True),
    )
