"""The two-dimensional toy set on which FedLAG's paper shows that clients' gradients conflict (appendix G)."""

from __future__ import annotations

import numpy as np
import torch

from idiolect.data.dataset import Dataset
from idiolect.data.streams import stream
from idiolect.errors import UsageError

BOUNDARIES = (-6.0, -2.0, 2.0, 6.0)  # domain d is told apart at x = BOUNDARIES[d]
SIDE_OF_CLASS_1 = (-1, -1, 1, 1)  # left or right of it
SIZES = ((1.8, 1.0), (1.4, 2.0), (1.4, 2.0), (1.8, 1.0))  # width and height of a domain's rectangles


def load(rows: int = 100, noise: float = 0.2, seed: int = 0) -> Dataset:
    """Four domains of `rows` points of either class, a share `noise` of them on the wrong side of y = 0.

    Given by the paper: two classes whose points fill rectangles of different size and shape; the global
    boundary is y = 0, so that the best linear model has w1 = 0, w2 != 0, b = 0; each domain has a boundary of
    its own, orthogonal to the global one (x = -6 for domain 1); noisy points in every domain make its own
    boundary the better one there; there are four clients, of which the first and third, and the second and
    fourth, pull against each other.

    Chosen here, as the paper only draws them: the other boundaries (x = -2, 2, 6), the sides, the sizes, the
    number of points and the share of noise. A domain's class 1 lies on one side of its boundary, above y = 0
    but for the noise, and class 0 is class 1 turned by 180 degrees about the boundary's foot, so that x =
    BOUNDARIES[d] separates the domain without error and y = 0 does not. Domains 3 and 4 mirror domains 2 and
    1 in x = 0, point by point, so that the best linear model has w1 = b = 0 exactly, not just in expectation.
    `group` is the domain; an IID split of the same points is the paper's "users with same domains".
    """
    wrong = round(noise * rows)
    if rows < 1 or not 0 <= wrong < rows / 2:
        raise UsageError(
            f"toy2d: expected rows of at least 1 and noise from 0 to less than 0.5, found {rows} and {noise}."
        )
    x, y, group = [], [], []
    for domain, (boundary, side, size) in enumerate(zip(BOUNDARIES, SIDE_OF_CLASS_1, SIZES, strict=True)):
        random = stream(seed, f"toy2d shape {min(domain, 3 - domain)}")  # a mirrored domain: the same points
        points = random.uniform((0.1, 0.1), size, (rows, 2)) * (side, 1)
        points[:wrong, 1] *= -1
        foot = np.array([boundary, 0])
        x += [foot + points, foot - points]
        y += [np.ones(rows), np.zeros(rows)]
        group += [np.full(2 * rows, domain)]
    return Dataset(
        "toy2d",
        torch.tensor(np.concatenate(x), dtype=torch.float32),
        torch.tensor(np.concatenate(y), dtype=torch.int64),
        classes=2,
        network="mlp",
        group=np.concatenate(group),
    )
