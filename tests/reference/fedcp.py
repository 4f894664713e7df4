"""FedCP. Zhang et al., KDD 2023: a policy splits every feature vector f = body(x) into a part r * f for the
client's private head and a part s * f for the shared one, which is frozen in training.

    o = relu(layernorm(W (f * k) + b) * scale + shift) as [2, d];  (r, s) = softmax over the pair of o + noise
    loss = CE(head(r * f) + global(s * f), y) + lam * MMD(f, f^t),  f^t of the received body in eval mode

k is the sum of the rows of the private head's weight, divided by its norm; constant in a round. The noise is
Gumbel's, in training alone. MMD is the mean over all pairs of the batch of K(f, f) + K(f^t, f^t) - 2 K(f, f^t),
K the sum over a in 10, 15, 20, 50 of exp(-squared distance / (2 a)).

Body, policy and global head are averaged, weighted by n_i; what a client sends as the global head is the mean
of the one that it received and its own. It predicts with everything received and its own head and k.
`split` is for tests, a function of f giving r and s in place of the policy; where s is 0 the global head, of
which the bias would remain, is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .fedproto import features
from .world import Result, State, World, average, copy, fresh, initial, part, samples, size, train, write

EPS = 1e-5
WIDTHS = (10, 15, 20, 50)
LEAST = 2.0**-53
Split = Callable[[Tensor], tuple[float, float]]


class Policed(nn.Module):
    """The network with policy and global head; gives features and itself, and the input."""

    def __init__(self, network: nn.Module, beside: State):
        super().__init__()
        self.body, self.head = network.body, network.head
        for child in ("global", "policy"):
            layer = nn.Module()
            for name, value in beside.items():
                if name.startswith(child + "."):
                    layer.register_parameter(name.removeprefix(child + "."), nn.Parameter(value.clone()))
            self.add_module(child, layer)

    def forward(self, x: Tensor) -> tuple[Tensor, nn.Module, Tensor]:
        return self.body(x), self, x


def run(world: World, lam: float = 5.0, noise: bool = True, split: Split | None = None) -> Result:
    beside = initial_policy(world)
    server = {**part(initial(world), "body."), **beside}
    heads = [part(initial(world), "head.") for _ in range(world.clients)]
    for r in range(world.rounds):
        uploads, weights = [], []
        for i in world.participants(r):
            gumbel = drawn(world, r, i) if noise else None
            policed = divided(world, beside, server, heads[i], lam, gumbel, split)
            w = train(policed, {**server, **heads[i]}, i, r, only=("body.", "head.", "policy."))
            heads[i] = part(w, "head.")
            for name in ("weight", "bias"):
                w[f"global.{name}"] = (w[f"head.{name}"] + w[f"global.{name}"]) / 2
            uploads.append({name: w[name] for name in server})
            weights.append(size(world, i))
        server = average(uploads, weights)
    clients = [{**copy(server), **copy(heads[i])} for i in range(world.clients)]
    found = [logits(world, w, samples(world, i)[0], split) for i, w in enumerate(clients)]
    return Result(server, clients, {"logits": found})


def initial_policy(world: World) -> State:
    """The initial global head, which is the head, and policy."""
    head = part(initial(world), "head.")
    d = head["head.weight"].shape[1]
    weight, bias = world.linear("policy", d, 2 * d)
    return {
        "global.weight": head["head.weight"],
        "global.bias": head["head.bias"],
        "policy.weight": weight.double(),
        "policy.bias": bias.double(),
        "policy.scale": torch.ones(2 * d).double(),
        "policy.shift": torch.zeros(2 * d).double(),
    }


def drawn(world: World, r: int, i: int) -> Callable[[int, int], Tensor]:
    """The noise of one phase, step by step: [B, 2, d]."""
    generator = world.draw("gumbel", r, i)

    def step(B: int, d: int) -> Tensor:
        u = torch.from_numpy(generator.random((B, 2, d))).clamp(min=LEAST)
        return -torch.log(-torch.log(u))

    return step


def divided(
    world: World,
    beside: State,
    received: State,
    head: State,
    lam: float,
    gumbel: Callable[[int, int], Tensor] | None,
    split: Split | None,
) -> World:
    """The world of one phase."""
    frozen = fresh(world)
    write(frozen, {**part(received, "body."), **head})
    frozen.eval()
    k = context(head["head.weight"])

    def objective(outputs: tuple[Tensor, nn.Module, Tensor], y: Tensor) -> Tensor:
        f, network, x = outputs
        w = dict(network.named_parameters())
        noise = 0.0 if gumbel is None else gumbel(*f.shape)
        r, s = split(f) if split else policy(w, f, k, noise)
        with torch.no_grad():
            before = frozen.body(x)
        loss = world.loss(predicted(w, f, r, s), y) + lam * discrepancy(f, before)
        return loss + 0.0 * sum(p.sum() for p in w.values())  # so that each has a gradient, whatever the split

    return dataclasses.replace(world, module=lambda: Policed(world.module(), beside), loss=objective)


def context(weight: Tensor) -> Tensor:
    """k of a head."""
    total = sum(row for row in weight)
    return total / total.norm().clamp(min=1e-12)


def policy(w: State, f: Tensor, k: Tensor, noise: Tensor | float) -> tuple[Tensor, Tensor]:
    """r and s, each [B, d], whose sum is one."""
    a = (f * k) @ w["policy.weight"].T + w["policy.bias"]
    centred = a - a.mean(1, keepdim=True)
    a = centred / torch.sqrt((centred**2).mean(1, keepdim=True) + EPS)
    o = torch.relu(a * w["policy.scale"] + w["policy.shift"])
    d = f.shape[1]
    scores = torch.stack([o[:, :d], o[:, d:]], 1) + noise
    shares = scores.exp() / scores.exp().sum(1, keepdim=True)
    return shares[:, 0], shares[:, 1]


def predicted(w: State, f: Tensor, r: Tensor | float, s: Tensor | float) -> Tensor:
    own = (r * f) @ w["head.weight"].T + w["head.bias"]
    if isinstance(s, float) and s == 0:
        return own
    return own + (s * f) @ w["global.weight"].T + w["global.bias"]


def discrepancy(f: Tensor, g: Tensor) -> Tensor:
    """MMD of two sets of as many rows."""

    def kernel(u: Tensor, v: Tensor) -> Tensor:
        D = ((u[:, None] - v[None]) ** 2).sum(2)
        return sum(torch.exp(-D / (2 * a)) for a in WIDTHS)

    return (kernel(f, f) + kernel(g, g) - 2 * kernel(f, g)).mean()


def logits(world: World, w: State, x: Tensor, split: Split | None = None) -> Tensor:
    """What a client predicts: no noise."""
    f = features(world, w, x)
    r, s = split(f) if split else policy(w, f, context(w["head.weight"]), 0.0)
    return predicted(w, f, r, s)
