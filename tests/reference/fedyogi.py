"""FedYogi. Reddi et al., ICLR 2021, Algorithm 2: FedAdam, but v <- v - (1 - beta2) D^2 sign(v - D^2)."""

from __future__ import annotations

from .fedadam import adaptive
from .world import Result, World


def run(world: World, server_lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> Result:
    return adaptive(world, lambda v, D: v - (1 - beta2) * D**2 * (v - D**2).sign(), server_lr, beta1, tau)
