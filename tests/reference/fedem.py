"""FedEM. Marfoq et al., NeurIPS 2021, Algorithms 1 and 2: shared components, each client a mixture of them of its own.

The server holds theta_1, ..., theta_M: the initial model and further initialisations. Client i keeps pi_i, 1/M each at
first. In a round, with l_m(k) = loss of the received theta_m on its sample k, in eval mode,

    E-step   q_k(m) = pi_m exp(-l_m(k)) / sum over m' of pi_m' exp(-l_m'(k))
    M-step   pi_m = mean over its samples of q_k(m)
             w_m = theta_m after E epochs on the mean over a batch of q_k(m) loss_k, the same batches for every m
    server   theta_m <- mean of the w_m, weighted by n_i; buffers too

A client predicts sum over m of pi_m softmax(logits of theta_m).
Client states hold theta_1 as it is, the others as "component1.body...", ..., and "pi". [M]
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .world import Result, State, World, average, copy, fresh, initial, read, samples, size, write


def run(world: World, components: int = 3) -> Result:
    models = [initial(world)] + [world.another(f"component {m}") for m in range(1, components)]
    pi = [[1 / components] * components for _ in range(world.clients)]
    shares: list[dict[int, list[list[float]]]] = []  # q of every participant, round by round
    for r in range(world.rounds):
        uploads: list[list[State]] = [[] for _ in models]
        weights = []
        shares.append({})
        for i in world.participants(r):
            losses = [sample_losses(world, w, i) for w in models]
            q = responsibilities(pi[i], losses)
            pi[i] = [sum(row[m] for row in q) / len(q) for m in range(components)]
            shares[r][i] = q
            for m in range(components):
                uploads[m].append(train_weighted(world, models[m], i, r, [row[m] for row in q]))
            weights.append(float(size(world, i)))
        models = [average(of, weights) for of in uploads]
    clients = [mixture(models, pi[i]) for i in range(world.clients)]
    answers = [probabilities(world, models, pi[i], samples(world, i)[0]) for i in range(world.clients)]
    extra = {"models": models, "pi": pi, "q": shares, "probabilities": answers}
    return Result(server={}, clients=clients, extra=extra)


def sample_losses(world: World, w: State, i: int) -> list[float]:
    """The loss of each of client i's samples, in eval mode."""
    module = fresh(world)
    write(module, w)
    module.eval()
    x, y = samples(world, i)
    with torch.no_grad():
        return [float(world.loss(module(x[k : k + 1]), y[k : k + 1])) for k in range(len(y))]


def responsibilities(pi: list[float], losses: list[list[float]]) -> list[list[float]]:
    """The E-step: losses[m][k] to q[k][m]."""
    found = []
    for k in range(len(losses[0])):
        scores = [math.log(p) - of[k] if p > 0 else -math.inf for p, of in zip(pi, losses, strict=True)]
        top = max(scores)
        parts = [math.exp(s - top) for s in scores]
        found.append([part / sum(parts) for part in parts])
    return found


def train_weighted(world: World, start: State, i: int, r: int, q: list[float]) -> State:
    """E epochs of SGD on the mean over the batch of q_k loss_k."""
    module = fresh(world)
    write(module, start)
    module.train()
    x, y = samples(world, i)
    velocity: State = {}
    for epoch in range(world.epochs):
        for batch in world.batches(i, r, 0, epoch):
            module.zero_grad()
            outputs = module(x[batch])
            terms = [q[k] * world.loss(outputs[b : b + 1], y[k : k + 1]) for b, k in enumerate(batch.tolist())]
            (sum(terms) / len(terms)).backward()
            with torch.no_grad():
                for name, w in module.named_parameters():
                    g = w.grad + world.weight_decay * w
                    velocity[name] = world.momentum * velocity[name] + g if name in velocity else g
                    w.copy_(w - world.lr(r) * velocity[name])
    return read(module)


def mixture(models: list[State], pi: list[float]) -> State:
    """What a client predicts with."""
    found = copy(models[0])
    for m, w in enumerate(models[1:], 1):
        found |= {f"component{m}.{name}": tensor.clone() for name, tensor in w.items()}
    return {**found, "pi": torch.tensor(pi, dtype=torch.float64)}


def probabilities(world: World, models: list[State], pi: list[float], x: Tensor) -> Tensor:
    """sum over m of pi_m softmax(logits of theta_m), in eval mode. [B, C]"""
    found = torch.zeros(len(x), world.classes, dtype=torch.float64)
    for w, share in zip(models, pi, strict=True):
        module = fresh(world)
        write(module, w)
        module.eval()
        with torch.no_grad():
            scores = module(x).exp()
        found += share * scores / scores.sum(1, keepdim=True)
    return found
