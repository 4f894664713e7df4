"""FedAS. Yang, Huang and Ye, CVPR 2024: every client has a model of its own; only bodies are shared. A received
body is first aligned to the features that the client's own one gives, and bodies are averaged by Fisher
information.

A participant with the own model (phi_i, h_i), receiving the body phi,
  1. takes its class means P_c with phi_i in eval mode;
  2. trains phi (order 9, plain SGD of rate align_lr, train mode) by the sum over the batch's classes of the mean
     over that class's samples, and over dimensions, of (z - P_c)^2;
  3. continues with that body, its buffers too, and h_i;
  4. trains everything (order 0);
  5. takes T_i in eval mode, over all parameters: "batch", the sum over the batches of order 10 of the squared
     norm of the gradient of the batch's loss; "sample", the mean over samples of that of each one's loss.
The new shared body is the mean of phi_i weighted by T_i, or by n_i where the T_i are of no use. A client predicts
with its own model. `weigh` is for tests: T_i -> the weight in place of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .fedproto import class_sums
from .world import Result, State, World, average, fresh, initial, part, samples, size, train, write

ALIGN_ORDER, FISHER_ORDER = 9, 10


class Body(nn.Module):
    """The network, giving its features."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.body, self.head = network.body, network.head

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def run(
    world: World,
    align_lr: float = 0.01,
    align_epochs: int = 1,
    fisher: str = "batch",
    weigh: Callable[[float], float] = lambda T: T,
) -> Result:
    body = part(initial(world), "body.")
    models = [initial(world) for _ in range(world.clients)]
    T: dict[int, float] = {}
    for r in range(world.rounds):
        ids = world.participants(r)
        for i in ids:
            start = align(world, body, models[i], i, r, align_lr, align_epochs)
            models[i] = train(world, start, i, r, order=0)
        T = {i: information(world, models[i], i, r, fisher) for i in ids}
        body = average([part(models[i], "body.") for i in ids], weights(world, [weigh(T[i]) for i in ids], ids))
    return Result(body, models, {"T": T})


def align(world: World, body: State, own: State, i: int, r: int, align_lr: float, align_epochs: int) -> State:
    """Steps 1 to 3: the received body, aligned, with the own head."""
    total, count = class_sums(world, own, i)
    target = total / count.clamp(min=1)[:, None]
    aligning = dataclasses.replace(
        world,
        module=lambda: Body(world.module()),
        loss=lambda z, y: alignment(z, y, target),
        lr=lambda r: align_lr,
        momentum=0.0,
        weight_decay=0.0,
    )
    start = {**body, **part(own, "head.")}
    return train(aligning, start, i, r, only="body.", order=ALIGN_ORDER, epochs=align_epochs)


def alignment(z: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """The loss of step 2."""
    return sum(((z[y == c] - target[c]) ** 2).mean() for c in sorted(set(y.tolist())))


def information(world: World, w: State, i: int, r: int, fisher: str) -> float:
    """T_i."""
    if fisher == "batch":
        return sum(squared_gradient(world, w, i, batch) for batch in world.batches(i, r, FISHER_ORDER, 0))
    if fisher == "sample":
        n = size(world, i)
        return sum(squared_gradient(world, w, i, torch.tensor([k])) for k in range(n)) / n
    raise ValueError(fisher)


def squared_gradient(world: World, w: State, i: int, batch: Tensor) -> float:
    module = fresh(world)
    write(module, w)
    module.eval()
    x, y = samples(world, i)
    world.loss(module(x[batch]), y[batch]).backward()
    return sum(float((parameter.grad**2).sum()) for parameter in module.parameters())


def weights(world: World, T: list[float], ids: list[int]) -> list[float]:
    total = sum(T)
    return T if math.isfinite(total) and total > 0 else [float(size(world, i)) for i in ids]
