"""Handwritten digits, 8x8: small enough to try anything in seconds."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from idiolect.data.dataset import Dataset


def load() -> Dataset:
    """The 1,797 digits that come with scikit-learn (UCI's optical recognition test set), scaled to [0, 1]."""
    table = torch.from_numpy(np.loadtxt(_file(), delimiter=",", dtype=np.float32))  # 64 pixels and the digit
    x = table[:, :-1].reshape(-1, 1, 8, 8) / 16
    return Dataset("digits", x, table[:, -1].long(), classes=10, network="convnet3")


def _file() -> Path:
    """Where scikit-learn has them. To import it, as its own reader asks, takes half as long as to import torch."""
    package = find_spec("sklearn")
    assert package is not None  # a requirement of this package
    assert package.origin is not None
    return Path(package.origin).with_name("datasets") / "data" / "digits.csv.gz"
