from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from idiolect.method import SGD, Batch, Method, State, Tree, Up, UsageError, gradient

LEAST = 1e-300  # of a weight: where every trace is 0, samples decide, and else they change no bit


@dataclass(frozen=True)
class FedAS(Method):
    """FedAS. Yang, Huang and Ye, CVPR 2024, Algorithm 1: every client has a model of its own, and
    bodies are shared. A received body is first aligned with the features of the client's own; the server weighs
    bodies by the trace of their Fisher information, so that a client that was trained little counts little.

    Departs from the paper: alignment has the run's batches (16 samples in the authors' code); heads are not sent;
    where every trace is 0, samples are the weights, and a client whose trace is not finite counts as one of 0. From
    the public code: what one client aligns, the next one does not receive.
    """

    align_lr: float = 0.01
    align_epochs: int = 1
    fisher: str = "batch"

    def __post_init__(self):
        if self.fisher not in ("batch", "sample"):
            raise UsageError(f"FedAS.fisher must be 'batch' or 'sample'; found '{self.fisher}'.")
        if self.align_lr <= 0 or self.align_epochs < 0:
            raise UsageError(f"FedAS needs align_lr > 0 and align_epochs >= 0 (0: no alignment); found {self}.")

    def init(self, net):
        return State(server={"model": net.body}, client={"model": net.weights})

    def class_sums(self, task, w, batch):
        return batch.by_class(task.features(w, batch.x), task.classes)

    def alignment(self, task, w, batch, prototypes):
        """The sum over the batch's classes of the mean squared distance to the class's prototype."""
        gap = (task.features(w, batch.x) - prototypes[batch.y]).square().mean(1, keepdim=True)
        count = batch.by_class(torch.ones_like(gap), task.classes).clamp(min=1)
        return (batch.by_class(gap, task.classes) / count).sum()

    def squares(self, task, w, batch, lr, model):
        """The squared norm of the loss's gradient, of the batch or of each of its samples, added up."""
        trained = model.drop(task.net.buffers)

        def square(part):
            g = gradient(lambda v: task.loss(model | v, part), trained)
            return g.dot(g)

        if self.fisher == "batch":
            return w + square(batch)
        each = torch.stack([square(Batch(batch.x[k : k + 1], batch.y[k : k + 1])) for k in range(len(batch.y))])
        return w + (each if batch.mask is None else torch.where(batch.mask > 0, each, 0.0)).sum()

    def trace(self, me, w):
        zero = Tree({"trace": torch.zeros_like(next(iter(w.values())).flatten()[0])})
        total = me.train(zero, step=self.squares, given=(w,), epochs=1, order=10)["trace"]
        return float(total) / (me.n if self.fisher == "sample" else 1)

    def local(self, me, down, mine):
        body, own = down["model"], mine["model"]
        prototypes = me.sweep(own, self.class_sums) / me.counts.clamp(min=1)[:, None]
        aligned = me.train(
            own | body, only=body, loss=self.alignment, given=(prototypes,), epochs=self.align_epochs,
            lr=self.align_lr, optimizer=SGD(), order=9,
        )  # fmt: skip
        w = me.train(aligned, order=0)
        trace = self.trace(me, w)
        weight = (trace if math.isfinite(trace) else 0.0) + LEAST * me.n
        return Up(mean={"model": w.pick(body)}, weight=weight), {"model": w}

    def personal(self, me, down, mine):
        return mine["model"]
