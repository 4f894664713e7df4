from __future__ import annotations

from dataclasses import dataclass

import torch

from idiolect.method import Method, State, Tree, Up, UsageError


@dataclass(frozen=True)
class FedDBE(Method):
    """FedDBE. Zhang et al., NeurIPS 2023, Algorithm 1, DBE on FedAvg: FedAvg whose clients each keep a vector that
    is added to the features and takes up what is particular to them; the features' own mean is drawn to one that all
    clients agreed on before the first round.

    Departs from the paper: kappa is 50 and the running mean is the batch's, as in the authors' run for small
    networks (the paper tunes both). From the public code: the vector is trained by the run's optimiser, with its
    momentum, decay and schedule; every client has one batch at least, so that none is left out of the common mean.
    """

    kappa: float = 50.0
    mean_momentum: float = 1.0
    personal_bias: bool = True  # off: the vector stays 0

    def __post_init__(self):
        if self.kappa < 0:
            raise UsageError(f"FedDBE.kappa must be at least 0; found {self.kappa}.")
        if not 0 < self.mean_momentum <= 1:
            raise UsageError(f"FedDBE.mean_momentum must be above 0 and at most 1; found {self.mean_momentum}.")

    def init(self, net):
        none = torch.zeros(net.features, dtype=net.dtype)
        row = {"mean": none, "size": none[:1], "told": torch.zeros(1, dtype=torch.bool)}
        private = {"model": Tree({"bias": none}), "mean": none}
        return State(server={"model": net.weights, "mean": none}, client=private, rows=row)

    # before the first round

    def hello(self, me, down, mine):
        """A round without the vector and without a common mean, of which the mean of the features alone is kept."""
        start = down["model"] | {"running": mine["mean"]}
        w = me.train(start, loss=self.first, carried=("running",), order=10)
        return {"mean": w["running"], "size": torch.full_like(w["running"][:1], me.n)}

    def plan(self, server, rows, run):
        if server["mean"].any():
            return server, rows
        sizes, means = rows.stack("size", rows), rows.stack("mean", rows)
        return {**server, "mean": (sizes * means).sum(0) / sizes.sum()}, rows  # once, and for good

    # the rounds

    def down(self, server, row):
        return {"model": server["model"]} if row["told"] else server

    def moved(self, w, batch, z):
        """m, the running mean of the features."""
        return (1 - self.mean_momentum) * w["running"] + self.mean_momentum * centre(batch, z)

    def first(self, task, w, batch):
        z = task.features(w, batch.x)
        return task.criterion(task.head(w, z), batch), {"running": self.moved(w, batch, z).detach()}

    def loss(self, task, w, batch, common):
        z = task.features(w, batch.x)
        running = self.moved(w, batch, z)  # its gradient is the batch's alone
        loss = task.criterion(task.head(w, z + w["bias"]), batch)
        if self.kappa:
            loss = loss + self.kappa * self.regularizer(running, common)
        return loss, {"running": running.detach()}

    def regularizer(self, running, common):
        return 0.5 * (running - common).square().mean()

    def local(self, me, down, mine):
        model, bias, common = down["model"], mine["model"], down.get("mean", mine["mean"])
        start = model | bias | {"running": torch.zeros_like(common)}
        only = model | bias if self.personal_bias else model
        w = me.train(start, only=only, loss=self.loss, given=(common,), carried=("running",))
        return Up(mean={"model": w.pick(model)}), {"model": w.pick(bias), "mean": common}

    def server(self, server, rows, up, run):
        rows = rows.with_(run.ids, told=[torch.ones(1, dtype=torch.bool)] * len(run.ids))
        return {**server, "model": up.mean["model"]}, rows

    def logits(self, task, w, x):
        return task.head(w, task.features(w, x) + w["bias"])


def centre(batch, z):
    """The mean feature of the real samples."""
    if batch.mask is None:
        return z.mean(0)
    return torch.where(batch.mask[:, None] > 0, z, 0.0).sum(0) / batch.mask.sum().clamp(min=1.0)
