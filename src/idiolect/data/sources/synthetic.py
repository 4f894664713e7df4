"""Gaussian blobs that lie elsewhere at every client: a small classification task with natural clients."""

from __future__ import annotations

import torch

from idiolect.data.dataset import Dataset
from idiolect.data.streams import stream
from idiolect.errors import UsageError


def load(
    clients: int = 4,
    rows: int = 60,
    classes: int = 3,
    features: int = 8,
    shift: float = 1.0,
    noise: float = 1.0,
    seed: int = 0,
) -> Dataset:
    """`rows` samples for each of `clients`, with the classes in turn, so that every client has all of them.

    A sample of class c at client i is centre_c + shift * offset_i + noise * e, where centre (of length about
    3), offset and e are standard normal up to that factor. shift=0 makes the clients alike. `group` is the
    client.
    """
    if min(clients, rows, classes, features) < 1 or shift < 0 or noise < 0:
        raise UsageError(
            "synthetic: expected clients, rows, classes and features of at least 1 and shift and noise of "
            f"at least 0, found {clients}, {rows}, {classes}, {features}, {shift} and {noise}."
        )
    random = stream(seed, "synthetic data")
    centres = random.standard_normal((classes, features)) * 3 / features**0.5
    offsets = random.standard_normal((clients, features)) / features**0.5
    group = torch.arange(clients).repeat_interleave(rows)
    y = torch.arange(rows).remainder(classes).repeat(clients)
    x = centres[y] + shift * offsets[group] + noise * random.standard_normal((len(y), features)) / features**0.5
    return Dataset("synthetic", torch.tensor(x, dtype=torch.float32), y, classes, network="mlp", group=group.numpy())
