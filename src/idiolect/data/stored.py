"""Samples kept in another form than networks take them: pixels of one byte, numbers in a file that stays there."""

from __future__ import annotations

import lzma
import struct
import zlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from tokenize import TokenError
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from idiolect.errors import UsageError

Pixels = NDArray[np.uint8]  # [rows, height, width, channels]
BROKEN = (  # what numpy.load raises, beside OSError, for a file that is none of its own: it reads headers as Python
    ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, EOFError, MemoryError, SyntaxError,
    TokenError, NotImplementedError, RuntimeError, BadZipFile, lzma.LZMAError, struct.error, zlib.error,
)  # fmt: skip
BLOCK = 1 << 24  # bytes that are looked at together where all must be


class Stored:
    """`stored[rows]` gives those rows as a network takes them; only they are read, and only they are checked.

    values: an array, or the path of an .npy file, which is mapped when it is first needed, in whatever process.
    mean, std: of pixels [rows, height, width, channels], which become float32 images [rows, channels, height, width],
        scaled to [0, 1] and normalised per channel. Without them, floats become float32 and whole numbers int64.
    """

    def __init__(
        self,
        values: NDArray[Any] | Path,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        name: str = "x",
    ) -> None:
        self.name, self.file = name, values.absolute() if isinstance(values, Path) else None
        self.scale = None if mean is None or std is None else (tuple(mean), tuple(std))
        self.memory: Tensor | None = None
        self.values = np.asarray(mapped(values) if isinstance(values, Path) else values)
        self.form = self.values.shape, self.values.dtype
        if self.values.dtype.kind not in "fiu" or (self.scale is not None and self.values.dtype != np.uint8):
            expected = "numbers" if self.scale is None else "uint8 pixels"
            raise UsageError(f"{name}: expected x as {expected}, found {self.values.dtype}; convert it first.")
        self.wanted = np.dtype(np.float32 if self.values.dtype.kind == "f" else np.int64)

    @cached_property
    def values(self) -> NDArray[Any]:
        """As they are kept. In another process a file is mapped anew."""
        if self.memory is not None:
            return self.memory.numpy()
        assert self.file is not None
        found = np.asarray(mapped(self.file))
        if self.form != (found.shape, found.dtype):
            raise UsageError(f"'{self.file}' has changed while it was in use; start again.")
        return found

    def __len__(self) -> int:
        return int(self.form[0][0])

    @property
    def shape(self) -> torch.Size:
        """The shape of all samples."""
        rows, *sample = self.form[0]
        return torch.Size([rows, *(sample if self.scale is None else (sample[2], *sample[:2]))])

    @property
    def dtype(self) -> torch.dtype:
        """That of the samples."""
        return torch.float32 if self.scale is not None or self.form[1].kind == "f" else torch.int64

    def __getitem__(self, rows: Tensor | NDArray[Any] | slice) -> Tensor:
        rows = rows.numpy() if isinstance(rows, Tensor) else rows
        taken = self.values[rows]
        if self.scale is not None:
            return normalised(taken, *self.scale)
        if taken.dtype != self.wanted or not taken.flags.writeable:  # a part of a file is read-only
            with np.errstate(over="ignore"):  # what float32 cannot hold becomes inf and is refused as such
                taken = np.array(taken, self.wanted, order="C")
        fine = np.isfinite(taken) if self.wanted.kind == "f" else taken >= 0
        if not fine.all():
            row = np.arange(len(self))[rows][~fine.reshape(len(taken), -1).all(1)][0]
            what = (
                "finite numbers in x, found NaN or inf" if self.wanted.kind == "f" else "token ids from 0, found less"
            )
            raise UsageError(f"{self.name}: expected {what} in row {row}; drop or repair such rows.")
        return torch.from_numpy(taken)

    def bytes(self) -> Iterator[Tensor]:
        """All that is kept, some rows at a time."""
        return (torch.from_numpy(np.array(some).reshape(-1).view(np.uint8)) for some in blocks(self.values))

    def share_memory_(self) -> Stored:
        """What lies in memory moves to where other processes see it; a file they map themselves."""
        if not self.is_shared():
            self.memory = torch.from_numpy(np.array(self.values)).share_memory_()
            self.values = self.memory.numpy()
        return self

    def is_shared(self) -> bool:
        return self.file is not None or (self.memory is not None and self.memory.is_shared())

    def __getstate__(self) -> dict[str, Any]:
        """A file goes by its name, memory as a tensor, which is not copied where it is shared."""
        state = {k: v for k, v in vars(self).items() if k != "values"}
        if self.file is None and self.memory is None:
            state["memory"] = torch.from_numpy(np.array(self.values))
        return state


def mapped(file: Path) -> NDArray[Any]:
    """The array of an .npy file, of which nothing is read until it is used."""
    try:
        found: NDArray[Any] | None = np.load(file, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise UsageError(f"Expected an array in '{file}': {error.strerror or error}.") from None
    except BROKEN:
        found = None
    if not isinstance(found, np.ndarray):
        raise UsageError(
            f"Expected one plain array in '{file}', found Python objects, a cut-off file or something else; write it "
            "with numpy.save."
        )
    return found


def blocks(values: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Some rows at a time, so that what is mapped is never in memory whole."""
    rows = max(1, BLOCK // max(1, values[:1].nbytes))
    return (values[start : start + rows] for start in range(0, len(values), rows))


def normalised(pixels: Pixels, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Float32 images of pixels, in the memory layout of the pixels: channels last."""
    x = torch.from_numpy(np.require(pixels, requirements=["C", "W"])).permute(0, 3, 1, 2).to(torch.float32)
    by_channel = [torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1) for values in (mean, std)]
    return x.div_(255).sub_(by_channel[0]).div_(by_channel[1])
