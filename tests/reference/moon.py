"""MOON. Li, He and Song, CVPR 2021: FedAvg whose clients keep their features near those under the received model
and away from those under their own previous one.

    loss = CE + mu * mean of -log( e(cos(z, z_glob)) / (e(cos(z, z_glob)) + e(cos(z, z_prev))) ),  e(s) = exp(s / tau)

z_glob and z_prev are the same samples' features under the model as received and under the client's model after
its last local training, both frozen and in eval mode. In its first participation a client has no previous model
and no such term.

`projection`: its width. z is then not the body's feature but what two linear layers with a ReLU between make of
it, "projection1" (d -> d) and "projection2" (d -> projection), and a "classifier" on z stands in place of the head.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from .world import Result, World, average, copy, fresh, initial, size, train, write

FLOOR = 1e-8


class Projected(nn.Module):
    """The network with its projection, if it has one. Its output is the logits, z, and z under each teacher."""

    def __init__(self, network: nn.Module, added: dict[str, nn.Linear], teachers: list[nn.Module]):
        super().__init__()
        self.body = network.body
        self.projects = bool(added)
        if added:
            self.projection1, self.projection2 = added["projection1"], added["projection2"]
            self.classifier = added["classifier"]
        else:
            self.head = network.head
        self.teachers = list(teachers)  # a list is no child: teachers are neither trained nor part of the state

    def feature(self, x: Tensor) -> Tensor:
        z = self.body(x)
        return self.projection2(torch.relu(self.projection1(z))) if self.projects else z

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        z = self.feature(x)
        with torch.no_grad():
            others = [teacher.feature(x) for teacher in self.teachers]
        return (self.classifier(z) if self.projects else self.head(z)), z, others


def run(world: World, mu: float = 1.0, tau: float = 0.5, projection: int | None = None) -> Result:
    def objective(outputs: tuple[Tensor, Tensor, list[Tensor]], y: Tensor) -> Tensor:
        logits, z, others = outputs
        loss = world.loss(logits, y)
        return loss + mu * contrastive(z, *others, tau) if others else loss

    def with_teachers(teachers: list[nn.Module]) -> World:
        network = lambda: Projected(world.module(), layers(world, projection), teachers)
        return dataclasses.replace(world, module=network, loss=objective)

    def frozen(state) -> nn.Module:
        module = fresh(with_teachers([]))
        write(module, state)
        return module.eval()

    server = initial(with_teachers([]))
    previous = [None] * world.clients
    for r in range(world.rounds):
        uploads, weights = [], []
        for i in world.participants(r):
            teachers = [] if previous[i] is None else [frozen(server), frozen(previous[i])]
            w = train(with_teachers(teachers), server, i, r)
            previous[i] = copy(w)
            uploads.append(w)
            weights.append(size(world, i))
        server = average(uploads, weights)
    return Result(server=server, clients=[copy(server) for _ in range(world.clients)], extra={"previous": previous})


def layers(world: World, projection: int | None) -> dict[str, nn.Linear]:
    """The layers that the projection needs, with their initial weights."""
    if projection is None:
        return {}
    d = world.module().head.in_features
    shapes = {"projection1": (d, d), "projection2": (d, projection), "classifier": (projection, world.classes)}
    found = {}
    for name, (inputs, outputs) in shapes.items():
        weight, bias = world.linear(name, inputs, outputs)
        layer = nn.Linear(inputs, outputs).double()
        write(layer, {"weight": weight, "bias": bias})
        found[name] = layer
    return found


def contrastive(z: Tensor, received: Tensor, previous: Tensor, tau: float) -> Tensor:
    """The mean of the contrastive term over one batch of features [B, d]."""
    total = torch.zeros((), dtype=z.dtype)
    for row, positive, negative in zip(z, received, previous, strict=True):
        near, far = cosine(row, positive) / tau, cosine(row, negative) / tau
        total = total + torch.logsumexp(torch.stack([near, far]), 0) - near
    return total / len(z)


def cosine(u: Tensor, v: Tensor) -> Tensor:
    return u @ v / (u.norm().clamp_min(FLOOR) * v.norm().clamp_min(FLOOR))
