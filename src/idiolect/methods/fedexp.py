from __future__ import annotations

from dataclasses import dataclass

import torch

from idiolect.method import Method, State, Up, UsageError


@dataclass(frozen=True)
class FedEXP(Method):
    """FedEXP. Jhunjhunwala et al., ICLR 2023, Algorithm 1: FedAvg whose server goes further than the mean of the
    clients' updates, the more so the less they agree. Clients predict with the mean of the last two iterates.

    Departs from the paper: clients send the square of their update's length, which the server could compute.
    `weights="samples"` is the public code's reading: updates count by samples, and eps by the participants. From
    the public code: eps does not fall with the learning rate.
    """

    eps: float = 1e-3
    weights: str = "uniform"
    average_last: bool = True

    def __post_init__(self):
        if self.weights not in ("uniform", "samples"):
            raise UsageError(f"FedEXP.weights must be 'uniform' or 'samples'; found '{self.weights}'.")
        if self.eps < 0:
            raise UsageError(f"FedEXP.eps must be 0 or more; found {self.eps}.")

    def init(self, net):
        w, eta = net.trainable, torch.ones((), dtype=net.dtype)
        last = {"previous": w, "statistics": net.weights.drop(w)}  # the iterate before, whole
        return State(server={"model": net.weights, **last, "step": eta})

    def down(self, server, row):
        return {"model": server["model"]}

    def local(self, me, down, mine):
        w = me.train(down["model"])
        delta = (w - down["model"]).drop(me.task.net.buffers)
        weight = 1.0 if self.weights == "uniform" else None
        return Up(mean={"model": w, "square": delta.dot(delta)}, weight=weight), mine

    def step(self, square, mean, participants):
        """eta_g from the mean of the squared lengths of the updates, and the squared length of their mean."""
        below = 2 * (mean + self.eps * (participants if self.weights == "samples" else 1))
        return torch.where(below > 0, square / below, 1.0).clamp(min=1.0)

    def server(self, server, rows, up, run):
        y, before = up.mean["model"], server["model"]
        x = before.pick(server["previous"])
        delta = y.pick(x) - x
        eta = self.step(up.mean["square"], delta.dot(delta), len(run.ids))
        moved = y | x.lerp(y, eta)  # x + eta delta; buffers are plainly averaged
        return {"model": moved, "previous": x, "statistics": before.drop(x), "step": eta}, rows

    def published(self, server):
        if not self.average_last:
            return server
        before = server["previous"] | server["statistics"]
        return {**server, "model": server["model"].lerp(before, 0.5)}

    def notes(self, server):
        return {"step": server["step"]}
