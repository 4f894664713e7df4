"""IFCA. Ghosh et al., NeurIPS 2020, Algorithm 1 with model averaging: several models, each client trains the best for it.

The server holds models theta_0, theta_1, ...: the initial one and further initialisations. In a round

    client i   j_i = argmin_j F_i(theta_j), over its whole training set in eval mode (of equal ones the first)
               w_i = theta_{j_i} after E epochs
    server     theta_j <- the plain mean of w_i over the participants with j_i = j; as it was where there are none

Afterwards client i predicts with the model that is best for it then.
"""

from __future__ import annotations

import torch

from .world import Result, State, World, average, copy, fresh, initial, samples, train, write


def run(world: World, clusters: int = 4) -> Result:
    models = [initial(world)] + [world.another(f"cluster {j}") for j in range(1, clusters)]
    chosen = []
    for r in range(world.rounds):
        members: list[list[State]] = [[] for _ in range(clusters)]
        chosen.append({})
        for i in world.participants(r):
            j = best(world, models, i)
            chosen[r][i] = j
            members[j].append(train(world, models[j], i, r))
        for j in range(clusters):
            if members[j]:
                models[j] = average(members[j], [1.0] * len(members[j]))
    clients = [copy(models[best(world, models, i)]) for i in range(world.clients)]
    return Result(server={}, clients=clients, extra={"models": models, "chosen": chosen})


def best(world: World, models: list[State], i: int) -> int:
    """The number of the model with the lowest loss on client i's training set."""
    losses = [loss(world, w, i) for w in models]
    return losses.index(min(losses))


def loss(world: World, w: State, i: int) -> float:
    module = fresh(world)
    write(module, w)
    x, y = samples(world, i)
    with torch.no_grad():
        return float(world.loss(module.eval()(x), y))
