"""A federation of one-dimensional quadratics, whose every answer is known in closed form.

Client i holds F_i(w) = a_i/2 (w - b_i)^2. As data that is one row: the feature sqrt(a_i), the target
sqrt(a_i) b_i and half the squared error of a linear layer without bias. Its network is "point"
(`nets/point.py`), which starts at w = 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from idiolect.data.dataset import Dataset
from idiolect.errors import UsageError


@dataclass(frozen=True)
class Answers:
    """The minimiser of the mean of all F_i, that of each F_i, and the point where FedAvg comes to rest."""

    global_optimum: float
    local_optima: tuple[float, ...]
    fedavg: float


def load(a: Sequence[float] = (4.0, 1.0), b: Sequence[float] = (1.0, -1.0)) -> Dataset:
    """One row per client, with its curvature a_i > 0 and its optimum b_i; `group` is the client."""
    curvature, optimum = _checked(a, b)
    x = torch.tensor(np.sqrt(curvature), dtype=torch.float32)[:, None]
    y = torch.tensor(np.sqrt(curvature) * optimum, dtype=torch.float32)[:, None]
    return Dataset("quadratics", x, y, classes=1, network="point", group=np.arange(len(curvature)), loss="squared")


def answers(
    a: Sequence[float] = (4.0, 1.0), b: Sequence[float] = (1.0, -1.0), lr: float = 0.05, steps: int = 10
) -> Answers:
    """The exact answers; FedAvg's for `steps` gradient steps of size `lr` by all clients in every round.

    A local phase maps w to b_i + q_i (w - b_i) with q_i = (1 - lr a_i)^steps. FedAvg repeats the mean of
    these maps and comes to rest at sum((1 - q_i) b_i) / sum(1 - q_i), which is the global optimum only for
    one step. It converges for |mean of q_i| < 1.
    """
    curvature, optimum = _checked(a, b)
    pull = 1 - (1 - lr * curvature) ** steps
    return Answers(
        global_optimum=float(curvature @ optimum / curvature.sum()),
        local_optima=tuple(map(float, optimum)),
        fedavg=float(pull @ optimum / pull.sum()),
    )


def _checked(a: Sequence[float], b: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    curvature, optimum = np.array(a, np.float64), np.array(b, np.float64)
    if curvature.ndim != 1 or curvature.shape != optimum.shape or not len(curvature) or not (curvature > 0).all():
        raise UsageError(f"quadratics: expected as many curvatures a > 0 as optima b, found a={a} and b={b}.")
    return curvature, optimum
