from __future__ import annotations

from dataclasses import dataclass

import torch

from idiolect.method import Method, State, Up, UsageError


@dataclass(frozen=True)
class FedPHP(Method):
    """FedPHP. Li et al., ECML-PKDD 2021, Algorithm 1: FedAvg, and at each client an inherited private model (HPM) q
    that teaches the received copy while it trains, inherits from it afterwards, and is what the client predicts with.

    The more of its `expected` participations are behind a client, the more of q is kept, at most `mu`; their number is
    rounds times participants / clients unless it is given.
    Departs from the paper: that number is not rounded, and is of the round's own participants. From the public code:
    the loss keeps its cross-entropy; q is evaluated, not what was trained or received; it teaches in eval mode; what
    counts are the client's own participations, not the server's rounds.
    """

    lam: float = 0.05
    mu: float = 0.9
    transfer: str = "mmd"
    temperature: float = 4.0
    expected: float | None = None

    def __post_init__(self):
        if self.transfer not in ("mmd", "kd"):
            raise UsageError(f"FedPHP.transfer must be 'mmd' or 'kd'; found '{self.transfer}'.")
        if not 0 <= self.lam < 1:
            raise UsageError(f"FedPHP.lam must be 0 or more and below 1, which leaves no labels; found {self.lam}.")
        if not 0 <= self.mu <= 1:
            raise UsageError(f"FedPHP.mu must lie between 0 and 1; found {self.mu}.")
        if not self.temperature > 0:
            raise UsageError(f"FedPHP.temperature must be above 0; found {self.temperature}.")
        if self.expected is not None and not self.expected >= 0:
            raise UsageError(f"FedPHP.expected must be 0 or more, or none; found {self.expected}.")

    def init(self, net):
        none = torch.zeros((), dtype=net.dtype)
        return State(server={"model": net.weights, "expected": none}, client={"model": net.weights})

    def plan(self, server, rows, run):
        expected = run.rounds * len(run.ids) / run.num_clients if self.expected is None else self.expected
        return {**server, "expected": torch.full_like(server["expected"], expected)}, rows

    def loss(self, task, w, batch):
        """(1 - lam) CE + lam R; `batch.beside` is the teacher's features or logits of these samples."""
        z = task.features(w, batch.x)
        logits = task.head(w, z)
        taught = mmd(z, batch.beside, batch.mask) if self.transfer == "mmd" else self.kd(logits, batch)
        return (1 - self.lam) * task.criterion(logits, batch) + self.lam * taught

    def kd(self, logits, batch):
        soft = torch.softmax(batch.beside / self.temperature, dim=1)  # the temperature is the teacher's alone
        return batch.mean(-(soft * torch.log_softmax(logits, dim=1)).sum(1))

    def local(self, me, down, mine):
        q = mine["model"]
        w = me.train(down["model"], loss=self.loss, beside=me.features(q) if self.transfer == "mmd" else me.logits(q))
        mu = self.mu * min(1.0, me.visits / max(1.0, float(down["expected"])))
        return Up(mean={"model": w}), {"model": w.lerp(q, mu)}


def mmd(s, t, mask):
    """The squared distance of two samples' mean embeddings, by five Gaussian kernels. s, t: [B, d]"""
    real = s.new_ones(2 * len(s)) if mask is None else mask.to(s.dtype).repeat(2)
    z = torch.where(real[:, None] > 0, torch.cat([s, t]), 0.0)
    d = (z[:, None] - z[None]).square().sum(2)  # [2B, 2B]
    m = real.sum()
    h = ((real @ d.detach() @ real) / (m * (m - 1)).clamp(min=1.0)).clamp(min=1e-12)  # the mean of two different ones
    kernels = torch.stack([torch.exp(-d / (2.0**k * h)) for k in range(-2, 3)]).sum(0)
    sign = torch.cat([real[: len(s)], -real[len(s) :]])
    return 4 * (sign @ kernels @ sign) / (m * m).clamp(min=1.0)  # m = 2 B
