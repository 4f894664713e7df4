from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from idiolect.method import Method, State, Tree, Up, UsageError, linear


@dataclass(frozen=True)
class FedRoD(Method):
    """Fed-RoD. Chen and Chao, ICLR 2022, Algorithm 1: FedAvg with a loss balanced
    over classes, and at each client a personal head that learns what the shared, generic one lacks.

    `hyper` is the width of the paper's other form, in which a shared network makes the personal head out of the
    client's class frequencies. A client predicts with the sum of both heads.
    Departs from the paper: of its family of losses there is the balanced softmax alone; the personal head, and the
    hypernetwork, have the run's learning rate. From the public code: classes are counted over all training samples;
    the personal loss is that of the sum of both heads, and moves the personal one alone.
    """

    gamma: float = 1.0
    personal_init: str = "copy"
    hyper: int | None = None

    def __post_init__(self):
        if self.gamma < 0:
            raise UsageError(f"FedRoD.gamma must be 0 or more; found {self.gamma}.")
        if self.personal_init not in ("copy", "zero"):
            raise UsageError(f"FedRoD.personal_init must be 'copy' or 'zero'; found '{self.personal_init}'.")
        if self.hyper is not None and self.hyper < 1:
            raise UsageError(f"FedRoD.hyper must be at least 1, or none; found {self.hyper}.")

    def init(self, net):
        if not self.hyper:
            head = net.head if self.personal_init == "copy" else net.head.zeros()
            return State(server={"model": net.weights}, client={"model": head.under("head").prefixed("personal")})
        into = net.linear("hyper1", net.classes, self.hyper)
        out = net.linear("hyper2", self.hyper, net.classes * (net.features + 1))
        return State(server={"model": net.weights | into | out}, client={"model": Tree()})

    def both(self, w, counts):
        """The weights with the personal head in them, which a hypernetwork makes of the client's class frequencies."""
        if not self.hyper:
            return w
        classes, d = w["head.weight"].shape
        made = linear(w, "hyper2", torch.relu(linear(w, "hyper1", counts / counts.sum())))
        weight, bias = made[: classes * d].reshape(classes, d), made[classes * d :]
        return w | {"personal.weight": weight, "personal.bias": bias}

    def balanced(self, g, counts):
        """Logits of the balanced softmax: those of class c are counted n_c^gamma times, and of no sample never."""
        if not self.gamma:
            return g
        return (g + self.gamma * counts.clamp(min=1).log()).masked_fill(counts == 0, -torch.inf)

    def loss(self, task, w, batch, counts):
        z = task.features(w, batch.x)
        g = task.head(w, z)
        generic = task.criterion(self.balanced(g, counts), batch)
        # the two losses have no parameter in common: a step of their sum is a step of each
        own = added(self.both(w, counts), z.detach())
        return generic + task.criterion(g.detach() + own, batch)

    def local(self, me, down, mine):
        shared, own = down["model"], mine["model"]
        w = me.train(shared | own, loss=self.loss, given=(me.counts,))
        return Up(mean={"model": w.pick(shared)}), {"model": w.pick(own)}

    def personal(self, me, down, mine):
        w = self.both(down["model"] | mine["model"], me.counts)
        return w.drop(k for k in w if k.startswith("hyper"))

    def logits(self, task, w, x):
        z = task.features(w, x)
        return task.head(w, z) + added(w, z)


def added(w, z):
    """What the personal head adds to the logits; a head may be without a bias."""
    return functional.linear(z, w["personal.weight"], w.get("personal.bias"))
