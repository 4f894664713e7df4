"""FedAIMS. Li et al., "FedAIMS: Adaptive Intermediate Supervision for Personalized Federated Learning", 2025:
shared body, private head, and at each client and round one intermediate block supervised beside the last.

    Phi = lambda (CE(head(z_m), y) + mu R_m) + (1 - lambda) (CE_j + mu R_j),  lambda = 1/m           eq. 12
    R_m = dist(C_g[y], z_m),  R_j = dist(sigma_j(C_g[y]), z_j)                                     eqs. 5, 8

The m blocks are the children of the body that own parameters, numbered from 1. z_j, of d_j channels, is the
mean over the positions of block j's output as it leaves that child; z_m is what the head sees, body(x). C_g
[C, d_m] are the global prototypes. The adapter sigma_j (d_m -> hidden -> d_j, ReLU between) and the
classifier of CE_j (d_j -> C) stay at the client, as the head does.

The body is averaged with p_i proportional to n_i, and so are the clients' prototypes, class by class over
those who hold the class. Blocks are chosen at the start of a round (`assign_blocks`) from the cosines of the
parameters of the bodies that all clients so far last uploaded, as they were at the last refresh: after the
rounds r in which `similarity_every` divides r + 1. The cosine of a pair not seen by then is 0.

- supervision: "one" block, as above; "all": every alpha = 1/m; "none": Phi = CE(head(z_m), y) + mu R_m.
- alignment: dist is the squared difference, averaged over the batch, and averaged ("mse") or summed ("sum")
  over the dimensions. A sample whose class has no global prototype adds 0, but counts in the batch's size.
- auxiliary: CE_j of the "linear" classifier; or of softmax over k of -||z_j - sigma_j(C_g[k])||^2
  ("prototype"), k over the classes that have a prototype, and samples of other classes add 0; or 0 ("none").

What is trained is the body, the head and the parts of the supervised blocks, which weight decay therefore
shrinks even where their gradient is 0. The parts of the other blocks rest.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from .world import Result, State, World, average, fresh, initial, part, samples, size, train, trainable, write


class Supervised(nn.Module):
    """The network with these blocks' adapters and classifiers, and all that the loss needs as output."""

    def __init__(self, world: World, dims: list[int], blocks: list[int], hidden: int, linear: bool, prototypes: Tensor):
        super().__init__()
        network = world.module()
        self.body, self.head = network.body, network.head
        self.adapter, self.auxiliary = nn.ModuleDict(), nn.ModuleDict()
        self.prototypes = prototypes  # a plain attribute: no part of the state, never trained
        for j in blocks:
            inner = layer(world, f"adapter.{j}.in", dims[-1], hidden)
            outer = layer(world, f"adapter.{j}.out", hidden, dims[j - 1])
            self.adapter[str(j)] = nn.ModuleDict({"in": inner, "out": outer})
            if linear:
                self.auxiliary[str(j)] = layer(world, f"auxiliary.{j}", dims[j - 1], world.classes)

    def forward(self, x: Tensor):
        top, features = through(self.body, x)
        logits, targets = {}, {}
        for key, adapter in self.adapter.items():
            targets[int(key)] = adapter["out"](torch.relu(adapter["in"](self.prototypes)))
        for key, classifier in self.auxiliary.items():
            logits[int(key)] = classifier(features[int(key) - 1])
        return self.head(top), features, targets, logits


