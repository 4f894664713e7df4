from __future__ import annotations

from dataclasses import dataclass

import torch

from idiolect.method import Method, State, Up, UsageError


@dataclass(frozen=True)
class IFCA(Method):
    """IFCA. Ghosh et al., NeurIPS 2020, Algorithm 1 with model averaging: the server holds several models; a client
    receives all of them and trains the one with the lowest loss on its training set, which is averaged with those of
    the clients that chose the same.

    Departs from the paper: none; a model that nobody chose stays as it is, and of equally good ones a client takes the
    first. From the public code: a client chooses for its test samples by its training set, not by their own labels.
    """

    clusters: int = 4

    def __post_init__(self):
        if self.clusters < 1:
            raise UsageError(f"IFCA.clusters must be at least 1; found {self.clusters}.")

    def init(self, net):
        others = [net.fresh(f"cluster {j}") for j in range(1, self.clusters)]
        if any(w.equals(net.weights) for w in others):
            raise UsageError("IFCA's models begin apart; this network begins at the same weights however it is drawn.")
        return State(server={f"cluster{j}": w for j, w in enumerate([net.weights, *others])})

    def closest(self, me, down):
        """The number of the received model with the lowest loss on the training set."""
        losses = torch.stack([me.loss(down[f"cluster{j}"]) for j in range(self.clusters)])
        return losses.nan_to_num(nan=torch.inf).argmin()  # a model that fell apart is nobody's

    def local(self, me, down, mine):
        j = self.closest(me, down)
        return Up(rows={"model": me.train(down[f"cluster{j}"]), "cluster": j}), mine

    def server(self, server, rows, up, run):
        new = dict(server)
        for j in up.rows["cluster"].unique().tolist():
            chose = up.rows["cluster"] == j
            new[f"cluster{j}"] = up.rows["model"].map(lambda v, chose=chose: v[chose].mean(0))
        return new, rows

    def personal(self, me, down, mine):
        if "model" in down:  # its own, just trained
            return down["model"]
        return down[f"cluster{self.closest(me, down)}"]
