"""SCAFFOLD. Karimireddy et al., ICML 2020, Algorithm 1, option II.

    y <- x;  K times:  y <- y - lr (g_i(y) - c_i + c)
    c_i+ = c_i - c + (x - y) / (K lr)
    x <- x + server_lr * mean over S of (y - x);    c <- c + (1/N) sum over S of (c_i+ - c_i)

The mean is uniform over the participants S; N is the number of all clients. Weight decay is part of g_i.
There are control variates for parameters only; buffers are averaged plainly, without server_lr, because a
variance that is extrapolated may become negative.
"""

from __future__ import annotations

import torch

from .world import Result, World, average, copy, initial, train, trainable


def run(world: World, server_lr: float = 1.0) -> Result:
    if world.momentum != 0:
        raise ValueError("with momentum the displacement is not K * lr times the mean gradient")
    x = initial(world)
    names = trainable(world)
    c = {name: torch.zeros_like(x[name]) for name in names}
    ci = [{name: torch.zeros_like(x[name]) for name in names} for _ in range(world.clients)]
    for r in range(world.rounds):
        participants = world.participants(r)
        ends = []
        change = {name: torch.zeros_like(x[name]) for name in names}
        for i in participants:
            y = train(world, x, i, r, correct=lambda name, w, i=i: c[name] - ci[i][name])
            steps = sum(len(world.batches(i, r, 0, epoch)) for epoch in range(world.epochs))
            for name in names:
                new = ci[i][name] - c[name] + (x[name] - y[name]) / (steps * world.lr(r))
                change[name] = change[name] + (new - ci[i][name])
                ci[i][name] = new
            ends.append(y)
        mean = average(ends, [1] * len(participants))
        for name in x:
            rate = server_lr if name in names else 1.0
            x[name] = x[name] + rate * (mean[name] - x[name])
        for name in names:
            c[name] = c[name] + change[name] / world.clients
    return Result(server=x, clients=[copy(x) for _ in range(world.clients)], extra={"c": c, "ci": ci})
