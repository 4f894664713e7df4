"""FedPHP. Li, Zhan, Shao, Li and Song, ECML-PKDD 2021: FedAvg, and at each client an inherited private model q_i
that teaches the received copy, inherits from it afterwards, and is what the client predicts with.

    loss = (1 - lam) CE(w) + lam R
    q_i <- mu_i q_i + (1 - mu_i) w_i,  mu_i = mu min(1, z_i / max(1, expected))    parameters and buffers alike

q_i starts as w^0, is frozen while it teaches, and in eval mode. z_i counts the client's earlier participations;
`expected` is how many it will have, by default rounds * (participants of this round) / clients.

    "kd":   R = mean of -sum_c softmax(logits_q / temperature)_c log softmax(logits_w)_c
    "mmd":  R = mean over i, j of k(s_i, s_j) + k(t_i, t_j) - k(s_i, t_j) - k(t_i, s_j)
            k(a, b) = sum_{n = -2 .. 2} exp(-||a - b||^2 / (2^n h))

where s and t are the batch's features under w and q, and h is the mean squared distance of two different ones among
the 2 B of them, at least 1e-12, taken as a constant.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from .world import Result, World, average, copy, fresh, initial, size, train, write


class Taught(nn.Module):
    """The network; its output is the logits and features of its own and of the teacher, which is not part of it."""

    def __init__(self, network: nn.Module, teacher: nn.Module):
        super().__init__()
        self.body, self.head = network.body, network.head
        self.teacher = [teacher]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with torch.no_grad():
            t = self.teacher[0].body(x)
            q = self.teacher[0].head(t)
        s = self.body(x)
        return self.head(s), s, q, t


def run(
    world: World,
    lam: float = 0.05,
    mu: float = 0.9,
    transfer: str = "mmd",
    temperature: float = 4.0,
    expected: float | None = None,
) -> Result:
    assert transfer in ("mmd", "kd")

    def objective(outputs: tuple[Tensor, Tensor, Tensor, Tensor], y: Tensor) -> Tensor:
        logits, s, q, t = outputs
        R = mmd(s, t) if transfer == "mmd" else distillation(logits, q, temperature)
        return (1 - lam) * world.loss(logits, y) + lam * R

    def taught_by(state) -> World:
        teacher = fresh(world)
        write(teacher, state)
        teacher.eval()
        return dataclasses.replace(world, module=lambda: Taught(world.module(), teacher), loss=objective)

    server = initial(world)
    q = [initial(world) for _ in range(world.clients)]
    visits = [0] * world.clients
    for r in range(world.rounds):
        uploads, weights = [], []
        participants = world.participants(r)
        for i in participants:
            w = train(taught_by(q[i]), server, i, r)
            often = world.rounds * len(participants) / world.clients if expected is None else expected
            kept = mu * min(1.0, visits[i] / max(1.0, often))
            q[i] = {name: kept * q[i][name] + (1 - kept) * w[name] for name in w}
            visits[i] += 1
            uploads.append(w)
            weights.append(size(world, i))
        server = average(uploads, weights)
    return Result(server=copy(server), clients=q, extra={"visits": visits})


def distillation(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Cross-entropy of the softened teacher and the unsoftened student, a mean over the batch."""
    return -((teacher / temperature).softmax(1) * logits.log_softmax(1)).sum(1).mean()


def mmd(s: Tensor, t: Tensor) -> Tensor:
    """The squared maximum mean discrepancy of two batches of features [B, d]."""
    count = len(s)
    both = torch.cat([s, t])
    distance = torch.stack([torch.stack([((a - b) ** 2).sum() for b in both]) for a in both])
    h = max(float(distance.detach().sum()) / (4 * count**2 - 2 * count), 1e-12)
    kernel = sum(torch.exp(-distance / (h * 2.0**n)) for n in range(-2, 3))
    ss, tt = kernel[:count, :count], kernel[count:, count:]
    st, ts = kernel[:count, count:], kernel[count:, :count]
    return (ss + tt - st - ts).mean()