def run(
    world: World,
    mu: float = 1.0,
    supervision: str = "one",
    alignment: str = "mse",
    auxiliary: str = "linear",
    similarity_every: int = 1,
    hidden: int = 64,
) -> Result:
    assert supervision in ("one", "all", "none")
    assert alignment in ("mse", "sum")
    assert auxiliary in ("linear", "prototype", "none")
    dims = widths(world)
    m = len(dims)
    body = part(initial(world), "body.")
    prototypes = torch.zeros(world.classes, dims[-1], dtype=torch.float64)
    known = [False] * world.classes
    every = list(range(1, m)) if supervision != "none" else []

    def supervised(blocks: list[int]) -> World:
        """The world whose network is the supervised one, with the prototypes of now."""
        linear = auxiliary == "linear"
        return dataclasses.replace(
            world,
            module=lambda: Supervised(world, dims, blocks, hidden, linear, prototypes),
            loss=lambda outputs, y: objective(world, outputs, y, prototypes, known, m, mu, alignment, auxiliary),
        )

    start = initial(supervised(every))
    private = [without_body(start) for _ in range(world.clients)]
    weighed = [name for name in trainable(world) if name.startswith("body.")]
    uploaded: dict[int, Tensor] = {}
    similarity = [[0.0] * world.clients for _ in range(world.clients)]
    chosen = []
    for r in range(world.rounds):
        ids = world.participants(r)
        if supervision == "one" and m > 1:
            blocks = {i: [j] for i, j in assign_blocks(ids, similarity, m - 1).items()}
        else:
            blocks = dict.fromkeys(ids, every)
        chosen.append(blocks)
        bodies, weights, local = [], [], []
        for i in ids:
            local.append(class_means(world, {**body, **part(private[i], "head.")}, i))
            there = supervised(blocks[i])
            w = train(there, {name: {**body, **private[i]}[name] for name in initial(there)}, i, r)
            private[i] = {**private[i], **without_body(w)}
            bodies.append(part(w, "body."))
            weights.append(size(world, i))
            uploaded[i] = torch.cat([w[name].flatten() for name in weighed])
        body = average(bodies, weights)
        prototypes, known = merge(prototypes, known, local, weights)
        if (r + 1) % similarity_every == 0:
            similarity = cosines(uploaded, world.clients)
    clients = [{**body, **part(private[i], "head.")} for i in range(world.clients)]
    extra = {
        "prototypes": prototypes,
        "known": known,
        "blocks": chosen,
        "similarity": similarity,
        "private": private,
    }
    return Result(server=body, clients=clients, extra=extra)


# --- the network and its blocks


def layer(world: World, name: str, inputs: int, outputs: int) -> nn.Linear:
    """A linear layer with the world's initial weights of that name."""
    new = nn.Linear(inputs, outputs, dtype=torch.float64)
    weight, bias = world.linear(name, inputs, outputs)
    with torch.no_grad():
        new.weight.copy_(weight)
        new.bias.copy_(bias)
    return new


