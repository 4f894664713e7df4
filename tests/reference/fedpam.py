"""FedPAM. "FedPAM: Bridging Local Divergence in Federated Learning via Personalized Adjustment Matrix":
FedAvg, beside which each client learns a matrix P_k [d, d], identity at first, that it never sends.

    F_k = CE(W z + b, y) + lam PCL,  z = body(x)                                                     eq. 3.4
    PCL = mean_i -log( e(z_i.w_{y_i}) / (sum_c e(z_i.w_c) + sum_{j: y_j != y_i} e(z_i.z_j)) )        eq. 3.3

where e(s) = exp(s / tau), and features z_i and anchors w_c, the rows of W P_k, are divided by their norm, or
by 1e-8 if that is larger. Body, W, b and P_k are trained together, by one SGD with the world's momentum and
weight decay, which acts on P_k too. Body and head are averaged, weighted by n_i.

- pam=False: P_k stays the identity.
- contrast=False: F_k = CE(W z + b, y) + CE(W P_k z, y), without lam, and without bias in the second.

A client predicts with W P_k z, the entry "adjust" being P_k; W, b and the body are the received ones.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from .world import Result, World, average, copy, initial, size, train

FLOOR = 1e-8


class Adjusted(nn.Module):
    """The network with P, a parameter or a constant, and as its output all that the loss needs."""

    def __init__(self, network: nn.Module, trained: bool):
        super().__init__()
        self.body, self.head = network.body, network.head
        identity = torch.eye(network.head.in_features)
        if trained:
            self.adjust = nn.Parameter(identity)
        else:
            self.register_buffer("adjust", identity)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = self.body(x)
        return self.head(z), z, self.head.weight @ self.adjust


def run(world: World, lam: float = 30.0, tau: float = 0.5, pam: bool = True, contrast: bool = True) -> Result:
    def objective(outputs: tuple[Tensor, Tensor, Tensor], y: Tensor) -> Tensor:
        logits, z, anchors = outputs
        second = lam * contrastive(z, anchors, y, tau) if contrast else world.loss(z @ anchors.T, y)
        return world.loss(logits, y) + second

    adjusted = dataclasses.replace(world, module=lambda: Adjusted(world.module(), pam), loss=objective)
    server = initial(world)
    P = [initial(adjusted)["adjust"] for _ in range(world.clients)]
    for r in range(world.rounds):
        uploads, weights = [], []
        for i in world.participants(r):
            w = train(adjusted, {**server, "adjust": P[i]}, i, r)
            P[i] = w.pop("adjust")
            uploads.append(w)
            weights.append(size(world, i))
        server = average(uploads, weights)
    clients = [{**copy(server), "adjust": P[i].clone()} for i in range(world.clients)]
    return Result(server=server, clients=clients, extra={"P": P})


def contrastive(z: Tensor, anchors: Tensor, y: Tensor, tau: float) -> Tensor:
    """PCL of one batch: features z [B, d], anchors W P [C, d], labels y [B]."""
    total = torch.zeros((), dtype=z.dtype)
    features, anchors = [unit(row) for row in z], [unit(row) for row in anchors]
    for i in range(len(z)):
        against = [features[i] @ anchor / tau for anchor in anchors]
        positive = against[int(y[i])]
        for j in range(len(z)):
            if y[j] != y[i]:
                against.append(features[i] @ features[j] / tau)
        total = total + torch.logsumexp(torch.stack(against), 0) - positive
    return total / len(z)


def unit(v: Tensor) -> Tensor:
    """v divided by its norm, or by the floor where the norm is smaller."""
    return v / v.norm().clamp_min(FLOOR)


def adjusted_logits(z: Tensor, weight: Tensor, P: Tensor) -> Tensor:
    """(W P) z for every row of z: what a client predicts with."""
    return torch.stack([(weight @ P) @ row for row in z])


def cosine_logits(z: Tensor, weight: Tensor, P: Tensor) -> Tensor:
    """The same with anchors and features of length 1, which is what PCL trains."""
    return torch.stack([torch.stack([unit(row) @ unit(anchor) for anchor in weight @ P]) for row in z])
