"""pFedFDA. McLaughlin and Su, NeurIPS 2024: the head is that of Gaussians with one mean per class and one
covariance for all (`lda`); each client goes as far from the global statistics to its own as cross-validation
says.

A participant trains the received body under the head of the received statistics (mu_g, S_g), which is frozen.
Then, of its features in eval mode: its own statistics (mu_i, S_i) (`statistics`), and b = (b_m, b_S) (`chosen`).
It sends the body, b_m mu_i + (1 - b_m) mu_g and b_S S_i + (1 - b_S) S_g; all are averaged, weighted by n_i. A
client predicts with the received body and the head of the statistics that it finds for it in the same way.

b in [0, 1]^2 minimises the cross-entropy of held-out samples, summed over two folds: ten steps of L-BFGS from the
middle, or with `grid` the best point of a grid of so many points a side. At first mu_g is drawn from U[0, 1) and S_g
is the identity.
"""

from __future__ import annotations

import math
from collections.abc import Callable

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
    grid: int | None = None,
    min_samples: int = 2,
    shrinkage: float = 1e-4,
    jitter: str = "official",
    single_beta: bool = False,
    local_beta: bool = False,
    force: tuple[float, float] | None = None,
) -> Result:
    """`force` is b, for tests."""
    force = (1.0, 1.0) if local_beta else force
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
    grid: int | None,
    min_samples: int,
    shrinkage: float,
    jitter: str,
    single_beta: bool,
) -> tuple[float, float]:
    """b: what L-BFGS finds, or the best point of the grid; of points as good as it the least b_m, then the least b_S."""
    halves = folds(y, len(mu_g))
    if not halves[0]:
        return 0.0, 0.0
    fitted = [statistics(Z[half], y[half], mu_g, min_samples, jitter) for half in halves]

    def objective(b_m: Tensor | float, b_S: Tensor | float) -> Tensor:
        total = torch.zeros(()).double()
        for (mu, S), held_out in zip(fitted, reversed(halves), strict=True):
            weight, bias = lda(b_m * mu + (1 - b_m) * mu_g, b_S * S + (1 - b_S) * S_g, pi, shrinkage)
            total = total + cross_entropy(Z[held_out] @ weight.T + bias, y[held_out])
        return total

    if grid is None:
        return descended(objective, single_beta)
    values = [k / (grid - 1) for k in range(grid)]
    points = [(u, v) for u in values for v in values if u == v or not single_beta]
    costs = [float(objective(*point)) for point in points]
    return next(point for point, cost in zip(points, costs, strict=True) if cost <= min(costs) + TIE)


def descended(objective: Callable[[Tensor, Tensor], Tensor], single_beta: bool) -> tuple[float, float]:
    """b after at most ten iterations of L-BFGS from (0.5, 0.5); outside of [0, 1] the objective is that of the border.
    It ends where no derivative is above 1e-3."""
    b = torch.full((1 if single_beta else 2,), 0.5).double().requires_grad_()
    optimizer = torch.optim.LBFGS([b], max_iter=10, max_eval=1000, tolerance_grad=1e-3, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        inside = b.clip(0, 1)
        value = objective(inside[0], inside[-1])
        value.backward()
        return value

    optimizer.step(closure)
    inside = b.detach().clip(0, 1)
    return float(inside[0]), float(inside[-1])
