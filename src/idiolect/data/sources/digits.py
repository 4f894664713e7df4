"""Handwritten digits, 8x8: small enough to try anything in seconds."""

from __future__ import annotations

import torch

from idiolect.data.dataset import Dataset


def load() -> Dataset:
    """The 1,797 digits that come with scikit-learn (UCI's optical recognition test set), scaled to [0, 1]."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16  # [1797, 1, 8, 8]
    return Dataset("digits", x, torch.tensor(bunch.target, dtype=torch.int64), classes=10, network="convnet3")