def through(body: nn.Sequential, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """body(x), and the feature [B, d_j] of every block on the way."""
    features = []
    for child in body:
        x = child(x)
        if list(child.parameters()):
            feature = x
            while feature.dim() > 2:
                feature = feature.mean(-1)
            features.append(feature)
    features[-1] = x  # the head is linear on the last
    return x, features


def widths(world: World) -> list[int]:
    """d_1 ... d_m."""
    module = fresh(world).eval()
    with torch.no_grad():
        _, features = through(module.body, samples(world, 0)[0][:1])
    return [feature.shape[1] for feature in features]


def without_body(state: State) -> State:
    return {name: tensor.clone() for name, tensor in state.items() if not name.startswith("body.")}


# --- the objective


def objective(
    world: World,
    outputs: tuple[Tensor, list[Tensor], dict[int, Tensor], dict[int, Tensor]],
    y: Tensor,
    prototypes: Tensor,
    known: list[bool],
    m: int,
    mu: float,
    alignment: str,
    auxiliary: str,
) -> Tensor:
    """Phi_i of a batch. `outputs`: the logits, the block features, sigma_j(C_g) and the auxiliary logits."""
    logits, features, targets, auxiliary_logits = outputs
    main = world.loss(logits, y) + mu * distance(features[-1], prototypes, y, known, alignment)
    if not targets:
        return main
    total = main / m
    for j in targets:
        task = mu * distance(features[j - 1], targets[j], y, known, alignment)
        if auxiliary == "linear":
            task = task + nn.functional.cross_entropy(auxiliary_logits[j], y)
        if auxiliary == "prototype":
            task = task + prototype_loss(features[j - 1], targets[j], y, known)
        total = total + (1 - 1 / m) / len(targets) * task  # "one": 1 - lambda; "all": 1/m each
    return total


def distance(z: Tensor, targets: Tensor, y: Tensor, known: list[bool], alignment: str = "mse") -> Tensor:
    """R: squared differences between features z [B, d] and the rows of targets [C, d] of their classes."""
    total = torch.zeros((), dtype=z.dtype)
    for n in range(len(z)):
        k = int(y[n])
        total = total + float(known[k]) * ((targets[k] - z[n]) ** 2).sum()
    if alignment == "mse":
        total = total / z.shape[1]
    return total / len(z)


def prototype_loss(z: Tensor, targets: Tensor, y: Tensor, known: list[bool]) -> Tensor:
    """CE_j without a classifier: softmax over the known classes k of -||z - targets[k]||^2."""
    total = torch.zeros((), dtype=z.dtype)
    for n in range(len(z)):
        if known[int(y[n])]:
            near = {k: -((z[n] - targets[k]) ** 2).sum() for k in range(len(targets)) if known[k]}
            total = total + torch.logsumexp(torch.stack(list(near.values())), 0) - near[int(y[n])]
    return total / len(z)


# --- prototypes


def class_means(world: World, w: State, i: int) -> dict[int, Tensor]:
    """C_i: the mean z_m of each class that client i holds (eq. 3), in eval mode, of the received body."""
    module = fresh(world)
    write(module, w)
    module.eval()
    x, y = samples(world, i)
    with torch.no_grad():
        feature = through(module.body, x)[1][-1]
    return {int(k): feature[y == k].mean(0) for k in y.unique()}


def merge(
    old: Tensor, known: list[bool], local: list[dict[int, Tensor]], weights: list[float]
) -> tuple[Tensor, list[bool]]:
    """C_g after a round: for each class the p_i-weighted mean over those who hold it; else as it was."""
    new, known = old.clone(), list(known)
    for k in range(len(old)):
        held = [(weight, means[k]) for weight, means in zip(weights, local, strict=True) if k in means]
        if held:
            total = sum(weight for weight, _ in held)
            new[k] = sum(weight / total * mean for weight, mean in held)
            known[k] = True
    return new, known


# --- which block a client supervises


def cosines(bodies: dict[int, Tensor], clients: int) -> list[list[float]]:
    """The cosine of every pair of flattened bodies; 0 where a client of the pair has none."""
    similarity = [[0.0] * clients for _ in range(clients)]
    for i, u in bodies.items():
        for j, v in bodies.items():
            similarity[i][j] = float(u @ v / (u.norm() * v.norm()))
    return similarity


def assign_blocks(participants: list[int], similarity: list[list[float]], groups: int) -> dict[int, int]:
    """Algorithm 2: participant -> block, 1 ... groups. `similarity[i][j]` is of clients; 0 if unknown."""
    members: list[list[int]] = [[] for _ in range(groups)]
    for i in participants:
        smallest = min(len(group) for group in members)
        best, least = None, None
        for g in range(groups):
            if len(members[g]) > smallest:
                continue
            delta = 0.0  # eq. 11; an empty group counts 0
            for j in members[g]:
                delta += float(similarity[i][j]) / len(members[g])
            if least is None or delta < least:
                best, least = g, delta
        members[best].append(i)
    blocks = {}
    block = 0
    for scale in range(len(participants) + 1):  # sizes ascending; among equal sizes the earlier group first
        for group in members:
            if len(group) == scale:
                block += 1
                for i in group:
                    blocks[i] = block
    return blocks
