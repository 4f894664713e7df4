"""FedRoD. Chen and Chao, ICLR 2022: a generic head trained with the balanced softmax, and beside it a personal head
that learns what the generic one lacks.

    g = head(z),  z = body(x)
    loss = CE(g + gamma log n_i, y) + CE(stop(g) + personal(stop(z)), y)

n_i are the client's training samples per class; a class that it lacks has probability 0 in the first term. Body
and head learn from the first term alone, the personal head from the second; the former are averaged, the latter
never sent. `personal_init`: it starts as a "copy" of the initial head, or as "zero". A client predicts with
head(z) + personal(z).

`hyper`: a hidden width. The personal head is then made by a shared and averaged network out of the client's class
frequencies: "hyper1" (C -> hyper), ReLU, "hyper2" (hyper -> C d + C), which gives the weight row by row and then the
bias.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from .world import Result, State, World, average, copy, fresh, initial, part, samples, size, train, write


class TwoHeads(nn.Module):
    """The network and its personal head. The output is g and what the personal head makes of stop(z)."""

    def __init__(self, network: nn.Module, start: str):
        super().__init__()
        self.body, self.head = network.body, network.head
        self.personal = nn.Linear(self.head.in_features, self.head.out_features).double()
        write(self.personal, {name: w * (start == "copy") for name, w in self.head.state_dict().items()})

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.body(x)
        return self.head(z), self.personal(z.detach())


class Hyper(nn.Module):
    """The same with the personal head made from the class frequencies `a`."""

    def __init__(self, network: nn.Module, added: list[tuple[Tensor, Tensor]], a: Tensor):
        super().__init__()
        self.body, self.head = network.body, network.head
        self.hyper1, self.hyper2 = (nn.Linear(*weight.T.shape).double() for weight, _ in added)
        for layer, (weight, bias) in zip((self.hyper1, self.hyper2), added, strict=True):
            write(layer, {"weight": weight, "bias": bias})
        self.frequencies = [a]  # a list is no part of the state

    def made(self) -> tuple[Tensor, Tensor]:
        classes, d = self.head.weight.shape
        numbers = self.hyper2(torch.relu(self.hyper1(self.frequencies[0])))
        return numbers[: classes * d].reshape(classes, d), numbers[classes * d :]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.body(x)
        weight, bias = self.made()
        return self.head(z), z.detach() @ weight.T + bias


def run(world: World, gamma: float = 1.0, personal_init: str = "copy", hyper: int | None = None) -> Result:
    assert personal_init in ("copy", "zero")

    def seen_by(i: int) -> World:
        """The world in which client i trains: its two heads, and the loss with its class counts."""
        count = counts(world, i)

        def objective(outputs: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
            g, own = outputs
            return balanced(world, g, y, count, gamma) + world.loss(g.detach() + own, y)

        if hyper is None:
            return dataclasses.replace(world, module=lambda: TwoHeads(world.module(), personal_init), loss=objective)
        classes, d = world.module().head.weight.shape
        shapes = {"hyper1": (classes, hyper), "hyper2": (hyper, classes * d + classes)}
        added = [world.linear(name, *shape) for name, shape in shapes.items()]
        return dataclasses.replace(
            world, module=lambda: Hyper(world.module(), added, count / count.sum()), loss=objective
        )

    start = initial(seen_by(0))
    own = [part(start, "personal.") for _ in range(world.clients)]
    server = {name: w for name, w in start.items() if not name.startswith("personal.")}
    for r in range(world.rounds):
        uploads, weights = [], []
        for i in world.participants(r):
            w = train(seen_by(i), {**server, **own[i]}, i, r)
            own[i] = part(w, "personal.")
            uploads.append({name: w[name] for name in server})
            weights.append(size(world, i))
        server = average(uploads, weights)
    if hyper is not None:
        own = [generated(seen_by(i), server) for i in range(world.clients)]
    network = {**part(server, "body."), **part(server, "head.")}
    return Result(server=server, clients=[{**copy(network), **own[i]} for i in range(world.clients)])


def counts(world: World, i: int) -> Tensor:
    """Client i's training samples per class. [C]"""
    y = samples(world, i)[1]
    return torch.tensor([float((y == c).sum()) for c in range(world.classes)], dtype=torch.float64)


def balanced(world: World, g: Tensor, y: Tensor, count: Tensor, gamma: float) -> Tensor:
    """The balanced softmax loss: a class without samples is left out of the softmax, unless gamma is 0."""
    if gamma == 0:
        return world.loss(g, y)
    present = count > 0
    place = torch.cumsum(present, 0) - 1  # a class's place among those that are there
    return world.loss(g[:, present] + gamma * count[present].log(), place[y])


def generated(world: World, server: State) -> State:
    """The personal head that the client of this world makes with the newest hypernetwork."""
    module = fresh(world)
    write(module, server)
    weight, bias = module.made()
    return {"personal.weight": weight.detach().clone(), "personal.bias": bias.detach().clone()}


def logits(module: nn.Module, personal: State, x: Tensor) -> Tensor:
    """What a client predicts with."""
    z = module.body(x)
    return module.head(z) + z @ personal["personal.weight"].T + personal["personal.bias"]
