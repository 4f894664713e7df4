"""FedAvg. McMahan et al., AISTATS 2017.

w^{t+1} = sum_i p_i w_i, where w_i is w^t after E epochs of SGD at client i, p_i = n_i / (sum of the
participants' n_j).
"""

from __future__ import annotations

from .world import Result, World, average, copy, initial, size, train


def run(world: World) -> Result:
    server = initial(world)
    for r in range(world.rounds):
        uploads, weights = [], []
        for i in world.participants(r):
            uploads.append(train(world, server, i, r))
            weights.append(size(world, i))
        server = average(uploads, weights)
    return Result(server=server, clients=[copy(server) for _ in range(world.clients)])
