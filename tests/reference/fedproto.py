"""FedProto. Tan et al., AAAI 2022: models never leave the clients, only the mean features of classes do.

    loss = CE + lam * mean over the batch of  known[y] * mean over dimensions of (z - P_y)^2

P_c is the received prototype of class c and z = body(x). Each participant continues its own model and then,
in one pass in eval mode, takes the feature sums and counts of its classes. A class's new prototype is

    "count":  the sum of all those sums over the sum of the counts, the mean of the pooled samples
    "plain":  the mean of the participants' class means, each alike

over the participants that hold the class; where there is none, the old one stays. Nothing is known at first.
With predict="prototype" a client answers the nearest prototype among the classes that it holds and that are
known, the scores being minus the squared distances, and with its head while there are none. Its state then
has the entries "prototype" [C, d] and "held" [C] beside the model's.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from .world import Result, State, World, copy, fresh, initial, samples, train, write


class Featured(nn.Module):
    """The network, giving its logits and its features."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.body, self.head = network.body, network.head

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.body(x)
        return self.head(z), z


def run(world: World, lam: float = 1.0, aggregate: str = "count", predict: str = "prototype") -> Result:
    models = [initial(world) for _ in range(world.clients)]
    prototype, known = unknown(world)
    for r in range(world.rounds):
        sums, counts = [], []
        for i in world.participants(r):
            models[i] = train(aligned(world, lam, prototype, known), models[i], i, r)
            total, count = class_sums(world, models[i], i)
            sums.append(total)
            counts.append(count)
        prototype, known = prototypes(prototype, known, sums, counts, aggregate)
    extra = {"prototype": prototype, "known": known}
    if predict == "head":
        return Result(server={}, clients=models, extra=extra)
    clients = []
    for i in range(world.clients):
        held = known & (torch.bincount(samples(world, i)[1], minlength=world.classes) > 0)
        clients.append({**copy(models[i]), "prototype": prototype.clone(), "held": held.double()})
    extra["logits"] = [logits(world, w, samples(world, i)[0]) for i, w in enumerate(clients)]
    return Result(server={}, clients=clients, extra=extra)


def unknown(world: World) -> tuple[Tensor, Tensor]:
    """The table before the first round: zeros [C, d], and nothing known [C]."""
    d = fresh(world).head.in_features
    return torch.zeros(world.classes, d).double(), torch.zeros(world.classes, dtype=torch.bool)


def aligned(world: World, lam: float, prototype: Tensor, known: Tensor) -> World:
    """The world whose loss draws features to their classes' prototypes."""

    def objective(outputs: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        scores, z = outputs
        return world.loss(scores, y) + lam * distance(z, y, prototype, known)

    return dataclasses.replace(world, module=lambda: Featured(world.module()), loss=objective)


def distance(z: Tensor, y: Tensor, prototype: Tensor, known: Tensor) -> Tensor:
    """The mean over all samples, to which those of classes not known add nothing."""
    total = torch.zeros((), dtype=z.dtype)
    for row, label in zip(z, y, strict=True):
        if known[label]:
            total = total + ((row - prototype[label]) ** 2).mean()
    return total / len(y)


def features(world: World, w: State, x: Tensor) -> Tensor:
    """body(x) in eval mode; w may have more entries than the network."""
    module = fresh(world)
    write(module, {name: tensor for name, tensor in w.items() if name.startswith(("body.", "head."))})
    with torch.no_grad():
        return module.eval().body(x)


def class_sums(world: World, w: State, i: int) -> tuple[Tensor, Tensor]:
    """The sums [C, d] of client i's features by class, and how many they are [C]."""
    x, y = samples(world, i)
    z = features(world, w, x)
    total, count = torch.zeros(world.classes, z.shape[1]).double(), torch.zeros(world.classes).double()
    for row, label in zip(z, y, strict=True):
        total[label] += row
        count[label] += 1
    return total, count


def prototypes(
    before: Tensor, known: Tensor, sums: list[Tensor], counts: list[Tensor], aggregate: str = "count"
) -> tuple[Tensor, Tensor]:
    """The server's new table, and which classes it has."""
    after, known = before.clone(), known.clone()
    for c in range(len(after)):
        held = [(total[c], count[c]) for total, count in zip(sums, counts, strict=True) if count[c] > 0]
        if not held:
            continue
        known[c] = True
        if aggregate == "count":
            after[c] = sum(total for total, _ in held) / sum(count for _, count in held)
        elif aggregate == "plain":
            after[c] = sum(total / count for total, count in held) / len(held)
        else:
            raise ValueError(aggregate)
    return after, known


def logits(world: World, w: State, x: Tensor) -> Tensor:
    """The scores of a client's personal state with a prototype table."""
    z, held = features(world, w, x), w["held"] > 0
    if not held.any():
        return z @ w["head.weight"].T + w["head.bias"]
    scores = torch.full((len(z), len(held)), torch.finfo(z.dtype).min, dtype=z.dtype)
    for c in range(len(held)):
        if held[c]:
            scores[:, c] = -((z - w["prototype"][c]) ** 2).sum(1)
    return scores
