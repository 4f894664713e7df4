"""kNN-Per. Marfoq et al., ICML 2022: FedAvg, and at every client a memory of its training samples beside it.

Client i's datastore holds the pairs (body(x_j), y_j) of its training set under the received model in eval mode. Of a new
x, with N_k the k nearest of them by Euclidean distance (all where there are fewer; of equally far ones the earlier),

    p(c) = (1 - lam) * softmax(logits(x))_c + lam * (sum of e_j over j in N_k with y_j = c) / (sum of e_j over N_k)
    e_j  = exp(-||body(x) - body(x_j)|| / sigma)

A client's state has the model's entries, "datastore.features" [n, d] and "datastore.labels" [n].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from . import fedavg
from .world import Result, State, World, fresh, samples, write


def run(world: World, k: int = 10, lam: float = 0.5, sigma: float = 1.0) -> Result:
    server = fedavg.run(world).server
    clients = [remembered(world, server, i) for i in range(world.clients)]
    answers = [probabilities(world, clients[i], samples(world, i)[0], k, lam, sigma) for i in range(world.clients)]
    return Result(server=server, clients=clients, extra={"probabilities": answers})


def remembered(world: World, server: State, i: int) -> State:
    """The shared model and client i's datastore under it."""
    x, y = samples(world, i)
    features, _ = passed(world, server, x)
    return {**server, "datastore.features": features, "datastore.labels": y.clone()}


def passed(world: World, w: State, x: Tensor) -> tuple[Tensor, Tensor]:
    """Features and logits in eval mode, one sample at a time; w may have more entries than the network."""
    module: nn.Module = fresh(world)
    write(module, {name: tensor for name, tensor in w.items() if name.startswith(("body.", "head."))})
    module.eval()
    with torch.no_grad():
        features = torch.cat([module.body(row[None]) for row in x])
        return features, torch.cat([module.head(row[None]) for row in features])


def probabilities(world: World, w: State, x: Tensor, k: int, lam: float, sigma: float) -> Tensor:
    """What a client with this state answers for each of the samples. [B, C]"""
    features, logits = passed(world, w, x)
    known, labels = w["datastore.features"], w["datastore.labels"]
    found = torch.zeros(len(x), world.classes, dtype=torch.float64)
    for b in range(len(x)):
        distances = [math.dist(features[b].tolist(), row.tolist()) for row in known]
        nearest = sorted(range(len(known)), key=lambda j: (distances[j], j))[:k]
        closest = distances[nearest[0]]
        e = {j: math.exp((closest - distances[j]) / sigma) for j in nearest}  # of any origin: they are normalised
        shares = [math.exp(float(v)) for v in logits[b] - logits[b].max()]
        for c in range(world.classes):
            memory = sum(e[j] for j in nearest if labels[j] == c) / sum(e.values())
            found[b, c] = (1 - lam) * shares[c] / sum(shares) + lam * memory
    return found
