from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from idiolect.method import Method, State, Tree, Up
from idiolect.tree import gram


@dataclass(frozen=True)
class FedAMP(Method):
    """FedAMP. Huang et al., AAAI 2021, Algorithm 1: every client is pulled towards its own cloud model, a mixture of
    the clients' models in which similar ones weigh more.

    `attention="distance"` is FedAMP; "cosine" is HeurFedAMP (section 4.2).
    Departs from the paper: sigma is the median squared distance unless given, and the step alpha is capped at
    sigma / K, so that the weights of deep networks neither vanish nor exceed 1; with partial participation the last
    uploads are mixed, and a client that never uploaded is not pulled. From the public code: the pull has a gradient.
    """

    lam: float = 1.0
    alpha: float = 1.0
    sigma: float | None = None
    attention: str = "distance"
    self_weight: float | None = None
    scale: float = 10.0

    def init(self, net):
        w = net.trainable
        return State(
            client={"model": net.weights}, rows={"model": w, "cloud": w, "seen": torch.zeros(1, dtype=net.dtype)}
        )

    def down(self, server, row):
        return {"cloud": row["cloud"], "seen": row["seen"]}

    def pull(self, g, w, u, seen):
        return g + (w - u) * (seen * self.lam / self.alpha)  # eq. 6

    def local(self, me, down, mine):
        w = me.train(mine["model"], correct=self.pull, given=(down["cloud"], down["seen"]))
        return Up(rows={"model": w.pick(down["cloud"])}), {"model": w}

    def server(self, server, rows, up, run):
        rows = rows.with_(run.ids, model=up.rows["model"])
        everyone = list(rows)
        w = rows.stack("model", everyone)  # [K, ...]
        xi = self.weights(w)
        cloud = w.map(lambda v: (xi.to(v.dtype) @ v.flatten(1)).view_as(v))
        return server, rows.with_(
            everyone, cloud=cloud, seen=torch.ones(len(everyone), 1, dtype=up.rows["model"].flat().dtype)
        )

    def weights(self, w: Tree):
        """Who mixes with whom: rows sum to 1. [K, K]"""
        k = len(next(iter(w.values())))
        others = ~torch.eye(k, dtype=torch.bool)
        products = torch.zeros(k, k, dtype=torch.float64)
        for flat in w.map(lambda v: v.flatten(1)).values():
            products += gram(k, flat.shape[1], partial(as_double, flat))
        if self.attention == "cosine":
            norms = products.diagonal().sqrt().clamp(min=1e-12)
            own = 1 / k if self.self_weight is None else self.self_weight
            scores = (self.scale * products / (norms[:, None] * norms)).masked_fill(~others, -torch.inf)
            xi = (1 - own) * torch.softmax(scores, dim=1) if k > 1 else torch.zeros_like(products)
        else:
            squares = products.diagonal()
            distance = (squares[:, None] + squares - 2 * products).clamp(min=0)
            apart = distance[others.triu() & (distance > 0)]
            sigma = self.sigma or (float(apart.quantile(0.5)) if len(apart) else 1.0)
            xi = min(self.alpha / sigma, 1 / k) * torch.exp(-distance / sigma) * others
        return xi + torch.diag(1 - xi.sum(1))


def as_double(flat, part):
    return flat[:, part].double()
