from __future__ import annotations

from dataclasses import dataclass

import torch

from idiolect.method import Method, State, Up, UsageError

CHOICES = {"aggregate": ("count", "plain"), "predict": ("prototype", "head")}
BEHIND = 100.0  # how far, at least, a class that is not answered scores below the farthest one that is


@dataclass(frozen=True)
class FedProto(Method):
    """FedProto. Tan et al., AAAI 2022, Algorithm 1: Local whose features are drawn to global prototypes, the mean
    features of each class. Prototypes are all that is sent; models never leave their clients.

    A client predicts the nearest prototype of the classes that it holds; `predict="head"`: by its own head.
    Departs from the paper: a class's prototype is the mean of all its samples, whoever holds them (eq. 6 as it
    stands divides by the number of holders once more); `aggregate="plain"` is the mean of the clients' means. A
    class keeps its prototype while no participant holds it. From the public code: features are taken after
    training, in eval mode; nobody answers a class of which he has no sample.
    """

    lam: float = 1.0
    aggregate: str = "count"
    predict: str = "prototype"

    def __post_init__(self):
        for field, known in CHOICES.items():
            if (value := getattr(self, field)) not in known:
                raise UsageError(f"FedProto.{field} must be {' or '.join(known)}; found '{value}'.")
        if self.lam < 0:
            raise UsageError(f"FedProto.lam must be at least 0; found {self.lam}.")

    def init(self, net):
        prototype = torch.zeros(net.classes, net.features, dtype=net.dtype)
        known = torch.zeros(net.classes, dtype=torch.bool)
        return State(server={"prototype": prototype, "known": known}, client={"model": net.weights})

    # the client

    def distance(self, z, batch, prototype, known):
        """R: the mean squared distance of features to the prototypes of their classes; 0 where there is none yet."""
        return batch.mean((z - prototype[batch.y]).square().mean(1) * known[batch.y])

    def loss(self, task, w, batch, prototype, known):
        z = task.features(w, batch.x)
        loss = task.criterion(task.head(w, z), batch)
        return loss + self.lam * self.distance(z, batch, prototype, known) if self.lam else loss  # eq. 7

    def class_sums(self, task, w, batch):
        return batch.by_class(task.features(w, batch.x), task.classes)

    def local(self, me, down, mine):
        w = me.train(mine["model"], loss=self.loss, given=(down["prototype"], down["known"]))
        sums, counts = me.sweep(w, self.class_sums), me.counts
        if self.aggregate == "plain":
            sums, counts = sums / counts.clamp(min=1)[:, None], (counts > 0).to(counts.dtype)
        return Up(sum={"sums": sums, "counts": counts}), {"model": w}

    # the server

    def server(self, server, rows, up, run):
        sums, counts = up.sum["sums"], up.sum["counts"]
        held = counts > 0
        prototype = torch.where(held[:, None], sums / counts.clamp(min=1)[:, None], server["prototype"])  # eq. 6
        return {"prototype": prototype, "known": server["known"] | held}, rows

    # prediction

    def personal(self, me, down, mine):
        if self.predict == "head":
            return mine["model"]
        held = (me.counts > 0) & down["known"]
        return mine["model"] | {"prototype": down["prototype"], "held": held.to(me.counts.dtype)}

    def logits(self, task, w, x):
        z = task.features(w, x)
        if self.predict == "head":
            return task.head(w, z)
        held = w["held"] > 0
        scores = -(z[:, None] - w["prototype"]).square().sum(2)  # [B, C]
        lowest = scores.masked_fill(~held, torch.inf).amin(1, keepdim=True)
        scores = torch.where(held, scores, 2 * lowest - BEHIND)  # below it at any scale
        return torch.where(held.any(), scores, task.head(w, z))
