from __future__ import annotations

from dataclasses import dataclass

import torch

from idiolect.method import SGD, Method, State, Tree, Up, UsageError, unit_interval


@dataclass(frozen=True)
class APFL(Method):
    """APFL. Deng et al., arXiv 2003.13461, 2020, Algorithm 1: FedAvg, and beside it each client's own model v, which is
    trained and predicted with in a mixture with the shared w. The client learns the share alpha that v has in it.

    Departs from the paper: replies are averaged by samples; statistics of normalisation are not mixed, v has its own.
    From the public code: weights are mixed, not outputs; v's step sees w as it was before w's own; alpha's gradient is
    that of the mixture's loss, with no decay, taken before a round's training.
    """

    alpha: float = 0.5
    adaptive: bool = True
    alpha_lr: float | None = None

    def __post_init__(self):
        if not 0 <= self.alpha <= 1:
            raise UsageError(f"APFL.alpha must be in [0, 1]; found {self.alpha}.")
        if self.alpha_lr is not None and self.alpha_lr < 0:
            raise UsageError(f"APFL.alpha_lr must be 0 or more, or none (the run's rate); found {self.alpha_lr}.")

    def init(self, net):
        alpha = torch.full((), self.alpha, dtype=net.dtype)
        return State(server={"model": net.weights}, client={"own": net.twin("own"), "alpha": alpha})

    def mixture(self, task, w, v, alpha):
        """alpha v + (1 - alpha) w, with the statistics of v."""
        return v | w.drop(task.net.buffers).lerp(v, alpha)

    def of_alpha(self, task, share, batch, w, v):
        return task.loss(self.mixture(task, w, v, share["alpha"]), batch)

    def learn(self, me, w, v, alpha):
        """Eq. 10, on the round's first batch: d loss / d alpha = <v - w, the gradient at the mixture>."""
        return me.train(
            Tree({"alpha": alpha}), loss=self.of_alpha, given=(w, v), steps=1, lr=self.alpha_lr, optimizer=SGD(),
            project=unit_interval, order=0,
        )["alpha"]  # fmt: skip

    def loss(self, task, both, batch, alpha):
        """Its gradient is that of the loss at w, for w; and for v alpha times that at the mixture."""
        w, v = both.pick(task.net.weights), both.under("own")
        mixed = self.mixture(task, w.detach(), v, alpha).prefixed("own")
        return task.loss(w, batch) + task.criterion(task.logits(mixed, batch.x, "own"), batch)

    def local(self, me, down, mine):
        w, v, alpha = down["model"], mine["own"], mine["alpha"]
        if self.adaptive:
            alpha = self.learn(me, w, v.under("own"), alpha)
        both = me.train(w | v, loss=self.loss, given=(alpha,), gradients=2, order=0)
        return Up(mean={"model": both.pick(w)}), {"own": both.pick(v), "alpha": alpha}

    def personal(self, me, down, mine):
        return self.mixture(me.task, down["model"], mine["own"].under("own"), mine["alpha"])
