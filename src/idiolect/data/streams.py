"""Random numbers as a function of (seed, purpose), whatever was drawn before, here or elsewhere."""

from __future__ import annotations

import hashlib

import numpy as np


def stream(seed: int, purpose: str) -> np.random.Generator:
    """A fresh generator for one purpose; the same two arguments give the same numbers everywhere."""
    key = hashlib.sha256(f"{int(seed)}|{purpose}".encode()).digest()[:16]
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
