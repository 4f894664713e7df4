from __future__ import annotations

from dataclasses import dataclass

from idiolect.method import Method, State, Up, UsageError


@dataclass(frozen=True)
class FedAvgM(Method):
    """FedAvgM. Hsu et al., arXiv 1909.06335, 2019, section 3: FedAvg with momentum at the server, whose step is not
    the mean update but a sum of all of them so far, older ones counting less. v as in the paper.

    Departs from the paper: momentum is plain, not Nesterov's; v has a rate, 1 as in the paper unless given. From public
    code: v is a sum, not a mean with weights beta and 1 - beta; no field is 0 by default.
    """

    server_momentum: float = 0.9
    server_lr: float = 1.0

    def __post_init__(self):
        if not 0 <= self.server_momentum < 1:
            raise UsageError(f"FedAvgM.server_momentum must be in [0, 1); found {self.server_momentum}.")
        if self.server_lr <= 0:
            raise UsageError(f"FedAvgM.server_lr must be above 0; found {self.server_lr}.")

    def init(self, net):
        return State(server={"model": net.weights, "v": net.trainable.zeros()})

    def down(self, server, row):
        return {"model": server["model"]}

    def local(self, me, down, mine):
        return Up(mean={"model": me.train(down["model"])}), mine

    def server(self, server, rows, up, run):
        w, mean, v = server["model"], up.mean["model"], server["v"]
        v = self.server_momentum * v + (mean - w).pick(v)
        return {"model": mean | (w.pick(v) + self.server_lr * v), "v": v}, rows  # statistics: the plain mean
