"""GPFL. Zhang et al., ICCV 2023: one shared body feeds two routes through a conditional valve, one guided by
shared class embeddings e_c (the rows of "gce"), one to a private head.

    valve(f, v) = relu((G(v) + 1) * f + D(v)),   G(v) = layernorm(relu(W v + b)) * scale + shift, D likewise
    f_G = valve(f, g), g = the mean of all e_c;   f_P = valve(f, q_i), q_i = sum_c n_ic / n_i e_c
    loss = CE(head(f_P), y) - log softmax_c(cos(f_G, e_c))_y + lam ||f_G - e_y^old||

The last is the norm of the whole batch's matrix, e^old the received table. g and q_i are constants: of the
received table ("received"), or of the client's own as it last trained it, 0 before that ("stale"). Body, table
and valve are averaged, weighted by n_i; table and valve have the weight decay mu besides the world's. The
table begins as N(0, 1). A client predicts with head(valve(z, q_i)); "condition" is the entry of q_i.
`valve` and `guide` are for tests: the valve in place of the above, and a factor of the last two terms.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .fedproto import features
from .world import Result, State, World, average, copy, initial, part, samples, size, train

EPS = 1e-5
CLIP = 1 - 1e-6
Valve = Callable[[State, Tensor, Tensor], Tensor]


class Guided(nn.Module):
    """The network with the table and the parameters of the valve; gives features and itself."""

    def __init__(self, network: nn.Module, beside: State):
        super().__init__()
        self.body, self.head = network.body, network.head
        self.gce = nn.Parameter(beside["gce"].clone())
        self.cov = nn.Module()
        for route in ("gamma", "beta"):
            layer = nn.Module()
            for name in ("weight", "bias", "scale", "shift"):
                layer.register_parameter(name, nn.Parameter(beside[f"cov.{route}.{name}"].clone()))
            self.cov.add_module(route, layer)

    def forward(self, x: Tensor) -> tuple[Tensor, nn.Module]:
        return self.body(x), self


def run(
    world: World,
    lam: float = 0.01,
    mu: float = 0.1,
    condition: str = "received",
    valve: Valve | None = None,
    guide: float = 1.0,
) -> Result:
    beside = tables(world)
    server = {**part(initial(world), "body."), **beside}
    heads = [part(initial(world), "head.") for _ in range(world.clients)]
    own: list[Tensor | None] = [None] * world.clients

    def conditions(i: int) -> tuple[Tensor, Tensor]:
        if condition not in ("received", "stale"):
            raise ValueError(condition)
        table = server["gce"] if condition == "received" else own[i]
        if table is None:
            return torch.zeros_like(server["gce"][0]), torch.zeros_like(server["gce"][0])
        return means(table, samples(world, i)[1])

    for r in range(world.rounds):
        uploads, weights = [], []
        for i in world.participants(r):
            g, q = conditions(i)
            guided = routed(world, beside, server["gce"], g, q, lam, valve or conditional, guide)
            decay = {name: mu if name.startswith(("gce", "cov.")) else 0.0 for name in {**server, **heads[i]}}
            w = train(guided, {**server, **heads[i]}, i, r, correct=lambda name, w, d=decay: d[name] * w)
            heads[i] = part(w, "head.")
            own[i] = w["gce"].clone()
            uploads.append({name: w[name] for name in server})
            weights.append(size(world, i))
        server = average(uploads, weights)
    clients = [{**copy(server), **copy(heads[i]), "condition": conditions(i)[1]} for i in range(world.clients)]
    found = [logits(world, w, samples(world, i)[0], valve) for i, w in enumerate(clients)]
    return Result(server, clients, {"logits": found, "heads": heads})


def tables(world: World) -> State:
    """The initial table and valve."""
    d = initial(world)["head.weight"].shape[1]
    drawn, _ = world.linear("gce", d, world.classes)
    uniform = (math.sqrt(d) * drawn.double()).clamp(-CLIP, CLIP)
    beside = {"gce": math.sqrt(2) * torch.erfinv(uniform)}
    for route in ("gamma", "beta"):
        weight, bias = world.linear(f"cov.{route}", d, d)
        beside[f"cov.{route}.weight"], beside[f"cov.{route}.bias"] = weight.double(), bias.double()
        beside[f"cov.{route}.scale"], beside[f"cov.{route}.shift"] = torch.ones(d).double(), torch.zeros(d).double()
    return beside


def means(table: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """g, the mean of the rows, and q, the mean of the rows of these labels."""
    g = sum(row for row in table) / len(table)
    q = sum(table[int(label)] for label in y) / len(y)
    return g, q


def routed(
    world: World, beside: State, old: Tensor, g: Tensor, q: Tensor, lam: float, valve: Valve, guide: float
) -> World:
    """The world of one phase."""

    def objective(outputs: tuple[Tensor, nn.Module], y: Tensor) -> Tensor:
        f, network = outputs
        w = dict(network.named_parameters())
        f_G = valve(w, f, g)
        guided = angle(f_G, w["gce"], y) + lam * torch.linalg.norm(f_G - old[y])
        loss = world.loss(network.head(valve(w, f, q)), y) + guide * guided
        return loss + 0.0 * sum(p.sum() for p in w.values())  # so that each has a gradient, whatever the valve

    return dataclasses.replace(world, module=lambda: Guided(world.module(), beside), loss=objective)


def conditional(w: State, f: Tensor, v: Tensor) -> Tensor:
    """The valve."""

    def route(name: str) -> Tensor:
        a = torch.relu(w[f"cov.{name}.weight"] @ v + w[f"cov.{name}.bias"])
        a = (a - a.mean()) / torch.sqrt(((a - a.mean()) ** 2).mean() + EPS)
        return a * w[f"cov.{name}.scale"] + w[f"cov.{name}.shift"]

    return torch.relu((route("gamma") + 1) * f + route("beta"))


def angle(f: Tensor, table: Tensor, y: Tensor) -> Tensor:
    """The cross-entropy of the cosines between features and embeddings."""
    cosines = torch.nn.functional.normalize(f) @ torch.nn.functional.normalize(table).T
    chosen = torch.stack([cosines[b, int(label)] for b, label in enumerate(y)])
    return (torch.logsumexp(cosines, 1) - chosen).mean()


def logits(world: World, w: State, x: Tensor, valve: Valve | None = None) -> Tensor:
    """What a client predicts."""
    f_P = (valve or conditional)(w, features(world, w, x), w["condition"])
    return f_P @ w["head.weight"].T + w["head.bias"]
