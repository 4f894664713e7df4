"""Optimisers, schedules and gradient clipping on lists of tensors; the state lives for one phase of training.

The updates are PyTorch's own (`torch.optim`), as fused multi-tensor operations without the bookkeeping of an optimiser
object: for small models that bookkeeping costs as much as the step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from idiolect.errors import UsageError

Tensors = list[Tensor]


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum, Nesterov's momentum and weight decay."""

    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        _check(0 <= self.momentum < 1, "momentum", "a number in [0, 1)", self.momentum)
        _check(self.weight_decay >= 0, "weight_decay", "a number >= 0", self.weight_decay)
        _check(not self.nesterov or self.momentum > 0, "nesterov", "off, or a momentum above 0", self.nesterov)

    def step_(self, params: Tensors, grads: Tensors, state: dict[str, Any], lr: float) -> None:
        if self.weight_decay:
            grads = list(torch._foreach_add(grads, params, alpha=self.weight_decay))
        if self.momentum:
            if "velocity" not in state:
                state["velocity"] = [g.clone() for g in grads]
            else:
                torch._foreach_mul_(state["velocity"], self.momentum)
                torch._foreach_add_(state["velocity"], grads)
            velocity = state["velocity"]
            grads = list(torch._foreach_add(grads, velocity, alpha=self.momentum)) if self.nesterov else velocity
        torch._foreach_add_(params, grads, alpha=-lr)


@dataclass(frozen=True)
class Adam:
    """Adam; `decoupled` weight decay makes it AdamW."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False

    def __post_init__(self) -> None:
        _check(0 <= self.beta1 < 1, "beta1", "a number in [0, 1)", self.beta1)
        _check(0 <= self.beta2 < 1, "beta2", "a number in [0, 1)", self.beta2)
        _check(self.weight_decay >= 0, "weight_decay", "a number >= 0", self.weight_decay)

    def step_(self, params: Tensors, grads: Tensors, state: dict[str, Any], lr: float) -> None:
        if not state:
            state.update(t=0, m=[torch.zeros_like(p) for p in params], v=[torch.zeros_like(p) for p in params])
        state["t"] += 1
        if self.weight_decay and self.decoupled:
            torch._foreach_mul_(params, 1 - lr * self.weight_decay)
        elif self.weight_decay:
            grads = list(torch._foreach_add(grads, params, alpha=self.weight_decay))
        m, v, t = state["m"], state["v"], state["t"]
        torch._foreach_lerp_(m, grads, 1 - self.beta1)
        torch._foreach_mul_(v, self.beta2)
        torch._foreach_addcmul_(v, grads, grads, value=1 - self.beta2)
        scale = list(torch._foreach_sqrt(v))
        torch._foreach_div_(scale, math.sqrt(1 - self.beta2**t))
        torch._foreach_add_(scale, self.eps)
        torch._foreach_addcdiv_(params, m, scale, value=-lr / (1 - self.beta1**t))


@dataclass(frozen=True)
class Schedule:
    """The learning rate as a function of the global round: `constant`, `exponential` (decay per round), `step` (times
    `decay` after each `every` rounds), `cosine` (from lr to `floor` * lr over the run)."""

    kind: str = "constant"
    decay: float = 0.99
    every: int = 100
    floor: float = 0.0

    def __post_init__(self) -> None:
        known = ("constant", "exponential", "step", "cosine")
        _check(self.kind in known, "schedule", "one of " + ", ".join(known), self.kind)
        _check(0 < self.decay <= 1, "decay", "a number in (0, 1]", self.decay)
        _check(self.every >= 1, "every", "a whole number >= 1", self.every)

    def __call__(self, lr: float, round: int, rounds: int) -> float:
        if self.kind == "exponential":
            return lr * self.decay**round
        if self.kind == "step":
            return lr * self.decay ** (round // self.every)
        if self.kind == "cosine":
            falling = (1 + math.cos(math.pi * min(round, rounds) / max(rounds, 1))) / 2
            return lr * (self.floor + (1 - self.floor) * falling)
        return lr


def clipped(grads: Tensors, limit: float) -> Tensors:
    """Gradients scaled down to a joint norm of at most `limit`."""
    total = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
    scale = (limit / (total + 1e-6)).clamp(max=1.0)
    return [g * scale for g in grads]


def _check(good: bool, name: str, expected: str, found: object) -> None:
    if not good:
        raise UsageError(f"{name} must be {expected}; found {found}.")
