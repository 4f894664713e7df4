"""Per-FedAvg. Fallah, Mokhtari and Ozdaglar, NeurIPS 2020: an initial model that is good after one step of SGD.

Each step takes 2 ("fo") or 3 ("hf", "exact") batches D, D', D'' in a row:

    w~ = w - alpha g(w; D),  v = g(w~; D')
    fo:     w <- w - beta v
    hf:     w <- w - beta (v - alpha d),  d = (g(w + delta v; D'') - g(w - delta v; D'')) / (2 delta)
    exact:  the same with d = H(w; D'') v

g(w; B) is the gradient of the batch's loss plus weight_decay w, at whichever point, and H its derivative. alpha is
the round's learning rate and beta a tenth of it unless given. A client goes through world.epochs epochs, and through
more where those do not make one step; batches that are left over at the end are not used.

All passes are in train mode, but running statistics are moved by the pass at w~ on D' alone. The mean is uniform, or
"samples". A client predicts with w^t after one step of size alpha on the first batch of order 8, an ordinary one:
that pass moves the statistics of the copy.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .world import Result, State, World, average, fresh, initial, read, samples, size, trainable, write

ADAPTATION_ORDER = 8


def run(
    world: World,
    variant: str = "fo",
    alpha: float | None = None,
    beta: float | None = None,
    delta: float = 1e-3,
    weights: str = "uniform",
) -> Result:
    assert variant in ("fo", "hf", "exact")
    assert weights in ("uniform", "samples")
    if world.momentum != 0:
        raise ValueError("the outer step is plain")
    names = trainable(world)
    inner = lambda r: world.lr(r) if alpha is None else alpha
    outer = lambda r: 0.1 * world.lr(r) if beta is None else beta
    server = initial(world)
    for r in range(world.rounds):
        participants = world.participants(r)
        uploads = [local(world, server, i, r, variant, inner(r), outer(r), delta) for i in participants]
        server = average(uploads, [size(world, i) if weights == "samples" else 1 for i in participants])
    adapted = []
    for i in range(world.clients):
        batch = world.batches(i, world.rounds, ADAPTATION_ORDER, 0)[0]
        g, moved = gradient(world, server, i, batch)
        adapted.append(stepped(moved, names, inner(world.rounds), g))
    return Result(server=server, clients=adapted)


def local(world: World, start: State, i: int, r: int, variant: str, alpha: float, beta: float, delta: float) -> State:
    """Client i's outer steps in round r."""
    names = trainable(world)
    w = start
    for batches in groups(world, i, r, 2 if variant == "fo" else 3):
        g, _ = gradient(world, w, i, batches[0])
        v, moved = gradient(world, stepped(w, names, alpha, g), i, batches[1])
        if variant == "fo":
            change = v
        else:
            d = (
                difference(world, w, v, i, batches[2], delta)
                if variant == "hf"
                else product(world, w, v, i, batches[2])
            )
            change = {name: v[name] - alpha * d[name] for name in names}
        w = {name: w[name] - beta * change[name] if name in change else moved[name] for name in w}
    return w


def groups(world: World, i: int, r: int, count: int) -> list[list[Tensor]]:
    """The batches of each step."""
    stream, epoch = [], 0
    while epoch < world.epochs or len(stream) < count:
        stream += world.batches(i, r, 0, epoch)
        epoch += 1
    return [stream[k : k + count] for k in range(0, len(stream) - count + 1, count)]


def gradient(world: World, w: State, i: int, batch: Tensor) -> tuple[State, State]:
    """g(w; batch) for every parameter, and the state after the pass, which differs from w in its buffers."""
    module = fresh(world)
    write(module, w)
    module.train()
    loss_of(world, module, i, batch).backward()
    g = {name: p.grad + world.weight_decay * p.detach() for name, p in module.named_parameters()}
    return g, read(module)


def loss_of(world: World, module: nn.Module, i: int, batch: Tensor) -> Tensor:
    x, y = samples(world, i)
    return world.loss(module(x[batch]), y[batch])


def stepped(w: State, names: list[str], rate: float, g: State) -> State:
    """w - rate * g; buffers are as they are in w."""
    return {name: w[name] - rate * g[name] if name in names else w[name].clone() for name in w}


def difference(world: World, w: State, v: State, i: int, batch: Tensor, delta: float) -> State:
    """The central difference of g at w along v."""
    ahead, _ = gradient(world, stepped(w, list(v), -delta, v), i, batch)
    behind, _ = gradient(world, stepped(w, list(v), delta, v), i, batch)
    return {name: (ahead[name] - behind[name]) / (2 * delta) for name in v}


def product(world: World, w: State, v: State, i: int, batch: Tensor) -> State:
    """The Hessian at w times v, by differentiating twice."""
    module = fresh(world)
    write(module, w)
    module.train()
    parameters = dict(module.named_parameters())
    first = torch.autograd.grad(loss_of(world, module, i, batch), list(parameters.values()), create_graph=True)
    along = sum((g * v[name]).sum() for name, g in zip(parameters, first, strict=True))
    second = torch.autograd.grad(along, list(parameters.values()), allow_unused=True)
    return {
        name: (torch.zeros_like(v[name]) if h is None else h) + world.weight_decay * v[name]
        for name, h in zip(parameters, second, strict=True)
    }
