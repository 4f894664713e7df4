"""FedAvgM. Hsu, Qi and Brown, arXiv 1909.06335, 2019: FedAvg with momentum at the server.

    D = sum_i p_i w_i - w^t;   m <- server_momentum m + D;   w^{t+1} = w^t + server_lr m

m starts as 0 and exists for parameters only; buffers are averaged plainly.
"""

from __future__ import annotations

import torch

from .world import Result, World, average, copy, initial, size, train, trainable


def run(world: World, server_momentum: float = 0.9, server_lr: float = 1.0) -> Result:
    server = initial(world)
    m = {name: torch.zeros_like(server[name]) for name in trainable(world)}
    for r in range(world.rounds):
        participants = world.participants(r)
        mean = average([train(world, server, i, r) for i in participants], [size(world, i) for i in participants])
        for name in server:
            if name in m:
                m[name] = server_momentum * m[name] + (mean[name] - server[name])
                server[name] = server[name] + server_lr * m[name]
            else:
                server[name] = mean[name]
    return Result(server=server, clients=[copy(server) for _ in range(world.clients)], extra={"m": m})
