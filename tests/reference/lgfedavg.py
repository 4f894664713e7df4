"""LG-FedAvg. Liang et al., arXiv 2001.01523, 2020: private lower layers, shared upper ones, trained together.

A layer is a module that owns parameters, with its buffers. "top": the last `layers` of them are shared and all
others private. "bottom": the last `layers` are private and all others shared, which with one is FedPer.
"""

from __future__ import annotations

from torch import nn

from .world import Result, World, average, copy, fresh, initial, read, size, train


def run(world: World, shared: str = "top", layers: int = 1) -> Result:
    assert shared in ("top", "bottom")
    start = initial(world)
    top = top_names(fresh(world), layers)
    shared_names = [name for name in start if (name in top) == (shared == "top")]
    own_names = [name for name in start if name not in shared_names]
    server = {name: start[name].clone() for name in shared_names}
    own = [{name: start[name].clone() for name in own_names} for _ in range(world.clients)]
    for r in range(world.rounds):
        uploads, weights = [], []
        for i in world.participants(r):
            w = train(world, {**server, **own[i]}, i, r)
            own[i] = {name: w[name] for name in own_names}
            uploads.append({name: w[name] for name in shared_names})
            weights.append(size(world, i))
        server = average(uploads, weights)
    return Result(server=server, clients=[{**copy(server), **own[i]} for i in range(world.clients)])


def top_names(module: nn.Module, count: int) -> list[str]:
    """All names of the last `count` modules that own parameters, in the order in which they are defined."""
    owners = [name for name, layer in module.named_modules() if list(layer.parameters(recurse=False))]
    chosen = owners[max(0, len(owners) - count) :]
    return [name for name in read(module) if name.rpartition(".")[0] in chosen]
