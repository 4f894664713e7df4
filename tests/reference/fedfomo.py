"""FedFomo. Zhang et al., ICLR 2021: before training, a client takes from a few others' models what helps on samples
that it held out.

    omega_n = (L(old_i) - L(w_n)) / (||w_n - old_i|| + 1e-5),  L = the mean loss on the held-out part
    start = sum over n of omega+_n w_n,  omega+_n = max(omega_n, 0) / sum of the max(., 0)

The candidates w_n are the client's own w_i, as it last trained it, and at most `models` - 1 others; old_i is the
model that w_i was trained from. If no weight is positive, or nothing is held out, the start is w_i (fallback "own")
or old_i ("old"). Then old_i <- start, and w_i is trained from it on the training part, a `share` of the samples.
Norms are of parameters; models are mixed with their buffers, and judged in eval mode.

The server keeps everybody's last upload, and preferences P, the identity at first, to which each participant's
omega_n are added. In round r client i is sent models of clients that took part in round r - 1: with probability
explore - explore_decay r random ones, else those of highest P[i, n], ties at random.

A client predicts with w_i. There is no global model.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from .world import Result, State, World, copy, fresh, initial, samples, train, trainable, write

FLOOR = 1e-5


def run(
    world: World,
    models: int = 5,
    explore: float = 0.3,
    explore_decay: float = 0.05,
    share: float = 0.8,
    fallback: str = "own",
) -> Result:
    assert fallback in ("own", "old")
    own = [initial(world) for _ in range(world.clients)]
    old = [initial(world) for _ in range(world.clients)]
    P = torch.eye(world.clients, dtype=torch.float64)
    uploads: dict[int, State] = {}
    before: list[int] = []  # who took part in the round before
    for r in range(world.rounds):
        participants = world.participants(r)
        rate = max(0.0, explore - explore_decay * r)
        sent = {i: partners(world, r, i, [n for n in before if n != i], P[i], models - 1, rate) for i in participants}
        known = dict(uploads)
        for i in participants:
            candidates = {i: own[i], **{n: known[n] for n in sent[i]}}
            omega = judged(world, i, share, old[i], candidates)
            for n, value in omega.items():
                P[i, n] += value
            start = combined(candidates, omega)
            if start is None:
                start = copy(own[i] if fallback == "own" else old[i])
            old[i] = start
            own[i] = train(training_part(world, i, share), start, i, r)
            uploads[i] = copy(own[i])
        before = participants
    return Result(server={}, clients=own, extra={"P": P, "old": old})


def partners(world: World, r: int, i: int, available: list[int], liking, count: int, rate: float) -> list[int]:
    """The clients whose models client i is sent, ascending."""
    draw = world.draw("explore", r, i)
    u = draw.random()
    order = [available[k] for k in draw.permutation(len(available))]
    if u >= rate:
        order = sorted(order, key=lambda n: -float(liking[n]))  # stable: equals stay in their random order
    return sorted(order[:count])


def judged(world: World, i: int, share: float, old: State, candidates: dict[int, State]) -> dict[int, float]:
    """omega of every candidate; 0 where nothing is held out."""
    x, y = samples(world, i)
    _, held_out = world.split(i, share)
    if len(held_out) == 0:
        return dict.fromkeys(candidates, 0.0)

    def loss(state: State) -> float:
        module = fresh(world)
        write(module, state)
        with torch.no_grad():
            return float(world.loss(module.eval()(x[held_out]), y[held_out]))

    names = trainable(world)
    found = {}
    for n, w in candidates.items():
        distance = math.sqrt(sum(float(((w[name] - old[name]) ** 2).sum()) for name in names))
        found[n] = (loss(old) - loss(w)) / (distance + FLOOR)
    return found


def combined(candidates: dict[int, State], omega: dict[int, float]) -> State | None:
    """The candidates' mean with the positive weights; None if there is no such weight."""
    positive = {n: max(value, 0.0) for n, value in omega.items()}
    total = sum(positive.values())
    if total == 0:
        return None
    names = next(iter(candidates.values()))
    return {name: sum(positive[n] / total * w[name] for n, w in candidates.items()) for name in names}


def training_part(world: World, i: int, share: float) -> World:
    """The world in which client i has its training part only, with batches of that part."""
    rows, _ = world.split(i, share)

    def data(client: int):
        assert client == i
        x, y = world.data(i)
        return x[rows], y[rows]

    def batches(client: int, r: int, order: int, epoch: int, share: float = 1.0):
        return world.batches(client, r, order, epoch, share=share, count=len(rows))

    return dataclasses.replace(world, data=data, batches=batches)
