"""FedCAC. Wu et al., ICCV 2023: each client's critical parameters are averaged only with clients whose critical
parameters lie in the same places; all others follow the global model.

A client trains from w0 to w. In every tensor the int(tau * numel) largest of |(w - w0) * w| are critical, the
ties of the last one too, zeros never: M_i. Between the participants of round t = 0, 1, ...

    O_ij = 1 - |M_i - M_j| / (2 |M_i|), 0 where M_i is empty
    threshold = avg + (t + 1) / beta * (max - avg),  avg and max over all ordered pairs i != j
    custom_i = the plain mean of w_i and of the w_j with O_ij >= threshold - 1e-9

A client starts with, and predicts with, custom_i where M_i and the global model elsewhere, both of its last
participation but the global model newest. Parameters alone are masked; buffers are the global ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .world import Result, State, World, average, copy, initial, size, train, trainable

SLACK = 1e-9


def run(world: World, tau: float = 0.5, beta: int = 100) -> Result:
    names = trainable(world)
    server = initial(world)
    masks = [{name: torch.zeros_like(server[name], dtype=torch.bool) for name in names} for _ in range(world.clients)]
    custom = [initial(world) for _ in range(world.clients)]
    overlaps = torch.zeros(0, 0).double()
    for t in range(world.rounds):
        ids = world.participants(t)
        models = {}
        for i in ids:
            received = combined(server, custom[i], masks[i])
            models[i] = train(world, received, i, t)
            masks[i] = critical(received, models[i], names, tau)
        overlaps = torch.tensor([[overlap(masks[i], masks[j]) for j in ids] for i in ids], dtype=torch.float64)
        bar = threshold(overlaps, t, beta)
        for a, i in enumerate(ids):
            partners = [j for b, j in enumerate(ids) if b == a or overlaps[a, b] >= bar - SLACK]
            custom[i] = average([models[j] for j in partners], [1.0] * len(partners))
        server = average([models[i] for i in ids], [size(world, i) for i in ids])
    clients = [combined(server, custom[i], masks[i]) for i in range(world.clients)]
    custom = [{name: w[name] for name in names} for w in custom]
    return Result(server, clients, {"mask": masks, "custom": custom, "overlap": overlaps})


def combined(server: State, custom: State, mask: State) -> State:
    """custom where the mask is set, the global model elsewhere."""
    w = copy(server)
    for name in mask:
        w[name] = torch.where(mask[name], custom[name], server[name])
    return w


def critical(before: State, after: State, names: list[str], tau: float) -> State:
    """M: where a tensor's sensitivity is among its largest."""
    masks = {}
    for name in names:
        s = ((after[name] - before[name]) * after[name]).abs()
        k = int(tau * s.numel())
        if k == 0:
            masks[name] = torch.zeros_like(s, dtype=torch.bool)
            continue
        kth = sorted(s.flatten().tolist(), reverse=True)[k - 1]
        masks[name] = (s >= kth) & (s > 0)
    return masks


def overlap(one: State, other: State) -> float:
    """O_ij: 1 where all critical places of i, and no more, are j's."""
    mine = sum(int(mask.sum()) for mask in one.values())
    differing = sum(int((one[name] != other[name]).sum()) for name in one)
    return 1 - differing / (2 * mine) if mine else 0.0


def threshold(overlaps: Tensor, t: int, beta: int) -> float:
    pairs = [float(overlaps[a, b]) for a in range(len(overlaps)) for b in range(len(overlaps)) if a != b]
    if not pairs:
        return float("inf")
    mean = sum(pairs) / len(pairs)
    return mean + (t + 1) / beta * (max(pairs) - mean)
