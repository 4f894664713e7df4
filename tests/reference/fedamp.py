"""FedAMP and HeurFedAMP. Huang et al., AAAI 2021: every client is pulled to its own mixture of all models.

The server keeps each client's last upload and, after every round, mixes the K clients that ever uploaded:

    u_i = sum_j xi_ij w_j
    "distance":  xi_ij = min(alpha / sigma, 1 / K) * exp(-||w_i - w_j||^2 / sigma)    for j != i
                 xi_ii = 1 - sum over j != i of xi_ij
    "cosine":    xi_ij = (1 - xi_ii) * softmax over j != i of scale * cos(w_i, w_j)   for j != i
                 xi_ii = self_weight, or 1 / K where that is None

A participant continues its own model with the gradient g + (lam / alpha) (w - u_i), and without a pull as
long as it has never uploaded. Parameters alone are compared, mixed and pulled; buffers are the client's own.
"""

from __future__ import annotations

import math
import statistics

import torch
from torch import Tensor

from .world import Result, State, World, initial, pull, train, trainable


def run(
    world: World,
    lam: float = 1.0,
    alpha: float = 1.0,
    sigma: float | None = None,
    attention: str = "distance",
    self_weight: float | None = None,
    scale: float = 10.0,
) -> Result:
    models = [initial(world) for _ in range(world.clients)]
    names = trainable(world)
    uploads: dict[int, State] = {}
    clouds: dict[int, State] = {}
    xi = torch.zeros(0, 0, dtype=torch.float64)
    for r in range(world.rounds):
        for i in world.participants(r):
            if i in clouds:
                models[i] = train(world, models[i], i, r, correct=pull(lam / alpha, clouds[i]))
            else:
                models[i] = train(world, models[i], i, r)
            uploads[i] = {name: models[i][name].clone() for name in names}
        known = sorted(uploads)
        if attention == "distance":
            xi = by_distance([uploads[i] for i in known], alpha, sigma)
        elif attention == "cosine":
            xi = by_cosine([uploads[i] for i in known], self_weight, scale)
        else:
            raise ValueError(attention)
        clouds = {
            i: {name: sum(xi[a, b] * uploads[j][name] for b, j in enumerate(known)) for name in names}
            for a, i in enumerate(known)
        }
    # rows and columns of xi are the known clients
    return Result(server={}, clients=models, extra={"xi": xi, "clouds": clouds, "known": sorted(uploads)})


def by_distance(models: list[State], alpha: float, sigma: float | None) -> Tensor:
    """xi of FedAMP. sigma None: the median of the pairs' positive squared distances, 1 if none is."""
    count = len(models)
    distance = [[squared_distance(u, v) for v in models] for u in models]
    if sigma is None:
        positive = [distance[i][j] for i in range(count) for j in range(i + 1, count) if distance[i][j] > 0]
        sigma = statistics.median(positive) if positive else 1.0
    xi = torch.zeros(count, count, dtype=torch.float64)
    for i in range(count):
        for j in range(count):
            if j != i:
                xi[i, j] = min(alpha / sigma, 1 / count) * math.exp(-distance[i][j] / sigma)
        xi[i, i] = 1 - xi[i].sum()
    return xi


def by_cosine(models: list[State], self_weight: float | None, scale: float) -> Tensor:
    """xi of HeurFedAMP. A client with nobody to look at has weight 1 on itself."""
    count = len(models)
    if count == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    own = 1 / count if self_weight is None else self_weight
    xi = torch.zeros(count, count, dtype=torch.float64)
    for i in range(count):
        affinity = {j: math.exp(scale * cosine(models[i], models[j])) for j in range(count) if j != i}
        for j in affinity:
            xi[i, j] = (1 - own) * affinity[j] / sum(affinity.values())
        xi[i, i] = own
    return xi


def squared_distance(u: State, v: State) -> float:
    return sum(float(((u[name] - v[name]) ** 2).sum()) for name in u)


def cosine(u: State, v: State) -> float:
    product = sum(float((u[name] * v[name]).sum()) for name in u)
    lengths = [math.sqrt(sum(float((w[name] ** 2).sum()) for name in w)) for w in (u, v)]
    return product / (lengths[0] * lengths[1])
