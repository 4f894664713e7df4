from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy, normalize, relu

from idiolect.method import Method, State, Tree, Up, UsageError, linear
from idiolect.tree import gram, unstack

CHOICES = {
    "supervision": ("one", "all", "none"),
    "alignment": ("mse", "sum"),
    "auxiliary": ("linear", "prototype", "none"),
}


@dataclass(frozen=True)
class FedAIMS(Method):
    """FedAIMS. Li et al., Frontiers of Computer Science, 2025, Algorithms 1 and 2: FedPer whose features are drawn to
    global prototypes of the classes, at the last block and at one below it, which the server chooses anew each round.

    `supervision="all"` is FedAIMS-Full, which supervises every block; "none" only the last.
    Departs from the paper: a class's prototype is averaged over the clients that hold it (eq. 4 as it stands shrinks
    those of rare classes); distances are means over dimensions (`alignment="sum"`: sums, eq. 5); a block's
    cross-entropy is that of a private linear classifier (`auxiliary`), of which the paper says nothing; clients send
    which classes they hold, not how many samples of each. No public code is known.
    """

    mu: float = 1.0
    supervision: str = "one"
    alignment: str = "mse"
    auxiliary: str = "linear"
    similarity_every: int = 1
    hidden: int = 64

    def __post_init__(self):
        for field, known in CHOICES.items():
            if (value := getattr(self, field)) not in known:
                raise UsageError(f"FedAIMS.{field} must be one of {', '.join(known)}; found '{value}'.")
        if self.mu < 0 or self.similarity_every < 1 or self.hidden < 1:
            raise UsageError(f"FedAIMS needs mu >= 0, similarity_every >= 1 and hidden >= 1; found {self}.")

    def init(self, net):
        if self.supervision != "none" and len(net.blocks) < 2:
            raise UsageError(
                f"FedAIMS supervises a block below the last, and the network has {len(net.blocks)} in all. Use a "
                "deeper one, or supervision=none."
            )
        prototype = torch.zeros(net.classes, net.features, dtype=net.dtype)
        known = torch.zeros(net.classes, dtype=torch.bool)
        server = {"model": net.body, "prototype": prototype, "known": known}
        client = {"model": net.head, "extra": self.extra(net)}
        if self.supervision != "one":
            return State(server, client)
        never = torch.zeros_like(net.body.drop(net.buffers).flat())  # has no angle: similar to nobody
        return State(server, client, {"block": torch.zeros((), dtype=torch.uint8), "last": never, "compared": never})

    def extra(self, net):
        """What a client keeps for each block j below the last: the adapter and the auxiliary classifier."""
        extra = Tree()
        for j, width in enumerate(net.widths[:-1] if self.supervision != "none" else (), 1):
            extra |= net.linear(f"adapter.{j}.in", net.features, self.hidden)
            extra |= net.linear(f"adapter.{j}.out", self.hidden, width)
            if self.auxiliary == "linear":
                extra |= net.linear(f"auxiliary.{j}", width, net.classes)
        return extra

    # the server

    def plan(self, server, rows, run):
        if self.supervision != "one":
            return server, rows
        blocks = len({name.split(".")[1] for name in server["model"]})  # m, as names begin body.<block>.
        each = [rows[i]["compared"] for i in run.ids]  # [P], of length 1
        similarity = gram(len(each), len(each[0]), lambda part: torch.stack([v[part] for v in each]))
        chosen = supervised(similarity, blocks - 1)
        return server, rows.with_(run.ids, block=torch.tensor(chosen, dtype=torch.uint8))

    def down(self, server, row):
        return {**server, "block": row["block"]} if self.supervision == "one" else server

    def server(self, server, rows, up, run):
        held = up.mean["held"]  # the sum of p_i over those who hold the class, [C]
        prototype = torch.where(held[:, None] > 0, up.mean["prototype"] / held[:, None], server["prototype"])
        if self.supervision == "one":
            rows = rows.with_(run.ids, last=[normalize(body.flat(), dim=0) for body in unstack(up.rows["body"])])
            if (run.round + 1) % self.similarity_every == 0:
                rows = rows.with_(rows, compared=[rows[i]["last"] for i in rows])
        return {"model": up.mean["model"], "prototype": prototype, "known": server["known"] | (held > 0)}, rows

    # the client

    def local(self, me, down, mine):
        body, head, extra, blocks = down["model"], mine["model"], mine["extra"], self.blocks(me, down)
        used = extra.pick(name for name in extra if int(name.split(".")[1]) in blocks)
        prototype = me.sweep(body, self.class_sums) / me.counts.clamp(min=1)[:, None]  # eq. 3
        w = me.train(body | head | used, loss=self.objective, given=(blocks, down["prototype"], down["known"]))
        body = w.pick(body)
        mean = {"model": body, "prototype": prototype, "held": (me.counts > 0).to(prototype.dtype)}
        rows = {"body": body.drop(me.task.net.buffers)} if self.supervision == "one" else {}
        return Up(mean, rows=rows), {"model": w.pick(head), "extra": extra | w.pick(used)}

    def blocks(self, me, down):
        """The blocks below the last that the client supervises now."""
        if self.supervision == "one":
            return (int(down["block"]),)
        return tuple(range(1, len(me.task.net.blocks))) if self.supervision == "all" else ()

    def class_sums(self, task, w, batch):
        return batch.by_class(task.features(w, batch.x), task.classes)

    def objective(self, task, w, batch, blocks, prototype, known):
        """Phi: eq. 12, or eq. 2 where every block is supervised."""
        z = task.blocks(w, batch.x) if blocks else [task.features(w, batch.x)]
        main = task.criterion(task.head(w, z[-1]), batch) + self.distance(prototype, z[-1], batch, known)  # eq. 6
        if not blocks:
            return main
        beside = [self.auxiliary_task(task, w, batch, j, z[j - 1], prototype, known) for j in blocks]
        return main / len(z) + sum(beside) * ((1 - 1 / len(z)) / len(blocks))

    def auxiliary_task(self, task, w, batch, j, z, prototype, known):
        """A^j (eq. 7): the features of block j told apart, and drawn to the adapted prototypes (eq. 8)."""
        target = linear(w, f"adapter.{j}.out", relu(linear(w, f"adapter.{j}.in", prototype)))  # [C, d_j]
        loss = self.distance(target, z, batch, known)
        if self.auxiliary == "linear":
            loss = loss + task.criterion(linear(w, f"auxiliary.{j}", z), batch)
        elif self.auxiliary == "prototype":
            loss = loss + nearness(target, z, batch, known)
        return loss

    def distance(self, target, z, batch, known):
        """mu R: how far features are from the targets of their classes; 0 where the class has none yet."""
        if self.mu == 0:
            return 0.0
        gap = (target[batch.y] - z).square()
        gap = gap.mean(1) if self.alignment == "mse" else gap.sum(1)
        return self.mu * batch.mean(gap * known[batch.y])


def nearness(target, z, batch, known):
    """The cross-entropy of the softmax over minus the squared distances to the targets of the known classes."""
    scores = -(z[:, None] - target).square().sum(2)  # [B, C]
    scores = scores.masked_fill(~known, torch.finfo(scores.dtype).min)  # finite: nothing is known at first
    return batch.mean(torch.where(known[batch.y], cross_entropy(scores, batch.y, reduction="none"), 0.0))


def supervised(similarity, groups):
    """Algorithm 2: for each participant the block, 1 to `groups`, that it supervises."""
    members = [[] for _ in range(groups)]
    for i, row in enumerate(similarity):
        least = min(map(len, members))
        smallest = [g for g in members if len(g) == least]
        min(smallest, key=lambda g: float(row[g].mean()) if g else 0.0).append(i)  # eq. 11; ties: the first
    members.sort(key=len)  # larger groups supervise deeper blocks
    return [1 + next(k for k, g in enumerate(members) if i in g) for i in range(len(similarity))]
