"""Ditto. Li, Hu, Beirami and Smith, ICML 2021: FedAvg for the global model w, and beside it a personal model
v_i that minimises F_i(v) + (lam/2) ||v - w^t||^2, where w^t is the model as received.

Both phases see the same batches. v_i has its own buffers and stays as it is while its client is absent.
"""

from __future__ import annotations

from .world import Result, World, average, copy, initial, pull, size, train


def run(world: World, lam: float = 1.0, personal_epochs: int | None = None) -> Result:
    server = initial(world)
    personal = [initial(world) for _ in range(world.clients)]
    for r in range(world.rounds):
        received = copy(server)
        uploads, weights = [], []
        for i in world.participants(r):
            uploads.append(train(world, received, i, r, order=0))
            weights.append(size(world, i))
            personal[i] = train(
                world,
                personal[i],
                i,
                r,
                order=0,
                epochs=personal_epochs,
                correct=pull(lam, received),
            )
        server = average(uploads, weights)
    return Result(server=server, clients=personal)
