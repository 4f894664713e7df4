"""FedAdam. Reddi et al., ICLR 2021, Algorithm 2: FedAvg whose mean update is a gradient for Adam at the server.

    D = sum_i p_i w_i - w^t
    m <- beta1 m + (1 - beta1) D;   v <- beta2 v + (1 - beta2) D^2
    w^{t+1} = w^t + server_lr m / (sqrt(v) + tau)

m starts as 0, v as tau^2; there is no correction of their bias. Both exist for parameters only; buffers are
averaged plainly.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .world import Result, World, average, copy, initial, size, train, trainable


def run(world: World, server_lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> Result:
    return adaptive(world, lambda v, D: beta2 * v + (1 - beta2) * D**2, server_lr, beta1, tau)


def adaptive(
    world: World, second: Callable[[Tensor, Tensor], Tensor], server_lr: float, beta1: float, tau: float
) -> Result:
    """`second(v, D)` is the next v."""
    server = initial(world)
    m = {name: torch.zeros_like(server[name]) for name in trainable(world)}
    v = {name: torch.full_like(server[name], tau**2) for name in m}
    for r in range(world.rounds):
        participants = world.participants(r)
        mean = average([train(world, server, i, r) for i in participants], [size(world, i) for i in participants])
        for name in server:
            if name in m:
                D = mean[name] - server[name]
                m[name] = beta1 * m[name] + (1 - beta1) * D
                v[name] = second(v[name], D)
                server[name] = server[name] + server_lr * m[name] / (v[name].sqrt() + tau)
            else:
                server[name] = mean[name]
    return Result(server=server, clients=[copy(server) for _ in range(world.clients)], extra={"m": m, "v": v})
