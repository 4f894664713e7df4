"""What a network refuses before torch would fail: samples of the wrong kind or size, options out of range."""

from __future__ import annotations

from math import inf

from idiolect.errors import UsageError


class UnfitError(UsageError):
    """The samples are not of the kind or size that the network takes."""


def image(network: str, shape: tuple[int, ...], smallest: int = 1, because: str = "") -> tuple[int, int, int]:
    """Channels, height and width of one image; refused where a side is below `smallest`."""
    if len(shape) != 3:
        raise UnfitError(f"{network} needs images (channels, height, width), found samples of shape {shape}.")
    channels, height, width = shape
    if min(height, width) < smallest:
        least = f"{smallest}x{smallest}"
        raise UnfitError(f"{network} needs images of at least {least} ({because}), found {height}x{width}.")
    return channels, height, width


def positive(network: str, **options: object) -> None:
    """Refuse options that are not an integer of at least 1."""
    for name, value in options.items():
        if not _is_size(value):
            raise UsageError(f"{network}: '{name}' needs an integer of at least 1, found {value!r}.")


def sizes(network: str, **option: object) -> tuple[int, ...]:
    """The option, one integer of at least 1 or several, as a tuple; refused if it is anything else."""
    ((name, value),) = option.items()
    several = tuple(value) if isinstance(value, tuple | list) else (value,)
    if not all(_is_size(size) for size in several):
        raise UsageError(f"{network}: '{name}' needs integers of at least 1, found {value!r}.")
    return several


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def widened(name: str, width: float, *sizes: int, multiple: int = 1) -> tuple[int, ...]:
    """Layer sizes times `width`, rounded to multiples of `multiple`, at least that."""
    if isinstance(width, bool) or not isinstance(width, int | float) or not 0 < width < inf:
        raise UsageError(f"{name}: 'width' must be a number above 0, found {width!r}.")
    return tuple(max(multiple, round(width * size / multiple) * multiple) for size in sizes)
