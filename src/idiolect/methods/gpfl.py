from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy, layer_norm, normalize, relu

from idiolect.method import Method, State, Tree, Up, UsageError, linear

CLIP = 1 - 1e-6  # keeps the normal draws finite


@dataclass(frozen=True)
class GPFL(Method):
    """GPFL. Zhang et al., ICCV 2023, Algorithm 1: FedPer whose features take two routes through a shared conditional
    valve: a generic one, guided by shared embeddings of the classes, and a personal one, to the private head.

    Departs from the paper: none known; lam and mu are those of the authors' run of small networks. From the public
    code: the valve's conditions are of the table that was received (`condition="stale"`: of the client's own as it
    last trained it, as there); all samples count in them; one optimiser with the run's schedule trains all parts.
    """

    lam: float = 0.01
    mu: float = 0.1
    condition: str = "received"

    def __post_init__(self):
        for field in ("lam", "mu"):
            if (value := getattr(self, field)) < 0:
                raise UsageError(f"GPFL.{field} must be at least 0; found {value}.")
        if self.condition not in ("received", "stale"):
            raise UsageError(f"GPFL.condition must be 'received' or 'stale'; found '{self.condition}'.")

    def init(self, net):
        table = normal(net, "gce", net.classes)
        client = {"model": net.head} | ({"own": torch.zeros_like(table)} if self.condition == "stale" else {})
        return State(server={"model": net.body | {"gce": table} | valve_weights(net)}, client=client)

    # the two routes

    def conditions(self, me, down, mine):
        """g, the mean of all embeddings, and q, their mean in the proportions of the client's classes."""
        table = mine["own"] if self.condition == "stale" else down["model"]["gce"]
        return table.mean(0), (me.counts / me.n) @ table

    def valve(self, w, f, v):
        """CoV: f scaled and shifted, dimension by dimension, as the condition v says."""
        return relu((route(w, "cov.gamma", v) + 1) * f + route(w, "cov.beta", v))

    def angle(self, f, table, batch):
        """The cross-entropy of the cosines of features and embeddings."""
        return batch.mean(cross_entropy(normalize(f) @ normalize(table).T, batch.y, reduction="none"))

    def magnitude(self, f, old, batch):
        """The norm of all samples' distances to their classes' received embeddings, as one vector."""
        gap = f - old[batch.y]
        if batch.mask is not None:
            gap = torch.where(batch.mask[:, None] > 0, gap, 0.0)
        return torch.linalg.vector_norm(gap)  # its gradient at 0 is 0

    def guide(self, f, w, batch, old):
        return self.angle(f, w["gce"], batch) + self.lam * self.magnitude(f, old, batch)

    def loss(self, task, w, batch, g, q, old):
        f = task.features(w, batch.x)
        own = task.criterion(task.head(w, self.valve(w, f, q)), batch)
        return own + self.guide(self.valve(w, f, g), w, batch, old)

    def decay(self, gradient, w, *given):
        """mu is a weight decay of the table and the valve alone."""
        beside = w.pick(k for k in w if k.startswith(("gce", "cov.")))
        return gradient | (gradient.pick(beside) + self.mu * beside)

    def local(self, me, down, mine):
        shared, (g, q) = down["model"], self.conditions(me, down, mine)
        given = g, q, shared["gce"]
        w = me.train(shared | mine["model"], loss=self.loss, correct=self.decay if self.mu else None, given=given)
        own = {"own": w["gce"]} if "own" in mine else {}
        return Up(mean={"model": w.pick(shared)}), {"model": w.pick(mine["model"]), **own}

    # prediction

    def personal(self, me, down, mine):
        return down["model"] | mine["model"] | {"condition": self.conditions(me, down, mine)[1]}

    def logits(self, task, w, x):
        return task.head(w, self.valve(w, task.features(w, x), w["condition"]))


def route(w, name, v):
    """LN(ReLU(W v + b)), the same for all samples. [d]"""
    a = relu(linear(w, name, v))
    return layer_norm(a, a.shape[-1:], w[f"{name}.scale"], w[f"{name}.shift"])


def valve_weights(net):
    d, found = net.features, Tree()
    for name in ("cov.gamma", "cov.beta"):
        norm = {f"{name}.scale": torch.ones(d, dtype=net.dtype), f"{name}.shift": torch.zeros(d, dtype=net.dtype)}
        found |= net.linear(name, d, d) | norm
    return found


def normal(net, name, rows):
    """Standard normal draws, out of a layer's uniform ones. [rows, d]"""
    uniform = math.sqrt(net.features) * net.linear(name, net.features, rows)[f"{name}.weight"]
    return math.sqrt(2) * torch.erfinv(uniform.clamp(-CLIP, CLIP))
