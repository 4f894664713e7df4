from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from idiolect.method import Method, State, Up, UsageError, gradient

BATCHES = {"fo": 2, "hf": 3, "exact": 3}  # of a step: D, D' and, for the curvature, D''
GRADIENTS = {"fo": 2, "hf": 4, "exact": 4}  # in a step; a product with the Hessian counts as two


@dataclass(frozen=True)
class PerFedAvg(Method):
    """Per-FedAvg. Fallah et al., NeurIPS 2020, Algorithm 1: FedAvg whose local loss is that
    of the model after one step of SGD, F(w - alpha grad F(w)); a client predicts after such a step.

    `variant` says how the curvature in that loss's gradient is taken: "fo" leaves it out, "hf" (Hessian-free) is
    the difference of two gradients, "exact" differentiates twice.
    Departs from the paper: alpha is the round's learning rate, and beta a tenth of that, unless given; the number
    of steps is that of the batches in the run's epochs, 2 or 3 to a step; `weights="samples"` weighs clients by
    samples. From the public code: a client trains once in a round; its batches are ordinary ones, so that small
    clients train; the step before predicting is taken by a copy, and normalisation statistics follow the adapted
    model.
    """

    variant: str = "fo"
    alpha: float | None = None
    beta: float | None = None
    delta: float = 1e-3
    weights: str = "uniform"

    def __post_init__(self):
        for name, known in (("variant", tuple(BATCHES)), ("weights", ("uniform", "samples"))):
            if getattr(self, name) not in known:
                raise UsageError(f"PerFedAvg.{name} must be one of {', '.join(known)}; found '{getattr(self, name)}'.")
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            if not (value is None or value >= 0):
                raise UsageError(f"PerFedAvg.{name} must be at least 0, or none; found {value}.")
        if not self.delta > 0:
            raise UsageError(f"PerFedAvg.delta must be above 0; found {self.delta}.")

    def init(self, net):
        return State(server={"model": net.weights})

    def inner_lr(self, me):
        return me.lr if self.alpha is None else self.alpha

    def slope(self, task, w, batch, at, decay):
        """The gradient of the batch's loss where the trained entries are these."""
        return gradient(lambda v: task.loss(w | v, batch), at) + decay * at

    def curved(self, task, w, batch, at, v, decay):
        """The Hessian where the trained entries are these, times v."""
        if self.variant == "exact":
            slope = torch.func.grad(lambda u: task.loss(w | u, batch))
            return torch.func.grad(lambda u: slope(u).dot(v))(at) + decay * v
        with torch.random.fork_rng():  # both see the same dropout
            ahead = self.slope(task, w, batch, at + self.delta * v, decay)
        behind = self.slope(task, w, batch, at - self.delta * v, decay)
        return (ahead - behind) / (2 * self.delta)

    def meta(self, task, w, batches, beta, alpha, decay):
        here = w.drop(task.net.buffers)
        still = w.detach()  # not the buffers in training: the pass at the adapted model alone moves those
        adapted = here - alpha * self.slope(task, still, batches[0], here, decay)
        v = self.slope(task, w, batches[1], adapted, decay)
        if self.variant != "fo":
            v = v - alpha * self.curved(task, still, batches[2], here, v, decay)  # (I - alpha H) v
        return here - beta * v

    def local(self, me, down, mine):
        k, beta = BATCHES[self.variant], 0.1 * me.lr if self.beta is None else self.beta
        epochs = max(me.epochs, math.ceil(k / me.steps(1)))  # at least one step
        w = me.train(
            down["model"],
            step=self.meta,
            given=(self.inner_lr(me), me.weight_decay),
            per_step=k,
            gradients=GRADIENTS[self.variant] / k,
            epochs=epochs,
            lr=beta,
        )
        return Up(mean={"model": w}, weight=1 if self.weights == "uniform" else None), mine

    def personal(self, me, down, mine):
        return me.train(down["model"], epochs=1, steps=1, lr=self.inner_lr(me), order=8)

    def check(self, run):
        unfit = {run.optimizer: run.optimizer != "sgd", "momentum": run.momentum, "clipping": run.clip is not None}
        if any(unfit.values()):
            raise UsageError(
                "PerFedAvg's loss is that of the model after a step of plain SGD; found "
                f"{' and '.join(k for k, on in unfit.items() if on)}. Set momentum=0, no clip, optimizer sgd."
            )
