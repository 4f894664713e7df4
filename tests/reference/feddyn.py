"""FedDyn. Acar et al., ICLR 2021, Algorithm 1: each client's loss is regularised anew in every round, so that at
the end the minimisers of all clients' losses and that of their mean agree.

A participant minimises L_i(w) - <g_i, w> + alpha / 2 ||w - w^t||^2 from the received w^t, to w_i. Then

    g_i <- g_i - alpha (w_i - w^t)                            the gradient of L_i at w_i, if that is a minimum
    h   <- h - alpha / N * sum over participants of (w_i - w^t),    N the number of all clients
    w^{t+1} = plain mean of the w_i - h / alpha

g_i and h are 0 at first, of parameters alone; h is always the mean of all g_i. Buffers are plainly averaged.
"""

from __future__ import annotations

import torch

from .world import Result, World, average, copy, initial, train, trainable


def run(world: World, alpha: float = 0.01) -> Result:
    names = trainable(world)
    server = initial(world)
    zero = {name: torch.zeros_like(server[name]) for name in names}
    g, h = [copy(zero) for _ in range(world.clients)], copy(zero)
    for r in range(world.rounds):
        received = copy(server)
        models = []
        for i in world.participants(r):
            before = copy(g[i])

            def correct(name, w, before=before, received=received):
                return -before[name] + alpha * (w - received[name])

            w = train(world, received, i, r, correct=correct)
            for name in names:
                g[i][name] = g[i][name] - alpha * (w[name] - received[name])
            models.append(w)
        server = average(models, [1.0] * len(models))
        for name in names:
            h[name] = h[name] - alpha / world.clients * sum(w[name] - received[name] for w in models)
            server[name] = server[name] - h[name] / alpha
    return Result(server=server, clients=[copy(server) for _ in range(world.clients)], extra={"h": h, "g": g})
