"""FedDBE. Zhang et al., NeurIPS 2023 (Eliminating Domain Bias), on FedAvg: every client keeps a vector b_i that
takes up the mean of its features, so that the shared ones can be drawn to one common mean.

    loss = CE(head(z + b_i), y) + kappa * mean over dimensions of (m - zbar)^2 / 2,   z = body(x)
    m <- (1 - mean_momentum) * m + mean_momentum * (the batch's mean z),  0 at first, without its gradient

Before round 0 all clients train as in FedAvg from the initial model (order 10), following m from 0, and send where
it ends, m_i; zbar = sum_i n_i m_i / sum_i n_i, for good. What they trained is thrown away. Then FedAvg
with that loss, b_i (zeros at first, entry "bias") trained by the same SGD. personal_bias=False leaves it 0.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from .fedproto import Featured, features
from .world import Result, State, World, average, copy, initial, samples, size, train

FIRST_ORDER = 10


class Biased(nn.Module):
    """The network with a vector added to its features, a parameter or a constant; gives logits and features."""

    def __init__(self, network: nn.Module, trained: bool):
        super().__init__()
        self.body, self.head = network.body, network.head
        zero = torch.zeros(network.head.in_features)
        if trained:
            self.bias = nn.Parameter(zero)
        else:
            self.register_buffer("bias", zero)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.body(x)
        return self.head(z + self.bias), z


def run(world: World, kappa: float = 50.0, mean_momentum: float = 1.0, personal_bias: bool = True) -> Result:
    server = initial(world)
    means = [first_mean(world, i, mean_momentum) for i in range(world.clients)]
    sizes = [size(world, i) for i in range(world.clients)]
    zbar = sum(n * m for n, m in zip(sizes, means, strict=True)) / sum(sizes)
    biases = [torch.zeros_like(zbar) for _ in range(world.clients)]
    for r in range(world.rounds):
        uploads, weights = [], []
        for i in world.participants(r):
            biased = debiased(world, kappa, mean_momentum, personal_bias, zbar)
            w = train(biased, {**server, "bias": biases[i]}, i, r)
            biases[i] = w.pop("bias")
            uploads.append(w)
            weights.append(size(world, i))
        server = average(uploads, weights)
    clients = [{**copy(server), "bias": biases[i]} for i in range(world.clients)]
    found = [logits(world, w, samples(world, i)[0]) for i, w in enumerate(clients)]
    return Result(server, clients, {"mean": zbar, "logits": found})


def first_mean(world: World, i: int, mean_momentum: float) -> Tensor:
    """m_i: the running mean of client i's features at the end of its training before round 0."""
    means = []

    def objective(outputs: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        scores, z = outputs
        means.append(z.detach().mean(0))
        return world.loss(scores, y)

    followed = dataclasses.replace(world, module=lambda: Featured(world.module()), loss=objective)
    train(followed, initial(world), i, 0, order=FIRST_ORDER)
    share = mean_momentum
    return sum(share * (1 - share) ** (len(means) - 1 - k) * mean for k, mean in enumerate(means))


def debiased(world: World, kappa: float, mean_momentum: float, personal_bias: bool, zbar: Tensor) -> World:
    """The world of one phase, whose loss remembers m from step to step."""
    m = torch.zeros_like(zbar)

    def objective(outputs: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        nonlocal m
        scores, z = outputs
        now = (1 - mean_momentum) * m + mean_momentum * z.mean(0)
        m = now.detach()
        return world.loss(scores, y) + kappa * (0.5 * (now - zbar) ** 2).mean()

    return dataclasses.replace(world, module=lambda: Biased(world.module(), personal_bias), loss=objective)


def logits(world: World, w: State, x: Tensor) -> Tensor:
    """What a client predicts."""
    return (features(world, w, x) + w["bias"]) @ w["head.weight"].T + w["head.bias"]
