"""A folder of text files, one a client, such as the parts of a play: which character comes next?"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from idiolect.data import characters, windows
from idiolect.data.dataset import Dataset

FORM = "a folder of .txt files, one a client, whose next characters are predicted"


def reads(path: Path) -> bool:
    files = [file for file in path.iterdir() if not file.name.startswith(".")] if path.is_dir() else []
    return bool(files) and all(file.suffix == ".txt" and file.is_file() for file in files)


def load(
    folder: Path,
    length: int = 80,
    stride: int | None = None,
    encoding: str = "utf-8",
    min_count: int = 1,
    max_size: int | None = None,
    network: str | None = None,
) -> Dataset:
    """A row is `length` characters of a client's file, and its class the character after them; `group` is the file's
    name. The vocabulary of characters, which are the classes too, is that of the rows trained on (`min_count`,
    `max_size`).

    One row begins every `stride` characters: by default every length + 1, so that no character is in two rows. With a
    smaller stride (1 is LEAF's) there are more rows, and those tested on overlap with those trained on.
    """
    stride = length + 1 if stride is None else stride
    windows.check(str(folder), length, stride)
    texts = {file.stem: characters.codes(characters.read(file, encoding)) for file in sorted(folder.glob("*.txt"))}
    windows.refuse_short(str(folder), {name: len(text) for name, text in texts.items()}, length + 1, "characters")
    cut = [windows.cut(text, length + 1, stride) for text in texts.values()]
    return characters.dataset(
        np.concatenate(cut),
        name=folder.resolve().name,
        group=np.repeat(np.array(list(texts)), [len(rows) for rows in cut]),
        vocabulary=(min_count, max_size),
        network=network,
    )
