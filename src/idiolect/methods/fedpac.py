from __future__ import annotations

from dataclasses import dataclass

import torch

from idiolect.method import Method, State, Up, UsageError

RIDGE = 1e-8  # beside the variances: the weights are unique even where all of them are 0
LEAST = 1e-3  # smaller weights are dropped


@dataclass(frozen=True)
class FedPAC(Method):
    """FedPAC. Xu, Tong and Huang, ICLR 2023, Algorithm 1: shared body, whose features are drawn to global
    centroids of the classes; and every client gets the mixture of all heads that is best for it by the mean features
    of each class and their variance.

    Departs from the paper: as in the authors' code, the head's epoch has a rate of its own (`head_lr`; none: the
    run's), a class without a centroid is drawn to the client's own mean, and weights below 1e-3 are dropped. A client
    that is away keeps the mixture that it was last given. From the public code: weights go with the heads that they
    were found for; the problem is convex as it stands, is solved exactly and needs no d x d matrix; a class that
    nobody holds is no error.
    """

    lam: float = 1.0
    head_lr: float | None = 0.1
    head_epochs: int = 1
    body_epochs: int | None = None

    def __post_init__(self):
        if self.lam < 0:
            raise UsageError(f"FedPAC.lam must be at least 0; found {self.lam}.")
        if self.head_lr is not None and self.head_lr <= 0:
            raise UsageError(f"FedPAC.head_lr must be above 0, or none; found {self.head_lr}.")
        for name in ("head_epochs", "body_epochs"):
            if (getattr(self, name) or 0) < 0:
                raise UsageError(f"FedPAC.{name} must be at least 0; found {getattr(self, name)}.")

    def init(self, net):
        centroid = torch.zeros(net.classes, net.features, dtype=net.dtype)
        known = torch.zeros(net.classes, dtype=torch.bool)
        return State(server={"model": net.body, "centroid": centroid, "known": known}, rows={"head": net.head})

    def down(self, server, row):
        return {**server, "head": row["head"]}

    # the client

    def moments(self, task, w, batch):
        z = task.features(w, batch.x).double()
        return {"sums": batch.by_class(z, task.classes), "squares": z.square().sum()}

    def statistics(self, me, w):
        """mu, the mean feature of each class; H = [pi_k mu_k]; and v, the variance of H as a mean over n samples."""
        found = me.sweep(w, self.moments)
        mu, H = found["sums"] / me.counts.clamp(min=1)[:, None], found["sums"] / me.n
        v = (found["squares"] / me.n - H.square().sum()) / me.n
        return tuple(s.to(me.counts.dtype) for s in (mu, H, v.clamp(min=0)))

    def aligned(self, task, w, batch, target):
        """The loss, and the mean squared distance of features to the targets of their classes."""
        z = task.features(w, batch.x)
        apart = batch.mean((z - target[batch.y]).square().mean(1))
        return task.criterion(task.head(w, z), batch) + self.lam * apart

    def local(self, me, down, mine):
        body, head, known = down["model"], down["head"], down["known"]
        mu, H, v = self.statistics(me, body | head)
        w = me.train(body | head, only=head, epochs=self.head_epochs, lr=self.head_lr)
        target = torch.where(known[:, None], down["centroid"], mu)
        drawn = {"loss": self.aligned, "given": (target,)} if self.lam and known.any() else {}
        w = me.train(w, only=body, epochs=self.body_epochs, **drawn)
        sums = me.sweep(w, self.moments)["sums"].to(me.counts.dtype)
        rows = {"head": w.pick(head), "H": H, "v": v}
        return Up(mean={"model": w.pick(body)}, sum={"sums": sums, "counts": me.counts}, rows=rows), {}

    def personal(self, me, down, mine):
        return down["model"] | down["head"]

    # the server

    def server(self, server, rows, up, run):
        sums, counts = up.sum["sums"], up.sum["counts"]
        held = counts > 0
        centroid = torch.where(held[:, None], sums / counts.clamp(min=1)[:, None], server["centroid"])
        alpha = self.weights(up.rows["H"], up.rows["v"])
        heads = up.rows["head"].map(lambda h: (alpha.to(h.dtype) @ h.flatten(1)).view_as(h))
        server = {"model": up.mean["model"], "centroid": centroid, "known": server["known"] | held}
        return server, rows.with_(run.ids, head=heads)

    def weights(self, H, v):
        """Row i: the weights a on the simplex that minimise sum_j v_j a_j^2 + |H_i - sum_j a_j H_j|^2. [K, K]"""
        alpha = torch.stack([simplex_minimum(Q) for Q in quadratics(H, v)])
        alpha = torch.where(alpha < alpha.amax(1, keepdim=True).clamp(max=LEAST), 0.0, alpha)
        return alpha / alpha.sum(1, keepdim=True)


def quadratics(H, v):
    """Q of each client, with a'Qa what its weights minimise: diag(v) + [<H_i - H_j, H_i - H_l>]. All of them out of one
    Gram matrix."""
    flat = H.flatten(1).double()
    flat = flat - flat.mean(0)  # only differences count: less to cancel
    gram = flat @ flat.T  # [K, K]
    variance = torch.diag(v.double() + RIDGE)
    for i, row in enumerate(gram):
        yield variance + row[i] - row[:, None] - row + gram


def simplex_minimum(Q):
    """The minimum of a'Qa on the simplex, Q positive definite: a = y / sum(y), where y minimises y'Qy / 2 - sum(y) over
    y >= 0. Lawson and Hanson's active set: the same entries are positive twice only at the end, or by rounding."""
    y, seen = torch.zeros_like(Q[0]), set()
    while (positive := tuple((y > 0).tolist())) not in seen:
        seen.add(positive)
        slope = torch.where(y > 0, -torch.inf, 1 - Q @ y)
        if slope.max() > 0:
            y = entered(Q, y, slope.argmax())
    return y / y.sum()


def entered(Q, y, k):
    """The minimum once entry k may be positive as well; one that would turn negative on the way stays 0."""
    free = (y > 0).index_fill(0, k, True)
    while True:
        z = torch.zeros_like(y)
        z[free] = torch.linalg.solve(Q[free][:, free], torch.ones_like(y[free]))
        if not (z < 0).any():
            return z
        until = torch.where(z < 0, y / (y - z), torch.inf)  # the first of them becomes 0 here
        free = free & (until > until.min())
        y = torch.where(free, torch.lerp(y, z, until.min()), 0.0)
