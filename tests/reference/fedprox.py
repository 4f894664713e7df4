"""FedProx. Li et al., MLSys 2020: FedAvg, each client minimising F_i(w) + (mu/2) ||w - w^t||^2.

The gradient of the added term is mu (w - w^t), for parameters only. The average is weighted by n_i.

A participant is a straggler with probability `stragglers`, and then does 1, 2, ... or all epochs, each as likely; its
reply counts like the others'.
"""

from __future__ import annotations

from .world import Result, World, average, copy, initial, pull, size, train


def run(world: World, mu: float = 0.01, stragglers: float = 0.0) -> Result:
    server = initial(world)
    for r in range(world.rounds):
        received = copy(server)
        uploads, weights = [], []
        for i in world.participants(r):
            epochs = work(world, i, r, stragglers)
            uploads.append(train(world, received, i, r, epochs=epochs, correct=pull(mu, received)))
            weights.append(size(world, i))
        server = average(uploads, weights)
    return Result(server=server, clients=[copy(server) for _ in range(world.clients)])


def work(world: World, i: int, r: int, stragglers: float) -> int:
    """The epochs that client i does in round r."""
    if stragglers == 0:
        return world.epochs
    draw = world.draw("stragglers", r, i)
    late = draw.random() < stragglers
    return 1 + int(draw.integers(world.epochs)) if late else world.epochs
