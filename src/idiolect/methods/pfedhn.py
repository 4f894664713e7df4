from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import relu

from idiolect.method import Method, State, Tree, Up, UsageError, gradient, linear

LEAST_OF = {"embedding": 1, "hidden": 1, "layers": 1, "server_lr": 0, "server_momentum": 0, "server_weight_decay": 0}


@dataclass(frozen=True)
class PFedHN(Method):
    """PFedHN. Shamsian et al., ICML 2021, Algorithm 1: no model is shared. The server has a network that makes each
    client's weights out of a vector, the client's embedding, and learns both by how the client's training moved them.

    Departs from the paper: several clients take part in a round, and the network's gradient is their mean; statistics
    of normalisation are not made but averaged. From the public code: an embedding moves when its client takes part,
    without momentum; every layer below the outputs has a ReLU, and `layers` counts all of them; no gradient is clipped
    but as the run says.
    """

    embedding: int | None = None  # 1 + N // 4
    hidden: int = 100
    layers: int = 3
    server_lr: float = 0.01
    server_momentum: float = 0.9
    server_weight_decay: float = 1e-3

    def __post_init__(self):
        for field, least in LEAST_OF.items():
            if (value := getattr(self, field)) is not None and not value >= least:
                raise UsageError(f"PFedHN.{field} must be at least {least}; found {value}.")
        if self.server_momentum >= 1:
            raise UsageError(f"PFedHN.server_momentum must be below 1; found {self.server_momentum}.")

    def init(self, net):
        hyper, width = Tree(), self.embedding or 1 + net.clients // 4
        row = {"embedding": torch.zeros(width, dtype=net.dtype)}
        for k in range(1, self.layers + 1):
            hyper, width = hyper | net.linear(f"hyper{k}", width, self.hidden), self.hidden
        for name, value in net.trainable.items():
            hyper |= net.linear(f"out:{name}", width, value.numel())
        shapes = Tree({name: torch.tensor(value.shape, dtype=torch.long) for name, value in net.trainable.items()})
        buffers = net.weights.drop(net.trainable)
        server = {"hyper": hyper, "velocity": hyper.zeros(), "shapes": shapes, "buffers": buffers}
        return State(server=server, rows=row)

    def plan(self, server, rows, run):
        if rows.written:
            return server, rows
        every, like = range(run.num_clients), rows.template["embedding"]
        drawn = [torch.from_numpy(run.draw("embedding", i).standard_normal(len(like))) for i in every]
        return server, rows.with_(every, embedding=torch.stack(drawn).to(like.dtype))

    def made(self, hyper, v, names):
        """theta = h(v; phi), each of its entries as one vector; of several v: [K, ...]."""
        for k in range(1, self.layers + 1):
            v = relu(linear(hyper, f"hyper{k}", v))
        return Tree({name: linear(hyper, f"out:{name}", v) for name in names})

    def down(self, server, row):
        shapes = server["shapes"]
        theta = self.made(server["hyper"], row["embedding"], shapes)
        theta = Tree({name: value.view(shapes[name].tolist()) for name, value in theta.items()})
        return {"model": theta, "buffers": server["buffers"]}

    def local(self, me, down, mine):
        w = me.train(down["model"] | down["buffers"])
        return Up(rows={"model": w.pick(down["model"])}, mean={"buffers": w.pick(down["buffers"])}, weight=1), mine

    def server(self, server, rows, up, run):
        phi, v, names = server["hyper"], rows.stack("embedding", run.ids), server["shapes"]
        trained = up.rows["model"].map(lambda w: w.reshape(len(v), -1))
        delta = (trained - self.made(phi, v, names)) / len(v)

        def against(w):  # its gradient is that of h at all v, times -delta
            return -delta.dot(self.made(w, w["embedding"], names))

        g = gradient(against, phi | {"embedding": v})
        decay = self.server_weight_decay
        velocity = server["velocity"] * self.server_momentum + g.pick(phi) + phi * decay
        own = len(v) * g["embedding"]  # not a mean: each is its client's
        rows = rows.with_(run.ids, embedding=v - self.server_lr * (own + decay * v))
        return {**server, "hyper": phi - velocity * self.server_lr, "velocity": velocity, **up.mean}, rows

    def personal(self, me, down, mine):
        return down["model"] | down["buffers"]
