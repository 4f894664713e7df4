from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import cross_entropy, one_hot

from idiolect.method import Method, State, Tree, Up, UsageError

SMALL = 1e-4  # added to the covariance, and to the share of each class
FOLDS = 2
TIE = 1e-9  # costs of grid points no further apart are equal
JITTERS = ("official", "identity")


@dataclass(frozen=True)
class PFedFDA(Method):
    """pFedFDA. McLaughlin and Su, NeurIPS 2024, Algorithm 1: a head of
    Gaussians, with a mean for each class and one covariance. The body trains under the shared ones' head; each client
    goes from them to its own as far as cross-validation says, and predicts with that.

    Departs from the paper: `jitter` keeps a covariance positive: "official" adds 1e-4 to every entry and the identity,
    as the authors' code does, "identity" 1e-4 times the identity. `grid` looks for the interpolation on a grid of so
    many points a side in place of L-BFGS. From the public code: statistics are of one pass after training, so that
    no sample is in both folds; a class has a mean of its own from `min_samples` on, in and after training.
    """

    jitter: str = "official"
    shrinkage: float = 1e-4
    min_samples: int = 2
    grid: int | None = None
    single_beta: bool = False
    local_beta: bool = False

    def __post_init__(self):
        if self.jitter not in JITTERS:
            raise UsageError(f"PFedFDA.jitter must be {' or '.join(JITTERS)}; found '{self.jitter}'.")
        if not 0 < self.shrinkage < 1:
            raise UsageError(f"PFedFDA.shrinkage must be between 0 and 1; found {self.shrinkage}.")
        if self.min_samples < 1:
            raise UsageError(f"PFedFDA.min_samples must be at least 1; found {self.min_samples}.")
        if self.grid is not None and self.grid < 2:
            raise UsageError(f"PFedFDA.grid must be at least 2, or none; found {self.grid}.")

    def init(self, net):
        if not set(net.body) - net.buffers or "head.bias" not in net.head:
            raise UsageError("PFedFDA trains a body under a head with a bias; the network lacks one of them.")
        d = net.features
        mean = (d**0.5 * net.linear("mean", d, net.classes)["mean.weight"] + 1) / 2  # U[0, 1)
        return State(server={"model": net.body, "mean": mean, "covariance": torch.eye(d, dtype=net.dtype)})

    # the Gaussians; all in float64

    def head(self, mean, covariance, prior):
        """Weight and bias with logits log N(z; mean_c, S) + log prior_c, but for what is the same for all classes."""
        d = len(covariance)
        share = self.shrinkage * covariance.trace() / d
        S = (1 - self.shrinkage) * covariance + share * torch.eye(d).to(covariance)
        L = torch.linalg.cholesky_ex(S.detach()).L
        weight = torch.cholesky_solve(mean.detach().T, L)
        # plus 0, whose derivative is the solution's: that of the factors would cost several times as much as they do
        weight = (weight + torch.cholesky_solve(mean.T - S @ weight, L)).T
        return weight, prior.log() - 0.5 * (mean * weight).sum(1)

    def statistics(self, z, y, shared):
        """Class means, the shared ones' where there are too few samples, and the covariance about them."""
        member = one_hot(y, len(shared)).to(z)  # [n, C]
        counts = member.sum(0)[:, None]
        mean = torch.where(counts < self.min_samples, shared, member.T @ z / counts.clamp(min=1))
        z = z - mean[y]
        covariance = z.T @ z / max(len(z) - 1, 1)
        identity = torch.eye(z.shape[1]).to(z)
        return mean, covariance + (SMALL + identity if self.jitter == "official" else SMALL * identity)

    def interpolated(self, b, own, shared):
        """b_m of the own mean, b_S of the own covariance."""
        return tuple(share * u + (1 - share) * v for share, u, v in zip(b, own, shared, strict=True))

    # how far to go

    def held_out(self, b, parts, shared, prior):
        """The cross-entropy of each fold under the statistics of the other, interpolated."""
        total = 0.0
        for own, z, y in parts:
            weight, bias = self.head(*self.interpolated(b, own, shared), prior)
            total = total + cross_entropy(z @ weight.T + bias, y)
        return total

    def chosen(self, z, y, shared, prior):
        """(b_m, b_S) with the least cross-entropy of held-out samples."""
        if self.local_beta:
            return z.new_ones(2)
        one, two = folds(y, len(prior))
        if not len(one):
            return z.new_zeros(2)  # nothing to learn it from: the shared statistics
        parts = [(self.statistics(z[u], y[u], shared[0]), z[v], y[v]) for u, v in ((one, two), (two, one))]
        middle = z.new_full((1 if self.single_beta else 2,), 0.5)
        search = descended if self.grid is None else partial(searched, grid=self.grid)
        return search(lambda b: self.held_out(b.expand(2), parts, shared, prior), middle).expand(2)

    def fitted(self, me, w, down):
        """The client's interpolated statistics under this body, and the shares of its classes."""
        z, y, prior = me.features(w).double(), me.labels, self.prior(me)
        shared = down["mean"].double(), down["covariance"].double()
        b = self.chosen(z, y, shared, prior)
        return (*self.interpolated(b, self.statistics(z, y, shared[0]), shared), prior)

    def prior(self, me):
        shares = me.counts.double() / max(me.n, 1) + SMALL
        return shares / shares.sum()

    # a round

    def local(self, me, down, mine):
        body, dtype = down["model"], down["mean"].dtype
        head = self.head(down["mean"].double(), down["covariance"].double(), self.prior(me))
        w = me.train(body | named(head, dtype), only=body).pick(body)
        mean, covariance, _ = self.fitted(me, w, down)
        return Up(mean={"model": w, "mean": mean.to(dtype), "covariance": covariance.to(dtype)}), mine

    def personal(self, me, down, mine):
        return down["model"] | named(self.head(*self.fitted(me, down["model"], down)), down["mean"].dtype)


def named(head, dtype):
    return Tree({"head.weight": head[0], "head.bias": head[1]}).to(dtype)


def folds(y, classes):
    """The samples in two folds: those of each class in turn, none of a class of one sample."""
    member = one_hot(y, classes)
    rank = (member.cumsum(0) * member).sum(1) - 1  # of its class
    several = member.sum(0)[y] >= FOLDS
    return [torch.nonzero(several & (rank % FOLDS == k)).flatten() for k in range(FOLDS)]


def descended(cost, b):
    """L-BFGS from b, inside [0, 1]; it ends where no derivative is above 1e-3, after ten iterations at the latest."""
    b = b.clone().requires_grad_()
    search = torch.optim.LBFGS([b], max_iter=10, max_eval=250, tolerance_grad=1e-3, line_search_fn="strong_wolfe")

    def closure():
        value = cost(b.clamp(0.0, 1.0))
        (b.grad,) = torch.autograd.grad(value, [b])
        return value

    with torch.enable_grad():
        search.step(closure)
    return b.detach().clamp(0.0, 1.0)


def searched(cost, b, grid):
    """The best point of a grid; of equally good ones that with the least b_m, then the least b_S."""
    points = torch.cartesian_prod(*[torch.arange(grid).to(b) / (grid - 1)] * len(b)).reshape(-1, len(b))
    costs = torch.stack([cost(point) for point in points])
    return points[(costs <= costs.min() + TIE).int().argmax()]
