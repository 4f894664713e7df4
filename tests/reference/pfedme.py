"""pFedMe. Dinh, Tran and Nguyen, NeurIPS 2020: the personal model theta_i is a proximal point of the global one.

In every round w_i and theta start as the model received. For each batch B, `inner_steps` times

    theta <- theta - personal_lr (g(theta; B) + lam (theta - w_i))

and then  w_i <- w_i - lr lam (w_i - theta).  g has weight_decay theta in it. theta goes on from batch to batch.

    w^{t+1} = (1 - beta) w^t + beta * mean of w_i        uniform, or weighted by "samples"

Every pass is at theta, in train mode, and moves theta's running statistics; those are what w_i is sent with, and
they are averaged plainly, without beta. A client predicts with theta_i as it last trained it.
"""

from __future__ import annotations

from .perfedavg import gradient
from .world import Result, World, average, copy, initial, size, trainable


def run(
    world: World,
    lam: float = 15.0,
    inner_steps: int = 5,
    personal_lr: float = 0.01,
    beta: float = 1.0,
    weights: str = "uniform",
) -> Result:
    assert weights in ("uniform", "samples")
    if world.momentum != 0:
        raise ValueError("both steps are plain")
    if any(world.lr(r) * lam > 1 for r in range(world.rounds)):
        raise ValueError("lr * lam must be at most 1, or w_i oversteps theta")
    names = trainable(world)
    server = initial(world)
    personal = [initial(world) for _ in range(world.clients)]
    for r in range(world.rounds):
        uploads, share = [], []
        for i in world.participants(r):
            w, theta = copy(server), copy(server)
            for epoch in range(world.epochs):
                for batch in world.batches(i, r, 0, epoch):
                    for _ in range(inner_steps):
                        g, theta = gradient(world, theta, i, batch)
                        for name in names:
                            step = g[name] + lam * (theta[name] - w[name])
                            theta[name] = theta[name] - personal_lr * step
                    for name in names:
                        w[name] = w[name] - world.lr(r) * lam * (w[name] - theta[name])
            personal[i] = theta
            uploads.append({name: w[name] if name in names else theta[name].clone() for name in w})
            share.append(size(world, i) if weights == "samples" else 1)
        mean = average(uploads, share)
        server = {name: (1 - beta) * server[name] + beta * mean[name] if name in names else mean[name] for name in mean}
    return Result(server=server, clients=personal)
