"""FedSimSup, Algorithm 1: logits q_theta(x) + q_s(x) of two networks side by side. The supervisor s stays at
the client; of the inter-learning model theta the server keeps one for every client.

Client: tau_s epochs train s with theta frozen (order 0), then tau_theta epochs train theta with s frozen
(order 1); the frozen one is in eval mode. Server, after the round t = r + 1 = 1, 2, ... with participants S,
|S| = K: theta_i of a participant is what it returned; every other client's (eqs. 7 to 10) is

    theta_i <- (1 - a) theta_i + a sum_{j in S} s_ij theta_j / sum_{j in S} s_ij,        a = lambda_i beta_t,
    lambda_i = M / (M + K m_i),  M = sum_{j in S} m_j,  beta_t = 1 if t < C T^gamma else (C T^gamma / t)^2

with s_ij the cosine of the label proportions; if every s_ij is 0 nothing changes. Buffers are mixed too.

- similarity=False: every s_ij is 1, so others learn from the plain average of S, with the same a.
- structure="serial": one network; theta is its body and s is its head.
- supervisor: what makes a supervisor, a module with its initial weights; or a list of these, one per client.
  None is `world.supervisor`, which a world used so must have.

A client's state has "theta.<name>" and "supervisor.<name>", with the names of each network's own state
(serial: "theta.body..." and "supervisor.head..."). `Result.server` is empty; see `extra["theta"]`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .world import Result, State, World, copy, initial, part, samples, size, train


class Parallel(nn.Module):
    """Two networks whose logits are added."""

    def __init__(self, theta: nn.Module, supervisor: nn.Module):
        super().__init__()
        self.theta, self.supervisor = theta, supervisor

    def forward(self, x: Tensor) -> Tensor:
        return self.theta(x) + self.supervisor(x)


def run(
    world: World,
    tau_s: int = 1,
    tau_theta: int = 1,
    C: float = 40,
    gamma: float = 3 / 7,
    T: int | None = None,
    similarity: bool = True,
    structure: str = "parallel",
    supervisor: Callable[[], nn.Module] | list[Callable[[], nn.Module]] | None = None,
) -> Result:
    assert structure in ("parallel", "serial")
    T = world.rounds if T is None else T
    worlds = [local_world(world, i, structure, supervisor) for i in range(world.clients)]
    shared, private = ("theta.", "supervisor.") if structure == "parallel" else ("body.", "head.")
    theta = [part(initial(worlds[i]), shared) for i in range(world.clients)]
    own = [part(initial(worlds[i]), private) for i in range(world.clients)]
    proportions = [label_proportions(samples(world, i)[1], world.classes) for i in range(world.clients)]
    for r in range(world.rounds):
        uploads = {}
        for i in world.participants(r):
            w = train(worlds[i], {**theta[i], **own[i]}, i, r, only=private, order=0, epochs=tau_s)
            w = train(worlds[i], w, i, r, only=shared, order=1, epochs=tau_theta)
            own[i] = part(w, private)
            uploads[i] = part(w, shared)
        sizes = {j: size(world, j) for j in uploads}
        for i in range(world.clients):
            if i in uploads:
                theta[i] = copy(uploads[i])
            else:
                s = {j: cosine(proportions[i], proportions[j]) if similarity else 1.0 for j in uploads}
                a = lam(size(world, i), list(sizes.values())) * beta(r + 1, C, T, gamma)
                theta[i] = mix(theta[i], uploads, s, a)
    named_theta = [renamed(state, shared, structure, "theta.") for state in theta]
    named_own = [renamed(state, private, structure, "supervisor.") for state in own]
    clients = [{**copy(u), **v} for u, v in zip(named_theta, named_own, strict=True)]
    return Result(server={}, clients=clients, extra={"theta": named_theta, "proportions": proportions})


def local_world(world: World, i: int, structure: str, supervisor) -> World:
    """The world with the whole network of client i."""
    if structure == "serial":
        return world
    make = world.supervisor if supervisor is None else supervisor
    make = make[i] if isinstance(make, list) else make
    return dataclasses.replace(world, module=lambda: Parallel(world.module(), make()))


def renamed(state: State, prefix: str, structure: str, name: str) -> State:
    """The state under "theta." or "supervisor.", where the parallel networks' entries are already."""
    return state if structure == "parallel" else {name + entry: tensor for entry, tensor in state.items()}


def label_proportions(y: Tensor, classes: int) -> list[float]:
    """The share of each class among the labels."""
    return [sum(1 for label in y if int(label) == k) / len(y) for k in range(classes)]


def cosine(u: list[float], v: list[float]) -> float:
    dot = sum(a * b for a, b in zip(u, v, strict=True))
    return dot / (sum(a * a for a in u) * sum(b * b for b in v)) ** 0.5


def lam(m: int, sizes: list[int]) -> float:
    """lambda_i (eq. 9) of a client with m samples, where the participants have these sizes."""
    M = sum(sizes)
    return M / (M + len(sizes) * m)


def beta(t: int, C: float, T: int, gamma: float) -> float:
    """beta_t (eq. 10), t = 1, 2, ..."""
    bound = C * T**gamma
    return 1.0 if t < bound else (bound / t) ** 2


def mix(theta: State, uploads: dict[int, State], s: dict[int, float], a: float) -> State:
    """Eq. 7: part a of the way from theta to the mean of the uploads, weighted by s."""
    total = sum(s.values())
    if total == 0:
        return copy(theta)
    mixed = {}
    for name in theta:
        mean = torch.zeros_like(theta[name])
        for j in uploads:
            mean = mean + s[j] / total * uploads[j][name]
        mixed[name] = (1 - a) * theta[name] + a * mean
    return mixed
