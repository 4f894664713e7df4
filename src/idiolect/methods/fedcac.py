from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from idiolect.method import Method, State, Tree, Up, UsageError

SLACK = 1e-9  # what rounding may take from an overlap that equals the threshold
BITS = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)
CHUNK = 1 << 20  # bytes of masks at a time: counts below 2^24 are exact in float32


@dataclass(frozen=True)
class FedCAC(Method):
    """FedCAC. Wu et al., ICCV 2023, Algorithm 1: FedAvg in which a client's critical weights, those that its training
    moves most, follow the mean of the clients whose critical weights lie in the same places; the longer the run, the
    fewer those are.

    Departs from the paper: a client that is away keeps its critical weights as they were last combined, and gets the
    newest shared ones; one that is alone in a round keeps its own. Normalisation statistics are never critical. From
    the public code: the clients' means exist from the first round on; what did not move is not critical.
    """

    tau: float = 0.5
    beta: int = 100

    def __post_init__(self):
        if not 0 <= self.tau <= 1:
            raise UsageError(f"FedCAC.tau must be between 0 (FedAvg) and 1; found {self.tau}.")
        if self.beta <= 0:
            raise UsageError(f"FedCAC.beta must be above 0; found {self.beta}.")

    def init(self, net):
        nothing = net.trainable.map(lambda v: packed(torch.zeros_like(v, dtype=torch.bool)))
        return State(server={"model": net.weights}, rows={"custom": net.trainable, "critical": nothing})

    def down(self, server, row):
        """The client's own mean where it is critical, the shared model elsewhere."""
        w, mask = server["model"], row["critical"]
        own = {k: torch.where(unpacked(mask[k])[: v.numel()].view_as(v), v, w[k]) for k, v in row["custom"].items()}
        return {"model": w | own}

    # the client

    def critical(self, before, after):
        """M: the share tau of a tensor's entries of which |(after - before) after| is largest."""
        s = ((after - before) * after).abs()
        count = int(self.tau * s.numel())
        if count == 0:
            return torch.zeros_like(s, dtype=torch.bool)
        return (s >= s.flatten().kthvalue(s.numel() - count + 1).values) & (s > 0)

    def local(self, me, down, mine):
        w = me.train(down["model"])
        trained = w.drop(me.task.net.buffers)
        mask = Tree({k: packed(self.critical(down["model"][k], v)) for k, v in trained.items()})
        return Up(mean={"model": w}, rows={"trained": trained, "critical": mask}), {}

    # the server

    def server(self, server, rows, up, run):
        share = self.partners(overlaps(up.rows["critical"]), run.round)
        share = share / share.sum(1, keepdim=True)
        custom = up.rows["trained"].map(lambda v: (share.to(v.dtype) @ v.flatten(1)).view_as(v))
        return {"model": up.mean["model"]}, rows.with_(run.ids, custom=custom, critical=up.rows["critical"])

    def partners(self, overlap, t):
        """K_i: 1 for whom client i is combined with, itself included. [K, K]"""
        own = torch.eye(len(overlap), dtype=overlap.dtype)
        if len(overlap) == 1:
            return own
        others = overlap[own == 0]
        threshold = others.mean() + (t + 1) / self.beta * (others.max() - others.mean())
        return torch.where(overlap >= threshold - SLACK, 1.0, own)


def overlaps(masks):
    """O_ij = 1 - |M_i - M_j| / (2 |M_i|); 0 where nothing of i is critical. [K, K]"""
    parts = torch.cat(list(masks.values()), dim=1).split(CHUNK, dim=1)
    both = sum((m @ m.T).double() for m in (unpacked(part).float() for part in parts))
    size = both.diagonal()[:, None]
    return torch.where(size > 0, 1 - (size + size.T - 2 * both) / (2 * size).clamp(min=1), 0.0)


def packed(mask):
    """Eight entries in a byte."""
    flat = pad(mask.flatten(), (0, -mask.numel() % 8)).view(-1, 8)
    return (flat * BITS.to(mask.device)).sum(1, dtype=torch.uint8)


def unpacked(mask):
    """All bits of the bytes of the last dimension, those that `packed` added included."""
    return ((mask[..., None] & BITS.to(mask.device)) > 0).flatten(-2)
