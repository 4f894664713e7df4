"""FedLAG. "Towards Layer-wise Personalized Federated Learning: Adaptive Layer Disentanglement via Conflicting
Gradients", Algorithms 1 and 2: any method that averages models, where the clients keep the layers whose
updates conflict most.

    h[l,u] = layer l as client u returned it - layer l as u started from it                           eq. 2
    GC(l) = the number of pairs u < v of participants with cos(h[l,u], h[l,v]) < xi                   eq. 3
    L_p = the k layers of highest GC among those with GC > 0; the earlier layer on a tie        Algorithm 2

A layer is a module that owns parameters: all of them together, and its buffers, which take no part in the
angle. In round r + 1 a client takes the layers in L_p of round r from what it last returned itself, whenever
that was; a client that never took part takes the server's, as everybody does for all other layers. The server
always averages all layers.

- The first `warmup` rounds, r = 0 ... warmup - 1, run the inner method unchanged: L_p is empty in all of them
  but the last, whose L_p acts in round r = warmup, the first that differs.
- scores: L_p of each "round" from its own GC; or, "warmup", from the sum of GC over the warm-up, for good.
- weights: after the warm-up the server's averages are weighted by n_i ("samples"), or "uniform" as in eq. 4.
- skip_norm: normalisation modules are never personal and their conflicts are not counted.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .world import Result, State, World, average, copy, fresh, initial, size, train, trainable

NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


def run(
    world: World,
    inner: str = "fedavg",
    k: int = 5,
    xi: float = -0.1,
    warmup: int = 30,
    scores: str = "round",
    weights: str = "samples",
    skip_norm: bool = False,
    mu: float = 0.01,
) -> Result:
    """`inner` is "fedavg", or "fedprox" with this mu, pulled to the model that the client starts from."""
    assert inner in ("fedavg", "fedprox")
    assert scores in ("round", "warmup")
    assert weights in ("samples", "uniform")
    layers = layer_names(fresh(world), skip_norm)
    angled = trainable(world)
    server = initial(world)
    last: dict[int, State] = {}  # what each client last returned
    personal: list[str] = []  # L_p of the round before
    counts: list[list[int]] = []
    decisions: list[list[str]] = []
    for r in range(world.rounds):
        updates, uploads, sizes = [], [], []
        for i in world.participants(r):
            start = assemble(server, last.get(i), personal)
            end = train(world, start, i, r, correct=proximal(start, mu) if inner == "fedprox" else None)
            updates.append({name: end[name] - start[name] for name in angled})
            uploads.append(end)
            sizes.append(size(world, i))
            last[i] = end
        uniform = weights == "uniform" and r >= warmup
        server = average(uploads, [1.0] * len(uploads) if uniform else sizes)
        counts.append([count_conflicts([flat(update, layer) for update in updates], xi) for layer in layers])
        if scores == "round" and r + 1 >= warmup:
            personal = top_layers(layers, counts[r], k)
        if scores == "warmup" and r + 1 == warmup:
            personal = top_layers(layers, [sum(column) for column in zip(*counts, strict=True)], k)
        decisions.append(personal)
    clients = [assemble(server, last.get(i), personal) for i in range(world.clients)]
    return Result(server, clients, {"layers": layers, "conflicts": torch.tensor(counts), "personal": decisions})


def proximal(start: State, mu: float) -> Callable[[str, Tensor], Tensor]:
    """What FedProx adds to the gradients."""
    return lambda name, w: mu * (w - start[name])


def layer_names(module: nn.Module, skip_norm: bool = False) -> list[str]:
    """The modules that own parameters, in the order of their definition."""
    names = []
    for name, layer in module.named_modules():
        if list(layer.parameters(recurse=False)) and not (skip_norm and isinstance(layer, NORMS)):
            names.append(name)
    return names


def belongs(name: str, layer: str) -> bool:
    """Whether the parameter or buffer `name` is one of the module `layer` itself."""
    return name.rpartition(".")[0] == layer


def flat(update: State, layer: str) -> Tensor:
    """The layer's entries, weight and bias together, as one vector."""
    return torch.cat([tensor.flatten() for name, tensor in update.items() if belongs(name, layer)])


def assemble(server: State, own: State | None, personal: list[str]) -> State:
    """The model that a client works with: its own personal layers if it has any, else the server's."""
    w = copy(server)
    if own is not None:
        for name in w:
            if any(belongs(name, layer) for layer in personal):
                w[name] = own[name].clone()
    return w


def count_conflicts(updates: list[Tensor], xi: float) -> int:
    """GC of one layer: pairs whose cosine is under xi. A zero update has no angle: no conflict."""
    count = 0
    for u in range(len(updates)):
        for v in range(u + 1, len(updates)):
            length = float(updates[u].norm()) * float(updates[v].norm())
            if length > 0 and float((updates[u] * updates[v]).sum()) / length < xi:
                count += 1
    return count


def top_layers(layers: list[str], counts: list[int], k: int) -> list[str]:
    """The k layers with the highest counts, none whose count is 0, in the order of the network."""
    left = {layer: count for layer, count in zip(layers, counts, strict=True) if count > 0}
    chosen = []
    while left and len(chosen) < k:
        best = max(left, key=left.__getitem__)  # the first of the highest
        chosen.append(best)
        del left[best]
    return [layer for layer in layers if layer in chosen]
