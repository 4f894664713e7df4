from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import layer_norm, normalize

from idiolect.method import Method, State, Tree, Up, UsageError, linear

WIDTHS = (10, 15, 20, 50)  # of the kernels: exp(-D / 2a)
LEAST = 2.0**-53  # a uniform draw of 0 has no logarithm


@dataclass(frozen=True)
class FedCP(Method):
    """FedCP. Zhang et al., KDD 2023, Algorithm 1: a policy splits each sample's features into a part for the client's
    private head and a part for the shared one, frozen in training; features are held near the received body's.

    Departs from the paper: nothing is drawn in prediction; `noise=False` draws nothing in training either. From the
    public code: the context is the private head's from the first round on, in place of a random one; clients that
    were away predict with the body, head and policy of the same round; the received body is in eval mode.
    """

    lam: float = 5.0
    noise: bool = True

    def __post_init__(self):
        if self.lam < 0:
            raise UsageError(f"FedCP.lam must be 0 or more; found {self.lam}.")

    def init(self, net):
        d, like = net.features, net.head["head.weight"]
        norm = Tree({"policy.scale": like.new_ones(2 * d), "policy.shift": like.new_zeros(2 * d)})
        shared = net.body | net.head.under("head").prefixed("global") | net.linear("policy", d, 2 * d) | norm
        return State(server={"model": shared}, client={"model": net.head})

    # what it predicts

    def context(self, w):
        """k: the sum of the private head's rows, of length 1. [d]"""
        return normalize(w["head.weight"].sum(0), dim=0)

    def policy(self, w, f, k, noise=0.0):
        """r and s of each feature, which add up to 1. [B, d] both"""
        o = linear(w, "policy", f * k)
        o = layer_norm(o, o.shape[1:], w["policy.scale"], w["policy.shift"]).relu().unflatten(1, (2, -1))
        return torch.softmax(o + noise, dim=1).unbind(1)

    def combined(self, task, w, f, r, s):
        shared = w.under("global").prefixed("head")
        return task.head(w, r * f) + task.head(shared, s * f)

    def logits(self, task, w, x):
        f = task.features(w, x)
        return self.combined(task, w, f, *self.policy(w, f, self.context(w)))

    # the client

    def loss(self, task, w, batch, k, fresh):
        f = task.features(w, batch.x)
        r, s = self.policy(w, f, k, fresh(f) if self.noise else 0.0)
        loss = task.criterion(self.combined(task, w, f, r, s), batch)
        return loss + self.lam * mmd(f, batch.beside, batch.mask) if self.lam else loss

    def local(self, me, down, mine):
        model, head = down["model"], mine["model"]
        trained = [k for k in model | head if not k.startswith("global.")]
        given = (self.context(head), gumbel(me.draw("gumbel")) if self.noise else None)
        w = me.train(model | head, only=trained, loss=self.loss, given=given, beside=me.features(model))
        own, received = (w.under(part).prefixed("global") for part in ("head", "global"))
        return Up(mean={"model": w.pick(model) | (own + received) / 2}), {"model": w.pick(head)}


def gumbel(generator):
    """Gumbel noise, new at each call: two numbers for each feature. [B, 2, d]"""

    def fresh(f):
        u = torch.from_numpy(generator.random((len(f), 2, f.shape[1]))).clamp(min=LEAST)
        return (-torch.log(-torch.log(u))).to(f)

    return fresh


def mmd(f, g, mask=None):
    """The mean over all pairs of a batch of K(f, f) + K(g, g) - 2 K(f, g), K a sum of Gaussian kernels. [B, d] both"""
    real = f.new_ones(len(f)) if mask is None else mask.to(f.dtype)
    f, g = (torch.where(real[:, None] > 0, v, 0.0) for v in (f, g))
    z, sign = torch.cat([f, g]), torch.cat([real, -real])
    D = (z[:, None] - z).square().sum(2)  # [2B, 2B]
    K = torch.stack([torch.exp(-D / (2 * a)) for a in WIDTHS]).sum(0)
    return sign @ K @ sign / real.sum().clamp(min=1.0).square()
