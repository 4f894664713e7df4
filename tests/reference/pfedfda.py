"""pFedFDA. McLaughlin and Su, NeurIPS 2024: the head is that of Gaussians with one mean per class and one
covariance for all (`lda`); each client goes as far from the global statistics to its own as cross-validation
says.

A participant trains the received body under the head of the received statistics (mu_g, S_g), which is frozen.
Then, of its features in eval mode: its own statistics (mu_i, S_i) (`statistics`), and b = (b_m, b_S) (`chosen`).
It sends the body, b_m mu_i + (1 - b_m) mu_g and b_S S_i + (1 - b_S) S_g; all are averaged, weighted by n_i. A
client predicts with the received body and the head of the statistics that it finds for it in the same way.

b is the point of a grid over [0, 1]^2 that minimises the cross-entropy of held-out samples, summed over two
folds. At first mu_g is drawn from U[0, 1) and S_g is the identity.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from .fedproto import features
from .world import Result, State, World, average, copy, initial, part, samples, size, train

TIE = 1e-9
JITTER = 1e-4
FOLDS = 2


def run(
    world: World,
    grid: int = 11,
    min_samples: int = 2,
    shrinkage: float = 1e-4,
    jitter: str = "official",
    single_beta: bool = False,
    force: tuple[float, float] | None = None,
) -> Result:
    """`force` is b, for tests."""
    body = part(initial(world), "body.")
    d = initial(world)["head.weight"].shape[1]
    drawn, _ = world.linear("mean", d, world.classes)
    mu, S = (math.sqrt(d) * drawn.double() + 1) / 2, torch.eye(d).double()

    def interpolated(w: State, i: int) -> tuple[Tensor, Tensor, tuple[float, float]]:
        x, y = samples(world, i)
        Z = features(world, w, x)
        mu_i, S_i = statistics(Z, y, mu, min_samples, jitter)
        fitted = (mu, S, priors(y, world.classes))
        b = force or chosen(Z, y, *fitted, grid, min_samples, shrinkage, jitter, single_beta)
        return b[0] * mu_i + (1 - b[0]) * mu, b[1] * S_i + (1 - b[1]) * S, b

    for r in range(world.rounds):
        uploads, weights = [], []
        for i in world.participants(r):
            head = as_head(*lda(mu, S, priors(samples(world, i)[1], world.classes), shrinkage))
            w = train(world, {**body, **head}, i, r, only="body.")
            mu_i, S_i, _ = interpolated(w, i)
            uploads.append({**part(w, "body."), "mean": mu_i, "covariance": S_i})
            weights.append(size(world, i))
        body = average(uploads, weights)
        mu, S = body.pop("mean"), body.pop("covariance")
    clients, beta = [], []
    for i in range(world.clients):
        mu_i, S_i, b = interpolated({**body, **part(initial(world), "head.")}, i)
        head = as_head(*lda(mu_i, S_i, priors(samples(world, i)[1], world.classes), shrinkage))
        clients.append({**copy(body), **head})
        beta.append(b)
    return Result(body, clients, {"mean": mu, "covariance": S, "beta": beta})


def as_head(weight: Tensor, bias: Tensor) -> State:
    return {"head.weight": weight, "head.bias": bias}


def priors(y: Tensor, classes: int) -> Tensor:
    """The shares of the classes, 1e-4 added to each, of sum one."""
    shares = torch.bincount(y, minlength=classes).double() / len(y) + 1e-4
    return shares / shares.sum()


def lda(mu: Tensor, S: Tensor, pi: Tensor, shrinkage: float) -> tuple[Tensor, Tensor]:
    """Weight and bias whose logits are log N(z; mu_c, S~) + log pi_c, up to what is the same for all classes."""
    d = len(S)
    shrunk = (1 - shrinkage) * S + shrinkage * torch.trace(S) / d * torch.eye(d).double()
    weight = torch.linalg.solve(shrunk, mu.T).T
    bias = torch.stack([-0.5 * mu[c] @ weight[c] + torch.log(pi[c]) for c in range(len(mu))])
    return weight, bias


def statistics(Z: Tensor, y: Tensor, mu_g: Tensor, min_samples: int, jitter: str) -> tuple[Tensor, Tensor]:
    """Class means, the global one where there are too few samples, and the covariance about them."""
    mu, d = mu_g.clone(), Z.shape[1]
    for c in range(len(mu)):
        if int((y == c).sum()) >= min_samples:
            mu[c] = Z[y == c].mean(0)
    S = torch.zeros(d, d).double()
    for z, label in zip(Z, y, strict=True):
        S += torch.outer(z - mu[label], z - mu[label])
    S /= max(len(Z) - 1, 1)
    if jitter == "official":
        return mu, S + JITTER + torch.eye(d).double()
    if jitter == "identity":
        return mu, S + JITTER * torch.eye(d).double()
    raise ValueError(jitter)


def folds(y: Tensor, classes: int) -> list[list[int]]:
    """The samples in two folds: those of each class go to the one and the other in turn; a class of one sample
    is left out."""
    found: list[list[int]] = [[] for _ in range(FOLDS)]
    for c in range(classes):
        members = [n for n, label in enumerate(y.tolist()) if label == c]
        if len(members) >= FOLDS:
            for rank, n in enumerate(members):
                found[rank % FOLDS].append(n)
    return found


def chosen(
    Z: Tensor,
    y: Tensor,
    mu_g: Tensor,
    S_g: Tensor,
    pi: Tensor,
    grid: int,
    min_samples: int,
    shrinkage: float,
    jitter: str,
    single_beta: bool,
) -> tuple[float, float]:
    """b: the best point of the grid; of points as good as it the least b_m, then the least b_S."""
    halves = folds(y, len(mu_g))
    if not halves[0]:
        return 0.0, 0.0
    fitted = [statistics(Z[half], y[half], mu_g, min_samples, jitter) for half in halves]

    def objective(b_m: float, b_S: float) -> float:
        total = 0.0
        for (mu, S), held_out in zip(fitted, reversed(halves), strict=True):
            weight, bias = lda(b_m * mu + (1 - b_m) * mu_g, b_S * S + (1 - b_S) * S_g, pi, shrinkage)
            total += float(cross_entropy(Z[held_out] @ weight.T + bias, y[held_out]))
        return total

    values = [k / (grid - 1) for k in range(grid)]
    points = [(u, v) for u in values for v in values if u == v or not single_beta]
    costs = [objective(*point) for point in points]
    return next(point for point, cost in zip(points, costs, strict=True) if cost <= min(costs) + TIE)
