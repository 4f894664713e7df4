from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from idiolect.method import Method, State, Tree, Up, UsageError, linear


@dataclass(frozen=True)
class FedPAM(Method):
    """FedPAM. Anonymous, under review, Algorithm 1: FedAvg, and beside it a private matrix P that adjusts the shared
    head W to the client's features. A contrastive loss pulls features to the rows of W P; a client predicts with W P.

    Departs from the paper: the temperature, not given there, is 0.5; the head has a bias, of which the adjusted head
    knows nothing; `inference="cosine"` predicts with normalised features and rows, which is what the contrastive loss
    trains; a `capacity` other than the features' is reached by one shared linear layer. From the public code: there is
    none.
    """

    lam: float = 30.0
    tau: float = 0.5
    pam: bool = True  # off: P stays the identity
    contrast: bool = True  # off: the cross-entropy of the adjusted head in place of the contrastive loss
    inference: str = "adjusted"
    capacity: int | None = None

    def __post_init__(self):
        if self.inference not in ("adjusted", "cosine"):
            raise UsageError(f"FedPAM.inference must be 'adjusted' or 'cosine'; found '{self.inference}'.")
        if not self.lam >= 0:
            raise UsageError(f"FedPAM.lam must be 0 or more; found {self.lam}.")
        if not self.tau > 0:
            raise UsageError(f"FedPAM.tau must be above 0; found {self.tau}.")
        if self.capacity is not None and self.capacity < 1:
            raise UsageError(f"FedPAM.capacity must be at least 1, or none; found {self.capacity}.")

    def init(self, net):
        model, m = net.weights, self.capacity or net.features
        if m != net.features:
            added = net.linear("capacity", net.features, m) | net.linear("classifier", m, net.classes)
            model = net.weights.drop(net.head) | added
        return State(server={"model": model}, client={"adjust": Tree({"adjust": torch.eye(m, dtype=net.dtype)})})

    def parts(self, task, w, x):
        """Features [B, m], the shared head's logits [B, C], and the rows of W P, one per class (eq. 3.1) [C, m]."""
        z, head = task.features(w, x), "head"
        if "capacity.weight" in w:
            z, head = linear(w, "capacity", z), "classifier"
        return z, functional.linear(z, w[f"{head}.weight"], w.get(f"{head}.bias")), w[f"{head}.weight"] @ w["adjust"]

    def contrastive(self, z, anchors, batch):
        """Eq. 3.3 as a cross-entropy over classes and samples: the classes come first, so that y is the positive."""
        z, anchors = unit(z), unit(anchors)
        others = batch.y[:, None] != batch.y  # in-batch negatives. [B, B]
        if batch.mask is not None:
            others = others & (batch.mask > 0)  # padding is nobody's negative
        samples = (z @ z.T / self.tau).masked_fill(~others, -torch.inf)
        scores = torch.cat([z @ anchors.T / self.tau, samples], 1)  # [B, C + B]
        return batch.mean(functional.cross_entropy(scores, batch.y, reduction="none"))

    def loss(self, task, w, batch):
        z, logits, anchors = self.parts(task, w, batch.x)
        loss = task.criterion(logits, batch)
        if self.contrast:
            return loss + self.lam * self.contrastive(z, anchors, batch)  # eq. 3.4
        return loss + task.criterion(z @ anchors.T, batch)

    def local(self, me, down, mine):
        model, adjust = down["model"], mine["adjust"]
        whole = me.task.net.head | model | adjust  # with a capacity, the network's own head stands idle
        w = me.train(whole, only=model | adjust if self.pam else model, loss=self.loss)
        return Up(mean={"model": w.pick(model)}), {"adjust": w.pick(adjust)}

    def personal(self, me, down, mine):
        return down["model"] | mine["adjust"]

    def logits(self, task, w, x):
        z, _, anchors = self.parts(task, w, x)
        return unit(z) @ unit(anchors).T / self.tau if self.inference == "cosine" else z @ anchors.T


def unit(v):
    return functional.normalize(v, dim=1, eps=1e-8)  # eq. 3.2; the floor keeps zero features finite
