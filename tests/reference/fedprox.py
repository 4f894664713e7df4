"""FedProx. Li et al., MLSys 2020: FedAvg, each client minimising F_i(w) + (mu/2) ||w - w^t||^2.

The gradient of the added term is mu (w - w^t), for parameters only. The average is weighted by n_i.
"""

from __future__ import annotations

from .world import Result, World, average, copy, initial, pull, size, train


def run(world: World, mu: float = 0.01) -> Result:
    server = initial(world)
    for r in range(world.rounds):
        received = copy(server)
        uploads, weights = [], []
        for i in world.participants(r):
            uploads.append(train(world, received, i, r, correct=pull(mu, received)))
            weights.append(size(world, i))
        server = average(uploads, weights)
    return Result(server=server, clients=[copy(server) for _ in range(world.clients)])
