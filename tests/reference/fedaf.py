"""FedAF. Wang et al., CVPR 2024: clients condense their data instead of sending models, and the server trains on that.

In a round, with C classes and the received model w:

    client i   w_i = gamma * w + (1 - gamma) * (another initialisation); buffers are w's
               V_i[c] = mean logits of its samples of class c under w_i                                    (sent first)
    server     V[c] = the plain mean of V_i[c] over those who hold c
    client i   S_i: ipc images for each of its classes, moved by `iterations` steps down the gradient of
                   sum over its c of  || mean feature of its real c - mean feature of S_i[c] ||^2
                                      + lam_loc * SWD(mean logits of S_i[c], V[c])                       under w_i
               R_i[c] = mean of softmax(logits / temperature) of its samples of class c under w    (sent with S_i)
    server     R[c] = the plain mean of R_i[c] over those who hold c; w is trained for `server_epochs` on all S_i with
                   CE + lam_glob / C * sum over the c in the batch of  (KL(R[c] || T[c]) + KL(T[c] || R[c])) / 2
               T[c] = mean of softmax(logits / temperature) over the batch's images of class c

SWD of two vectors is that of two point masses, the mean over all unit directions t of (t . (u - v))^2. Each image begins
as the mean of `averaged` samples of its class, drawn with replacement; afterwards S_i goes on from where it was.
Outside the server's training every network is in eval mode.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from .world import Result, State, World, copy, fresh, initial, samples, train, trainable, write

LEAST = 1e-8


def run(
    world: World,
    ipc: int = 50,
    iterations: int = 1000,
    image_lr: float = 1.0,
    image_momentum: float = 0.5,
    gamma: float = 0.9,
    lam_loc: float = 0.8,
    lam_glob: float = 0.8,
    temperature: float = 2.0,
    server_epochs: int = 500,
    averaged: int = 10,
    restart: bool = False,
) -> Result:
    server = initial(world)
    condensed: list[dict[int, Tensor]] = [{} for _ in range(world.clients)]  # class -> its images
    history = []
    for r in range(world.rounds):
        ids = world.participants(r)
        networks = {i: resampled(world, server, i, r, gamma) for i in ids}
        V = shared([by_class(world, i, logits(world, networks[i], i)) for i in ids])
        for i in ids:
            if restart or not condensed[i]:
                condensed[i] = begun(world, i, r, ipc, averaged)
            moved = condense(world, networks[i], i, condensed[i], V, iterations, image_lr, image_momentum, lam_loc)
            condensed[i] = moved
        R = shared([by_class(world, i, (logits(world, server, i) / temperature).softmax(1)) for i in ids])
        if ids:
            server = taught(world, server, r, [condensed[i] for i in ids], R, lam_glob, temperature, server_epochs)
        history.append({"V": V, "R": R})
    clients = [copy(server) for _ in range(world.clients)]
    return Result(server=server, clients=clients, extra={"condensed": condensed, "history": history})


def resampled(world: World, server: State, i: int, r: int, gamma: float) -> State:
    random = world.another(repr(("resampled", r, i)))
    names = set(trainable(world))
    return {k: gamma * v + (1 - gamma) * random[k] if k in names else v.clone() for k, v in server.items()}


def network(world: World, w: State) -> nn.Module:
    module = fresh(world)
    write(module, w)
    return module.eval().requires_grad_(False)


def logits(world: World, w: State, i: int) -> Tensor:
    return network(world, w)(samples(world, i)[0])


def by_class(world: World, i: int, values: Tensor) -> dict[int, Tensor]:
    """The mean of the values of client i's samples of each class that it has."""
    y = samples(world, i)[1]
    found = {}
    for c in range(world.classes):
        own = [values[k] for k in range(len(y)) if int(y[k]) == c]
        if own:
            found[c] = sum(own) / len(own)
    return found


def shared(told: list[dict[int, Tensor]]) -> dict[int, Tensor]:
    """The mean over those who told anything of a class."""
    found = {}
    for c in sorted({c for of in told for c in of}):
        values = [of[c] for of in told if c in of]
        found[c] = sum(values) / len(values)
    return found


def begun(world: World, i: int, r: int, ipc: int, averaged: int) -> dict[int, Tensor]:
    x, y = samples(world, i)
    draw = world.draw("condensed", r, i)
    found = {}
    for c in range(world.classes):
        own = [k for k in range(len(y)) if int(y[k]) == c]
        if own:
            chosen = draw.integers(len(own), size=(ipc, averaged))
            found[c] = torch.stack([sum(x[own[k]] for k in row) / averaged for row in chosen])
    return found


def condense(
    world: World,
    w: State,
    i: int,
    images: dict[int, Tensor],
    V: dict[int, Tensor],
    iterations: int,
    lr: float,
    momentum: float,
    lam: float,
) -> dict[int, Tensor]:
    module = network(world, w)
    real = by_class(world, i, module.body(samples(world, i)[0]))
    images = {c: x.clone() for c, x in images.items()}
    velocity: dict[int, Tensor] = {}
    for _ in range(iterations):
        for c, x in images.items():
            x = x.clone().requires_grad_()
            z = module.body(x)
            loss = ((z.mean(0) - real[c]) ** 2).sum() + lam * sliced(module.head(z).mean(0), V[c])
            (g,) = torch.autograd.grad(loss, x)
            velocity[c] = momentum * velocity[c] + g if c in velocity else g
            images[c] = (x - lr * velocity[c]).detach()
    return images


def sliced(u: Tensor, v: Tensor) -> Tensor:
    """The mean over all unit directions t of (t . (u - v))^2: that of one of n orthogonal directions, n times as many."""
    total = torch.zeros((), dtype=u.dtype)
    for a, b in zip(u, v, strict=True):
        total = total + (a - b) ** 2
    return total / len(u)


def taught(
    world: World,
    server: State,
    r: int,
    condensed: list[dict[int, Tensor]],
    R: dict[int, Tensor],
    lam: float,
    temperature: float,
    epochs: int,
) -> State:
    """The server's model after training on everybody's condensed images."""
    x = torch.cat([images[c] for images in condensed for c in sorted(images)])
    y = torch.tensor([c for images in condensed for c in sorted(images) for _ in images[c]])

    def objective(outputs: Tensor, labels: Tensor) -> Tensor:
        return world.loss(outputs, labels) + lam * matching(outputs, labels, R, temperature) / world.classes

    def batches(i: int, r: int, order: int, epoch: int) -> list[Tensor]:
        return world.batches(-1, r, order, epoch, count=len(y))

    own = dataclasses.replace(world, data=lambda i: (x, y), batches=batches, loss=objective)
    return train(own, server, -1, r, epochs=epochs)


def matching(outputs: Tensor, labels: Tensor, R: dict[int, Tensor], temperature: float) -> Tensor:
    """The sum over the batch's classes of the symmetric divergence of R[c] and T[c]."""
    total = torch.zeros((), dtype=outputs.dtype)
    for c in sorted(set(labels.tolist())):
        T = torch.stack(
            [(row / temperature).softmax(0) for row, y in zip(outputs, labels, strict=True) if y == c]
        ).mean(0)
        total = total + (divergence(R[c], T) + divergence(T, R[c])) / 2
    return total


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q), with logarithms of no less than LEAST."""
    return (p * (p.clamp(min=LEAST).log() - q.clamp(min=LEAST).log())).sum()
