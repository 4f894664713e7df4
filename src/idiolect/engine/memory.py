"""The C library's memory. Every step allocates its gradients anew, and what is freed at the end of the heap goes back
to the system, to be mapped and cleared page by page at the next step."""

from __future__ import annotations

import ctypes
import os

TRIM, MAPPED = -1, -3  # glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD
KEPT = 256 << 20  # bytes at the end of the heap that stay when they are free
PIECE = (
    32 << 20
)  # from so many bytes on a tensor has a mapping of its own, given back when it is freed: the most allowed
OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep() -> None:
    """Keep up to KEPT bytes of what is freed from here on, in this process. Where the user chose for himself, or the C
    library is another than glibc, nothing changes."""
    libc = _glibc()
    if libc is not None and not any(name in os.environ for name in OWN):
        libc.mallopt(MAPPED, PIECE)
        libc.mallopt(TRIM, KEPT)


def release() -> None:
    """Give back what is kept. The thresholds stay: what they were cannot be asked."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL(None)
    except (OSError, TypeError):  # no such library, as on Windows
        return None
    return libc if hasattr(libc, "gnu_get_libc_version") else None
