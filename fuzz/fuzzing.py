"""What a harness is: small valid inputs to begin with, and an attempt that ends well or with a `UsageError`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "data"), str(ROOT / "benchmarks")]
MARK = 0x80  # of an input's first byte: what follows is packed, or signed, before it is read


@dataclass(frozen=True)
class Harness:
    """`seeds` and `attempt` get a folder of their own, the same for all attempts of one process."""

    name: str
    seeds: Callable[[Path], list[bytes]]
    attempt: Callable[[Path, bytes], None]


def files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
