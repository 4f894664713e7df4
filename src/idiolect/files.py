"""Files that are whole or not there."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def write(file: Path, content: str | bytes) -> None:
    """Written beside, flushed and renamed: whatever happens, the file is as it was or as it shall be."""
    beside = file.with_name(file.name + ".part")
    try:
        with beside.open("wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(beside, file)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise
