"""FedAH. "Federated Learning with Aggregated Head", Algorithm 1: FedRep, where a client begins each round
with a head between its own and the received one, and sends its head too.

A client has its head h_i (the initial one until it takes part) and weights W_i shaped like it (ones at
first). In a round it receives the body r and the head h, and
  1. learns W for `head_epochs` epochs (order 9), the body frozen, with h_hat = h_i + (h - h_i) * W computed
     anew for every batch:  W <- clip to [0, 1] of  W - alpha dL/dh_hat * (h - h_i)              eqs. 3 and 4
  2. trains the head for `head_epochs` epochs (order 0) from h_hat, the body frozen;                    eq. 5
  3. trains the body for E epochs (order 1) under that head, frozen.                                    eq. 6
Body and head are averaged, weighted by n_i. A client predicts with the received body and the h_hat that step
1 gives; what it learns when it is only evaluated is thrown away.

alpha is `weight_lr`, or the round's learning rate if that is None; step 1 has neither momentum nor weight
decay. `start` is where W starts, for tests: with weight_lr 0 W is held there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .world import Result, State, World, average, copy, fresh, initial, part, samples, size, train, write

MIXING_ORDER = 9


def run(world: World, head_epochs: int = 1, weight_lr: float | None = 1.0, start: float = 1.0) -> Result:
    server = initial(world)
    heads = [part(server, "head.") for _ in range(world.clients)]
    W = [{name: torch.full_like(h, start) for name, h in heads[i].items()} for i in range(world.clients)]
    for r in range(world.rounds):
        uploads, weights = [], []
        for i in world.participants(r):
            W[i] = learn(world, i, r, server, heads[i], W[i], head_epochs, weight_lr)
            w = {**server, **aggregated(part(server, "head."), heads[i], W[i])}
            w = train(world, w, i, r, only="head.", order=0, epochs=head_epochs)
            w = train(world, w, i, r, only="body.", order=1)
            heads[i] = part(w, "head.")
            uploads.append(w)
            weights.append(size(world, i))
        server = average(uploads, weights)
    clients = []
    for i in range(world.clients):
        tried = learn(world, i, world.rounds, server, heads[i], W[i], head_epochs, weight_lr)
        clients.append({**copy(server), **aggregated(part(server, "head."), heads[i], tried)})
    return Result(server=server, clients=clients, extra={"W": W, "heads": heads})


def learn(
    world: World, i: int, r: int, received: State, own: State, W: State, epochs: int, weight_lr: float | None
) -> State:
    """Step 1: the weights W after these epochs. The body is in eval mode; only the head varies."""
    alpha = world.lr(r) if weight_lr is None else weight_lr
    h = part(received, "head.")
    W = copy(W)
    x, y = samples(world, i)
    for epoch in range(epochs):
        for batch in world.batches(i, r, MIXING_ORDER, epoch):
            gradient = head_gradient(world, {**received, **aggregated(h, own, W)}, x[batch], y[batch])
            for name in W:
                W[name] = weight_step(W[name], gradient[name], h[name], own[name], alpha)
    return W


def aggregated(h: State, own: State, W: State) -> State:
    """h_hat, eq. 3."""
    return {name: own[name] + (h[name] - own[name]) * W[name] for name in h}


def weight_step(W: Tensor, gradient: Tensor, h: Tensor, own: Tensor, alpha: float) -> Tensor:
    """Eq. 4, clipped: the gradient is dL/dh_hat, and dh_hat/dW = h - h_i."""
    return (W - alpha * gradient * (h - own)).clamp(0, 1)


def head_gradient(world: World, w: State, x: Tensor, y: Tensor) -> State:
    """dL/dh of one batch for every parameter of the head, at the model w in eval mode."""
    module = fresh(world)
    write(module, w)
    module.eval()
    world.loss(module(x), y).backward()
    return {name: p.grad for name, p in module.named_parameters() if name.startswith("head.")}
