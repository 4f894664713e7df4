from __future__ import annotations

from dataclasses import dataclass
from math import inf, log

import torch

from idiolect.method import Method, State, Tree, Up, UsageError


@dataclass(frozen=True)
class KNNPer(Method):
    """kNN-Per. Marfoq et al., ICML 2022, Algorithm 1: FedAvg whose clients predict with a mixture of the
    shared model and the k nearest of their own training samples, by the features that the shared model gives them.

    Departs from the paper: `lam` is given, the same for all clients; there each chooses its own on validation data.
    The datastore holds all training samples. From the public code: features are taken when a client predicts, so that
    it may in any round, and weighed by exp(-distance / sigma); there by the squared distance over sigma times d.
    """

    k: int = 10
    lam: float = 0.5
    sigma: float = 1.0

    def __post_init__(self):
        if self.k < 1:
            raise UsageError(f"KNNPer.k must be at least 1; found {self.k}.")
        if not 0 <= self.lam <= 1:
            raise UsageError(f"KNNPer.lam must be in [0, 1]; found {self.lam}.")
        if not 0 < self.sigma < inf:
            raise UsageError(f"KNNPer.sigma must be a number above 0; found {self.sigma}.")

    def init(self, net):
        return State(server={"model": net.weights})

    def local(self, me, down, mine):
        return Up(mean={"model": me.train(down["model"])}), mine

    def personal(self, me, down, mine):
        w = down["model"]
        return w | Tree({"features": me.features(w), "labels": me.labels}).prefixed("datastore")

    def remembered(self, task, w, z):
        """h_i of the paper: the classes of the k nearest samples in the datastore, by their nearness. [B, C]"""
        far = torch.cdist(z, w["datastore.features"], compute_mode="donot_use_mm_for_euclid_dist")
        far, order = far.sort(dim=1, stable=True)  # of equally far samples the earlier
        share = torch.softmax(-far[:, : self.k] / self.sigma, dim=1)
        labels = w["datastore.labels"][order[:, : self.k]]
        return (share[:, :, None] * (labels[:, :, None] == torch.arange(task.classes, device=z.device))).sum(1)

    def logits(self, task, w, x):
        z = task.features(w, x)
        shared = task.head(w, z).log_softmax(1)
        own = self.remembered(task, w, z).clamp(min=torch.finfo(z.dtype).tiny).log()  # finite for every class
        return torch.logaddexp(shared + _log(1 - self.lam), own + _log(self.lam))


def _log(share):
    return log(share) if share else -inf
