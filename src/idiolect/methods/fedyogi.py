from __future__ import annotations

from dataclasses import dataclass

import torch

from idiolect.method import Method, State, Up, UsageError


@dataclass(frozen=True)
class FedYogi(Method):
    """FedYogi. Reddi et al., ICLR 2021, Algorithm 2: FedAvg whose mean update serves Yogi at the server as a
    gradient: Adam, but how far v moves depends on the update alone, not on how far off v is. Letters as in FedAdam.

    Departs from the paper: replies are averaged by samples, not uniformly. From public code: v starts at tau^2, not at
    0, and no moment is divided by what it lacks in the first rounds.
    """

    server_lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self):
        for name in ("server_lr", "tau"):
            if getattr(self, name) <= 0:
                raise UsageError(f"FedYogi.{name} must be above 0; found {getattr(self, name)}.")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"FedYogi.{name} must be in [0, 1); found {getattr(self, name)}.")

    def init(self, net):
        zero = net.trainable.zeros()
        return State(server={"model": net.weights, "m": zero, "v": zero + self.tau**2})

    def down(self, server, row):
        return {"model": server["model"]}

    def local(self, me, down, mine):
        return Up(mean={"model": me.train(down["model"])}), mine

    def second(self, v, delta):
        return v - (1 - self.beta2) * delta.sq() * (v - delta.sq()).map(torch.sign)

    def server(self, server, rows, up, run):
        w, mean, m = server["model"], up.mean["model"], server["m"]
        delta = (mean - w).pick(m)
        m, v = self.beta1 * m + (1 - self.beta1) * delta, self.second(server["v"], delta)
        step = self.server_lr * m / (v.map(torch.sqrt) + self.tau)
        return {"model": mean | (w.pick(m) + step), "m": m, "v": v}, rows  # statistics: the plain mean
