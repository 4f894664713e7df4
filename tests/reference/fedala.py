"""FedALA. Zhang et al., AAAI 2023: before training, a client learns for every weight of its last layers how
much of the received model to take in place of its own.

    w_hat = w_i + (w^t - w_i) * A    in the last `layers` layers; the received weights elsewhere
    A <- clip to [0, 1] of  A - mix_lr * grad_{w_hat} F_i * (w^t - w_i)

w_i is the client's model as last trained (at first the initial one); A starts as ones and is kept. Nothing is
mixed in round 0. The first time that a client mixes it takes `first_epochs` epochs over a part `share` of its
samples, later one. Buffers are the received ones and the network is in eval mode while A is learnt. What a
client learns when it is only evaluated is thrown away. `start` is where A starts, for tests: 0 with mix_lr 0
keeps the layers private.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .world import Result, State, World, average, copy, fresh, initial, samples, size, train, write

MIXING_ORDER = 9


def run(
    world: World,
    mix_lr: float = 1.0,
    layers: int = 1,
    share: float = 0.8,
    first_epochs: int = 10,
    start: float = 1.0,
) -> Result:
    server = initial(world)
    names = last_layers(fresh(world), layers)
    own = [initial(world) for _ in range(world.clients)]
    mix = [{name: torch.full_like(server[name], start) for name in names} for _ in range(world.clients)]
    mixed_before = [False] * world.clients

    def prepare(i: int, r: int) -> tuple[State, State]:
        """The model that client i starts round r with, and the mixing weights behind it."""
        if r == 0:
            return copy(server), copy(mix[i])
        epochs = 1 if mixed_before[i] else first_epochs
        learnt = learn(world, i, r, server, own[i], mix[i], mix_lr, share, epochs)
        return blend(server, own[i], learnt), learnt

    for r in range(world.rounds):
        uploads, weights = [], []
        for i in world.participants(r):
            w, learnt = prepare(i, r)
            w = train(world, w, i, r, order=0)
            uploads.append(w)
            weights.append(size(world, i))
            own[i], mix[i] = copy(w), learnt
            mixed_before[i] = mixed_before[i] or r > 0
        server = average(uploads, weights)
    predicting = [prepare(i, world.rounds)[0] for i in range(world.clients)]
    return Result(server=server, clients=predicting, extra={"mix": mix})


def last_layers(module: nn.Module, count: int) -> list[str]:
    """The parameter names of the last `count` modules that own parameters, as defined in order."""
    owners = [name for name, layer in module.named_modules() if list(layer.parameters(recurse=False))]
    chosen = owners[max(0, len(owners) - count) :]
    return [name for name, _ in module.named_parameters() if name.rpartition(".")[0] in chosen]


def blend(received: State, own: State, mix: State) -> State:
    """w_hat: mixed where `mix` has a weight, the received model everywhere else."""
    w = copy(received)
    for name, a in mix.items():
        w[name] = own[name] + (received[name] - own[name]) * a
    return w


def learn(
    world: World,
    i: int,
    r: int,
    received: State,
    own: State,
    mix: State,
    mix_lr: float,
    share: float,
    epochs: int,
) -> State:
    """The mixing weights after `epochs` epochs of plain SGD: no momentum, no weight decay."""
    mix = copy(mix)
    x, y = samples(world, i)
    for epoch in range(epochs):
        for batch in world.batches(i, r, MIXING_ORDER, epoch, share=share):
            gradient = gradients(world, blend(received, own, mix), x[batch], y[batch])
            for name in mix:
                step = gradient[name] * (received[name] - own[name])
                mix[name] = (mix[name] - mix_lr * step).clamp(0, 1)
    return mix


def gradients(world: World, w: State, x: Tensor, y: Tensor) -> State:
    """The gradient of the batch's loss with respect to every parameter, at w, in eval mode."""
    module = fresh(world)
    write(module, w)
    module.eval()
    world.loss(module(x), y).backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}
