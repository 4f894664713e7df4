from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import sqrt

import torch
from torch.nn.functional import normalize

from idiolect.method import Method, State, Tree, Up, UsageError
from idiolect.tree import unstack

NEVER = -1.0  # the size of a client of which nothing is known yet


@dataclass(frozen=True)
class CFL(Method):
    """CFL. Sattler, Müller and Samek, TNNLS 2020, Algorithms 1 to 3: FedAvg within clusters. All begin
    in one; a cluster that has come to rest while single members still move is split in two, such that updates on
    different sides point as far apart as they can.

    Departs from the paper: of members that are away the last known update counts, and no cluster is split before all of
    its members are known. From the public code: both parts go on from the mean of the whole cluster in this round; the
    bipartition is the optimal one, not that of complete linkage; means are by samples; a cluster of two may be split.
    """

    eps1: float = 0.4
    eps2: float = 1.6
    gamma: float = 0.0

    def __post_init__(self):
        for field in ("eps1", "eps2", "gamma"):
            if not (value := getattr(self, field)) >= 0:
                raise UsageError(f"CFL.{field} must be at least 0; found {value}.")

    def init(self, net):
        size = torch.tensor(NEVER, dtype=torch.float64)
        row = {"cluster": torch.tensor(0), "size": size, "update": net.trainable.zeros()}
        return State(server={"initial": net.weights, "clusters": Tree()}, rows=row)  # below 0., 1., ...

    def down(self, server, row):
        return {"model": model(server, row["cluster"])}

    def local(self, me, down, mine):
        return Up(rows={"model": me.train(down["model"])}), mine

    def server(self, server, rows, up, run):
        trained = zip(run.ids, unstack(up.rows["model"]), strict=True)
        updates = {i: w - model(server, rows[i]["cluster"]) for i, w in trained}
        told = [update.pick(rows.template["update"]) for update in updates.values()]  # without buffers
        rows = rows.with_(run.ids, update=told, size=torch.tensor(run.weights, dtype=torch.float64))
        clusters = members(rows, run.num_clients)
        for c in sorted({int(rows[i]["cluster"]) for i in run.ids}):
            here = [i for i in clusters[c] if i in updates]
            w = model(server, c) + mean([updates[i] for i in here], [float(rows[i]["size"]) for i in here])
            server = kept(server, c, w)
            if leaving := self.leaving(rows, clusters[c]):
                new = len(server["clusters"]) // len(w)
                server = kept(server, new, w)
                rows = rows.with_(leaving, cluster=[torch.tensor(new)] * len(leaving))
        return server, rows

    def leaving(self, rows, ids):
        """Who leaves a cluster of these members: if it is to be split, those not on the side of the first."""
        updates, sizes = [rows[i]["update"] for i in ids], [float(rows[i]["size"]) for i in ids]
        if len(ids) < 2 or NEVER in sizes or not mean(updates, sizes).norm() < self.eps1:
            return []
        flat = torch.stack([update.flat() for update in updates])  # [m, P]
        if not flat.norm(dim=1).max() > self.eps2:
            return []
        cosines = normalize(flat) @ normalize(flat).T
        other = sides(cosines)
        across = float(cosines[~other][:, other].max())
        if not sqrt(max(0.0, 1 - across) / 2) > self.gamma:
            return []
        return [i for i, leaves in zip(ids, other.tolist(), strict=True) if leaves]


def model(server, cluster):
    """The weights of a cluster; before the first reply there is one alone."""
    return server["clusters"].under(str(int(cluster))) if server["clusters"] else server["initial"]


def kept(server, cluster, w):
    """The server's slots with these weights of a cluster, which may be a new one."""
    return {**server, "clusters": server["clusters"] | w.prefixed(str(cluster))}


def members(rows, clients):
    """The clients of each cluster, ascending."""
    found = defaultdict(list)
    for i in range(clients):
        found[int(rows[i]["cluster"])].append(i)
    return found


def mean(updates, sizes):
    """By samples; 0 where there are none."""
    total, found = max(sum(sizes), 1.0), updates[0].zeros()
    for update, size in zip(updates, sizes, strict=True):
        found = found + update * (size / total)
    return found


def sides(cosines):
    """The bipartition whose sides' largest cosine is the least, as who is not on the first one's side: the most similar
    pairs are joined, one after another, until two groups are left. [m]"""
    m = len(cosines)
    pairs = torch.triu_indices(m, m, 1)
    order = cosines[pairs[0], pairs[1]].argsort(descending=True, stable=True)  # of equal ones the earlier
    group, left = list(range(m)), m
    for a, b in pairs[:, order].T.tolist():
        if left > 2 and group[a] != group[b]:
            group, left = [group[a] if g == group[b] else g for g in group], left - 1
    return torch.tensor([g != group[0] for g in group])
