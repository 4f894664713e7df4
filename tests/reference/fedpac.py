"""FedPAC. Xu, Tong and Huang, ICLR 2023: features are aligned to global class centroids, and every client gets
the mixture of all classifiers that is best for it.

A participant has the received body, centroids c_k, and the mixed head that the server keeps for it. It
  1. takes, with that body in eval mode, its class means mu_k, H = [pi_k mu_k] and v (`statistics`);
  2. trains the head (order 0, rate `head_lr`, or the round's if that is None) on the frozen body;
  3. trains the body (order 1) under that head, with CE + lam * mean over batch and dimensions of (z - c_y)^2,
     where mu_y stands for a centroid not yet known; without the second term while none is known;
  4. sends body, head, H, v, and the class sums and counts of the trained body in eval mode.
Bodies are averaged, weighted by n_i; centroids are the means of the pooled samples. For each participant i

    alpha_i = argmin over the simplex of  sum_j (v_j + 1e-8) a_j^2 + sum_jl a_j a_l <H_i - H_j, H_i - H_l>

weights below 1e-3 are dropped, the rest divided by their sum, and sum_j alpha_ij h_j is i's mixed head. A
client that is away keeps its mixed head. `mix` replaces the weights, for tests: (i, H, v) -> alpha_i.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from .fedproto import Featured, class_sums, features, prototypes, unknown
from .world import Result, State, World, average, copy, initial, part, samples, size, train

RIDGE = 1e-8
LEAST = 1e-3


def run(
    world: World,
    lam: float = 1.0,
    head_lr: float | None = 0.1,
    head_epochs: int = 1,
    body_epochs: int | None = None,
    mix: Callable[[int, list[Tensor], list[float]], Tensor] | None = None,
) -> Result:
    mix = mix or (lambda i, H, v: trimmed(simplex_minimum(quadratic(i, H, v))))
    head_world = world if head_lr is None else dataclasses.replace(world, lr=lambda r: head_lr)
    body = part(initial(world), "body.")
    heads = [part(initial(world), "head.") for _ in range(world.clients)]
    centroid, known = unknown(world)
    alpha = torch.zeros(0, 0).double()
    for r in range(world.rounds):
        ids = world.participants(r)
        bodies, sent, sums, counts, H, v = [], [], [], [], [], []
        for i in ids:
            w = {**body, **heads[i]}
            means, Hi, vi = statistics(world, w, i)
            w = train(head_world, w, i, r, only="head.", order=0, epochs=head_epochs)
            w = train(aligned(world, lam, centroid, known, means), w, i, r, only="body.", order=1, epochs=body_epochs)
            total, count = class_sums(world, w, i)
            bodies.append(part(w, "body."))
            sent.append(part(w, "head."))
            sums.append(total)
            counts.append(count)
            H.append(Hi)
            v.append(vi)
        body = average(bodies, [size(world, i) for i in ids])
        centroid, known = prototypes(centroid, known, sums, counts)
        alpha = torch.stack([mix(a, H, v) for a in range(len(ids))])
        for a, i in enumerate(ids):
            heads[i] = mixture(sent, alpha[a])
    clients = [{**copy(body), **copy(heads[i])} for i in range(world.clients)]
    return Result(body, clients, {"prototype": centroid, "known": known, "alpha": alpha, "heads": heads})


def statistics(world: World, w: State, i: int) -> tuple[Tensor, Tensor, float]:
    """mu [C, d], H [C, d] and v of client i: rows of absent classes are zero. v is the variance of the mean of
    pi_k z, and so divided by n_i."""
    x, _ = samples(world, i)
    n = len(x)
    total, count = class_sums(world, w, i)
    means = total / count.clamp(min=1)[:, None]
    H = count[:, None] / n * means
    second = float((features(world, w, x) ** 2).sum()) / n  # sum over k of pi_k E|z|^2
    return means, H, max(0.0, (second - float((H**2).sum())) / n)


def aligned(world: World, lam: float, centroid: Tensor, known: Tensor, own: Tensor) -> World:
    """The world of step 3."""
    target = torch.where(known[:, None], centroid, own)

    def objective(outputs: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        scores, z = outputs
        loss = world.loss(scores, y)
        return loss + lam * ((z - target[y]) ** 2).mean() if known.any() else loss

    return dataclasses.replace(world, module=lambda: Featured(world.module()), loss=objective)


def quadratic(i: int, H: list[Tensor], v: list[float]) -> Tensor:
    """Q of client i: alpha' Q alpha is what its weights minimise."""
    Q = torch.zeros(len(v), len(v)).double()
    for j in range(len(v)):
        for k in range(len(v)):
            Q[j, k] = ((H[i] - H[j]) * (H[i] - H[k])).sum()
        Q[j, j] += v[j] + RIDGE
    return Q


def simplex_minimum(Q: Tensor) -> Tensor:
    """The minimiser of a' Q a over the simplex: of all supports, each with its own minimiser of sum one, the
    best whose entries are not negative."""
    m = len(Q)
    best, least = torch.zeros(m).double(), float("inf")
    for count in range(1, m + 1):
        for support in itertools.combinations(range(m), count):
            rows = list(support)
            direction = torch.linalg.solve(Q[rows][:, rows], torch.ones(count).double())
            a = torch.zeros(m).double()
            a[rows] = direction / direction.sum()
            if (a >= 0).all() and float(a @ Q @ a) < least:
                best, least = a, float(a @ Q @ a)
    return best


def trimmed(alpha: Tensor) -> Tensor:
    kept = torch.where(alpha < LEAST, 0.0, alpha)
    return kept / kept.sum()


def mixture(heads: list[State], alpha: Tensor) -> State:
    return {name: sum(a * head[name] for a, head in zip(alpha, heads, strict=True)) for name in heads[0]}
