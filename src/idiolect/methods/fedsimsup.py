from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import normalize

from idiolect.method import Method, State, Tree, Up, UsageError


@dataclass(frozen=True)
class FedSimSup(Method):
    """FedSimSup. Liu et al., ICCV 2025, Algorithm 1: an inter-learning model theta beside a local supervisor s; a
    client predicts with the sum of their logits. The server keeps one theta per client; those who are away from a round
    learn from its participants, by the similarity of their labels.

    `supervisor` is "scaled" (the same network with `share` of the parameters) or networks of which each client draws
    one, as in "lenet5,cnn4,tinyvit". `mixing="lazy"` brings a client's theta up to date when it is asked for: the same
    numbers as "eager", which moves all N of them every round as the paper writes.
    Departs from the paper: `similarity=False` weighs the participants alike and keeps the rate a; `structure="serial"`
    has the body as theta and the head as s of one network, not enlarged. Epochs and rates are in an appendix that is
    not at hand: tau_s and tau_theta are 1.
    """

    tau_s: int = 1
    tau_theta: int = 1
    C: float = 40.0
    gamma: float = 3 / 7
    T: int | None = None
    similarity: bool = True
    structure: str = "parallel"
    supervisor: str = "scaled"
    share: float = 1 / 6
    mixing: str = "lazy"

    def __post_init__(self):
        for name, known in (("structure", ("parallel", "serial")), ("mixing", ("lazy", "eager"))):
            if getattr(self, name) not in known:
                raise UsageError(f"FedSimSup.{name} must be {' or '.join(known)}; found '{getattr(self, name)}'.")
        for name, least in {"tau_s": 0, "tau_theta": 0, "C": 0, "gamma": 0, "T": 1}.items():
            value = getattr(self, name)
            if not (value is None or value >= least):
                raise UsageError(f"FedSimSup.{name} must be at least {least}; found {value}.")
        if not 0 < self.share <= 1:
            raise UsageError(f"FedSimSup.share must be above 0 and at most 1; found {self.share}.")
        if "" in _names(self.supervisor):
            raise UsageError(f"FedSimSup.supervisor must be 'scaled' or names of networks; found '{self.supervisor}'.")
        if self.structure == "serial" and self.supervisor != "scaled":
            raise UsageError("FedSimSup with structure=serial has its own head for a supervisor: set no `supervisor`.")

    def init(self, net):
        if self.structure == "serial":
            if not net.body:
                raise UsageError("FedSimSup with structure=serial shares the body; found a network without one.")
            theta, kinds = net.body, [net.head]
        elif self.supervisor == "scaled":
            theta, kinds = net.weights, [net.add("supervisor", share=self.share)]
        else:
            theta, kinds = net.weights, [net.add(f"supervisor-{name}", name) for name in _names(self.supervisor)]
        none = torch.zeros(net.classes, dtype=net.dtype)
        row = {"theta": theta, "at": torch.zeros(1, dtype=torch.long), "size": none[:1], "labels": none}
        return State(server={"log": Tree(), "largest": none}, client=[{"supervisor": s} for s in kinds], rows=row)

    def hello(self, me, down, mine):
        return {"labels": me.counts / me.n, "size": torch.full((1,), float(me.n), dtype=me.counts.dtype)}

    # the client

    def beside(self, task, w, batch, part):
        return task.criterion(task.logits(w, batch.x, part) + batch.beside, batch)

    def local(self, me, down, mine):
        theta, s = down["model"], mine["supervisor"]
        if self.structure == "serial":
            w = me.train(theta | s, only=s, epochs=self.tau_s, order=0)
            w = me.train(w, only=theta, epochs=self.tau_theta, order=1)
            return Up(rows={"model": w.pick(theta)}), {"supervisor": w.pick(s)}
        part = _part(s)  # eqs. 4, 5: first s with theta frozen, then theta with s frozen
        s = me.train(s, loss=self.beside, given=(part,), beside=me.logits(theta), epochs=self.tau_s, order=0)
        q = me.logits(s, part)
        theta = me.train(theta, loss=self.beside, given=("",), beside=q, epochs=self.tau_theta, order=1)
        return Up(rows={"model": theta}), {"supervisor": s}

    def personal(self, me, down, mine):
        return down["model"] | mine["supervisor"]

    def logits(self, task, w, x):
        q = task.logits(w, x)
        return q if self.structure == "serial" else q + task.logits(w, x, _part(w.drop(task.net.weights)))

    # the server

    def plan(self, server, rows, run):
        now = self.current(server["log"], [rows[i] for i in run.ids])
        return server, rows.with_(run.ids, theta=now, at=[torch.tensor([run.round])] * len(now))

    def down(self, server, row):
        return self.downs(server, [row])[0]

    def downs(self, server, rows):
        return [{"model": theta} for theta in self.current(server["log"], rows)]

    def server(self, server, rows, up, run):
        t, like = run.round + 1, rows.template["theta"]
        at, theta = torch.tensor([t]), torch.cat([up.rows["model"][k].flatten(1) for k in like], dim=1)  # [K, P]
        news = {"theta": theta, "ids": torch.tensor(run.ids), "beta": self.beta(t, self.T or run.rounds)}
        news = Tree(news | {k: rows.stack(k, run.ids) for k in ("size", "labels")}).prefixed(str(t))
        largest = server["largest"]
        if not largest.any():
            largest = (rows.stack("size", rows) * (rows.stack("labels", rows) > 0)).max(0).values
        if self.mixing == "eager":
            away = sorted({*range(run.num_clients)} - {*run.ids})
            now = [v for k in range(0, len(away), 64) for v in self.current(news, [rows[i] for i in away[k : k + 64]])]
            rows, log = rows.with_(away, theta=now, at=[at] * len(away)), Tree()
        else:
            log = server["log"] | news
        rows = rows.with_(run.ids, theta=[_named(v, like) for v in theta], at=[at] * len(theta))
        kept = self.needed(log, largest, run.num_clients)
        return {"log": kept, "largest": largest}, self.released(log, kept, rows)

    def similar(self, a, b):
        """s_ij of label proportions [n, C] and [m, C]."""
        s = normalize(a.double()) @ normalize(b.double()).T
        return s if self.similarity else torch.ones_like(s)

    def rate(self, beta, M, K, size):
        return beta * M / (M + K * size)  # eqs. 8, 9

    def beta(self, t, rounds):
        flat = self.C * rounds**self.gamma
        return torch.tensor(1.0 if t < flat else (flat / t) ** 2, dtype=torch.float64)  # eq. 10

    def taken(self, log, size, labels, at):
        """Eq. 7, round upon round: how much of every theta in the log these clients have taken up by now, if they were
        `at` their own then, [n, J]; and how much of their own is left, [n, 1]. What rounding would swallow counts as
        nothing."""
        rounds = _rounds(log)
        if not rounds:
            return torch.zeros(len(size), 0), torch.ones(len(size), 1)
        theirs = {k: torch.cat([log[f"{t}.{k}"] for t in rounds]) for k in ("size", "labels")}
        count = torch.tensor([len(log[f"{t}.ids"]) for t in rounds])  # K of each round
        of = torch.repeat_interleave(count)  # the round of each theta
        s = self.similar(labels, theirs["labels"])
        total = s.new_zeros(len(s), len(rounds)).index_add_(1, of, s)
        M = s.new_zeros(len(rounds)).index_add_(0, of, theirs["size"][:, 0].double())
        a = self.rate(torch.stack([log[f"{t}.beta"] for t in rounds]), M, count, size.double())
        a = a * ((total > 0) & (at < torch.tensor(rounds)))  # nobody alike, or not missed: unchanged
        left = (1 - a).flip(1).cumprod(1).flip(1)  # [n, R]
        after = torch.cat([left[:, 1:], torch.ones_like(left[:, :1])], dim=1)
        after = torch.where(after < _digits(log[f"{rounds[0]}.theta"]), 0.0, after)
        return (after * a / torch.where(total > 0, total, 1.0))[:, of] * s, left[:, :1]

    def current(self, log, rows):
        """These clients' thetas after the rounds in the log that they missed."""
        taken, left = self.taken(log, *(torch.stack([row[k] for row in rows]) for k in ("size", "labels", "at")))
        if not taken.any():
            return [row["theta"] for row in rows]
        now = torch.stack([own * row["theta"].flat() for own, row in zip(left[:, 0].tolist(), rows, strict=True)])
        for t, share in _by_round(taken, log):
            if share.any():
                now.addmm_(share.to(now.dtype), log[f"{t}.theta"])
        return [_named(v, rows[0]["theta"]) for v in now]

    def needed(self, log, largest, clients):
        """The log without rounds after which everybody has taken part, or of which nothing is left even in the slowest
        to learn: who moves in the rounds of a single class alone, and has as many samples as the largest that has this
        class."""
        taken, _ = self.taken(log, largest[:, None], torch.eye(len(largest)), torch.zeros(len(largest), 1))
        seen, kept = set(), Tree()
        for t, share in reversed(_by_round(taken, log)):
            seen.update(log[f"{t}.ids"].tolist())
            if len(seen) < clients and share.any():
                kept |= log.under(str(t)).prefixed(str(t))
        return kept

    def released(self, log, kept, rows):
        """The rows without thetas of which nothing is left: the server holds those in the log, not N."""
        gone = [t for t in _rounds(log) if f"{t}.theta" not in kept]
        idle = [i for t in gone for i in log[f"{t}.ids"].tolist() if rows[i]["at"] == t]
        if not idle:
            return rows
        _, left = self.taken(kept, *(rows.stack(k, idle) for k in ("size", "labels", "at")))
        idle = [i for i, own in zip(idle, left, strict=True) if own < _digits(log[f"{gone[0]}.theta"])]
        return rows.with_(idle, theta=[rows.template["theta"]] * len(idle))


def _names(text):
    return [name.strip() for name in text.split(",")]


def _rounds(log):
    return sorted(int(k.removesuffix(".ids")) for k in log if k.endswith(".ids"))


def _by_round(taken, log):
    counts = [len(log[f"{t}.ids"]) for t in _rounds(log)]
    return list(zip(_rounds(log), taken.split(counts, dim=1), strict=True))


def _named(flat, like):
    """One vector as the Tree of these names and shapes."""
    parts = flat.split([v.numel() for v in like.values()])
    return Tree({k: part.view_as(v) for (k, v), part in zip(like.items(), parts, strict=True)})


def _part(w):
    """The supervisor network that these weights are of."""
    return next(iter(w)).partition(".")[0]


def _digits(values):
    return torch.finfo(values.dtype).eps / 16
