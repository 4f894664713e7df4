"""APFL. Deng, Kamani and Mahdavi, arXiv 2003.13461, 2020, Algorithm 1: a client predicts with a mixture of the global
model w and a model v_i of its own.

    vbar = alpha_i v_i + (1 - alpha_i) w
    each batch, both from the values before it:  w <- SGD with g(w);   v_i <- SGD with alpha_i g(vbar)
    adaptive, before a round's training, on its first batch:
        alpha_i <- clip to [0, 1] of  alpha_i - alpha_lr <v_i - w^t, g(vbar)>

w starts as received and is averaged as in FedAvg, v_i is the client's own and starts as w^0. Both have the world's
momentum and weight decay, alpha has neither; alpha_lr is the round's learning rate unless given. vbar runs on
statistics of its own, kept with v_i and moved by its passes in training; alpha is learnt in eval mode.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .world import Result, State, World, average, copy, fresh, initial, read, samples, size, trainable, write


def run(world: World, alpha: float = 0.5, adaptive: bool = True, alpha_lr: float | None = None) -> Result:
    names = trainable(world)
    server = initial(world)
    own = [initial(world) for _ in range(world.clients)]
    mix = [alpha] * world.clients
    for r in range(world.rounds):
        uploads, weights = [], []
        for i in world.participants(r):
            if adaptive:
                rate = world.lr(r) if alpha_lr is None else alpha_lr
                mix[i] = learn(world, i, r, server, own[i], mix[i], rate)
            w, own[i] = together(world, i, r, server, own[i], mix[i])
            uploads.append(w)
            weights.append(size(world, i))
        server = average(uploads, weights)
    clients = [mixture(server, own[i], mix[i], names) for i in range(world.clients)]
    return Result(server=copy(server), clients=clients, extra={"alpha": mix, "v": own})


def mixture(w: State, v: State, alpha: float, names: list[str]) -> State:
    """vbar: the parameters mixed, the buffers those of v."""
    return {name: alpha * v[name] + (1 - alpha) * w[name] if name in names else v[name].clone() for name in v}


def learn(world: World, i: int, r: int, w: State, v: State, alpha: float, rate: float) -> float:
    """alpha after its one step in round r."""
    names = trainable(world)
    module = fresh(world)
    write(module, mixture(w, v, alpha, names))
    g = slope(world, module.eval(), i, world.batches(i, r, 0, 0)[0])
    downhill = sum(float(((v[name] - w[name]) * g[name]).sum()) for name in names)
    return min(1.0, max(0.0, alpha - rate * downhill))


def together(world: World, i: int, r: int, w: State, v: State, alpha: float) -> tuple[State, State]:
    """w and v after a round of training."""
    names = trainable(world)
    w, v = copy(w), copy(v)
    velocities: tuple[State, State] = {}, {}
    for epoch in range(world.epochs):
        for batch in world.batches(i, r, 0, epoch):
            shared, mixed = fresh(world), fresh(world)
            write(shared, w)
            write(mixed, mixture(w, v, alpha, names))
            g = slope(world, shared.train(), i, batch)
            h = {name: alpha * d for name, d in slope(world, mixed.train(), i, batch).items()}
            buffers_of_w, buffers_of_v = read(shared), read(mixed)
            for name in w:
                if name in names:
                    w[name] = descended(world, r, name, w[name], g[name], velocities[0])
                    v[name] = descended(world, r, name, v[name], h[name], velocities[1])
                else:
                    w[name], v[name] = buffers_of_w[name], buffers_of_v[name]
    return w, v


def slope(world: World, module: nn.Module, i: int, batch: Tensor) -> State:
    """The gradient of the batch's loss, in the mode in which the module is."""
    x, y = samples(world, i)
    world.loss(module(x[batch]), y[batch]).backward()
    return {name: p.grad for name, p in module.named_parameters()}


def descended(world: World, r: int, name: str, value: Tensor, g: Tensor, velocity: State) -> Tensor:
    """One step of SGD of one parameter; `velocity` is brought up to date."""
    g = g + world.weight_decay * value
    velocity[name] = world.momentum * velocity[name] + g if name in velocity else g
    with torch.no_grad():
        return value - world.lr(r) * velocity[name]
