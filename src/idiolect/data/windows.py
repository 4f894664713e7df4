"""Windows of equal length over a series, such as characters of a text or readings of a sensor."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from idiolect.data.partition.split import is_whole
from idiolect.errors import UsageError


def check(where: str, length: int, stride: int) -> None:
    for what, value in {"length": length, "stride": stride}.items():
        if not is_whole(value, 1):
            raise UsageError(f"Expected a whole number of at least 1 for {what} of '{where}', found {value!r}.")


def cut(series: NDArray[Any], length: int, stride: int) -> NDArray[Any]:
    """All whole windows over the first axis, one every `stride`: [T, ...] to [windows, ..., length], a view."""
    if len(series) < length:
        return np.empty((0, *series.shape[1:], length), series.dtype)
    return np.lib.stride_tricks.sliding_window_view(series, length, axis=0)[::stride]


def refuse_short(where: str, sizes: dict[str, int], least: int, what: str) -> None:
    """Refuse pieces, by their names, that are too short for one window."""
    short = [name for name, size in sizes.items() if size < least]
    if short:
        others = f", and less than that in {len(short) - 1} others" if len(short) > 1 else ""
        raise UsageError(
            f"Expected at least {least} {what} of each client of '{where}', enough for a window, found "
            f"{sizes[short[0]]} of '{short[0]}'{others}; leave those out, or give a smaller length."
        )
