"""FedBN. Li et al., ICLR 2021: FedAvg without the normalisation layers, whose parameters and running statistics
stay at each client.

A client that never took part predicts with the initial normalisation and everything else as received. Without such
layers nothing is private.
"""

from __future__ import annotations

from torch import nn

from .world import Result, World, average, copy, fresh, initial, read, size, train

NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


def run(world: World) -> Result:
    own_names = norm_names(fresh(world))
    start = initial(world)
    server = {name: start[name] for name in start if name not in own_names}
    own = [{name: start[name].clone() for name in own_names} for _ in range(world.clients)]
    for r in range(world.rounds):
        uploads, weights = [], []
        for i in world.participants(r):
            w = train(world, {**server, **own[i]}, i, r)
            own[i] = {name: w[name] for name in own_names}
            uploads.append({name: w[name] for name in server})
            weights.append(size(world, i))
        server = average(uploads, weights)
    return Result(server=server, clients=[{**copy(server), **own[i]} for i in range(world.clients)])


def norm_names(module: nn.Module) -> list[str]:
    """The names of all parameters and buffers of the normalisation layers."""
    found = [name for name, layer in module.named_modules() if isinstance(layer, NORMS)]
    return [name for name in read(module) if name.rpartition(".")[0] in found]
