from __future__ import annotations

from dataclasses import dataclass

import torch

from idiolect.method import Method, State, Tree, Up, UsageError


@dataclass(frozen=True)
class FedSimSup(Method):
    """FedSimSup (arXiv 2025), algorithm 1: an inter-learning model theta beside a local supervisor s; prediction is the sum of
    their logits. The server keeps one theta per client; those who are away learn from the participants by label similarity.

    `supervisor` is "scaled" (the same network with `share` of the parameters) or networks of which each client draws one, as
    "lenet5,cnn4,tinyvit". `mixing="lazy"` brings a client's theta up to date when it is asked for: the same numbers as "eager",
    which moves all N of them every round as the paper writes.
    Departs from the paper: `similarity=False` weighs the participants alike and keeps the rate a; `structure="serial"` has the
    body as theta and the head as s of one network, not enlarged. The paper's appendix with epochs and rates is not public:
    tau_s and tau_theta are 1.
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

    def init(self, net):
        if self.structure == "serial":
            theta, kinds = net.body, [net.head]
        elif self.supervisor == "scaled":
            theta, kinds = net.weights, [net.add("supervisor", share=self.share)]
        else:
            networks = [name.strip() for name in self.supervisor.split(",")]
            theta, kinds = net.weights, [net.add(f"supervisor-{name}", name) for name in networks]
        none = torch.zeros(1, dtype=net.dtype)
        row = {"theta": theta, "at": none, "size": none, "labels": torch.zeros(net.classes, dtype=net.dtype)}
        return State(server={"log": Tree(), "largest": none}, client=[{"supervisor": s} for s in kinds], rows=row)

    def hello(self, me, down, mine):
        return {"labels": me.counts / me.n, "size": torch.full((1,), float(me.n), dtype=me.counts.dtype)}

    # the client

    def beside(self, task, w, batch, part):
        return task.criterion(task.logits(w, batch.x, part) + batch.beside, batch)

    def local(self, me, down, mine):
        theta, s = down["model"], mine["supervisor"]
        if self.structure == "serial":
            w = me.train(theta | s, only=s, epochs=self.tau_s)
            w = me.train(w, only=theta, epochs=self.tau_theta)
            return Up(rows={"model": w.pick(theta)}), {"supervisor": w.pick(s)}
        part = _part(s)  # eqs. 5, 6: first s with theta frozen, then theta with s frozen
        s = me.train(s, loss=self.beside, given=(part,), beside=me.logits(theta), epochs=self.tau_s)
        theta = me.train(theta, loss=self.beside, given=("",), beside=me.logits(s, part), epochs=self.tau_theta)
        return Up(rows={"model": theta}), {"supervisor": s}

    def personal(self, me, down, mine):
        return down["model"] | mine["supervisor"]

    def logits(self, task, w, x):
        q = task.logits(w, x)
        return q if self.structure == "serial" else q + task.logits(w, x, _part(w.drop(task.net.weights)))

    # the server

    def down(self, server, row):
        return {"model": self.current(server["log"], row)}

    def server(self, server, rows, up, run):
        t, theta = run.round + 1, up.rows["model"]
        flat = torch.cat([v.flatten(1) for v in theta.values()], dim=1)  # [K, P]
        met = [rows[i] for i in run.ids]
        news = {
            "theta": flat,
            "size": torch.cat([row["size"] for row in met]),
            "labels": torch.stack([row["labels"] for row in met]),
            "beta": torch.tensor([self.beta(t, self.T or run.rounds)], dtype=flat.dtype),
        }
        largest = server["largest"]
        if not largest:
            largest = torch.stack([rows[i]["size"] for i in rows]).max(0).values
        log = server["log"] | Tree({f"{t}.{k}": v for k, v in news.items()})
        away = [i for i in rows if i not in run.ids] if self.mixing == "eager" else []
        if away:
            now = [self.current(Tree({f"{t}.{k}": v for k, v in news.items()}), rows[i]) for i in away]
            rows = rows.with_(away, theta=now, at=torch.full((len(away), 1), float(t), dtype=flat.dtype))
        rows = rows.with_(run.ids, theta=theta, at=torch.full((len(met), 1), float(t), dtype=flat.dtype))
        return {"log": Tree() if self.mixing == "eager" else self.needed(log, largest), "largest": largest}, rows

    def beta(self, t, rounds):
        flat = self.C * rounds**self.gamma
        return 1.0 if t < flat else (flat / t) ** 2  # eq. 10

    def rate(self, log, t, size):
        """a = lambda_i * beta_t of a client of this size (eqs. 8, 9)."""
        sizes = log[f"{t}.size"]
        return float(log[f"{t}.beta"] * sizes.sum() / (sizes.sum() + len(sizes) * size))

    def current(self, log, row):
        """A client's theta after the rounds in the log that it missed (eq. 7, round upon round): one combination of its own and
        the participants' thetas. Rounds so old that nothing of them is left in these digits are not looked at."""
        theta, own, parts = row["theta"], 1.0, []
        for t in reversed(_rounds(log)):
            if t <= row["at"] or own < _digits(log[f"{t}.theta"]):
                break
            s = torch.ones_like(log[f"{t}.size"])
            if self.similarity:
                s = torch.cosine_similarity(log[f"{t}.labels"], row["labels"][None])
            if s.sum() > 0:  # nobody alike: unchanged
                a = self.rate(log, t, float(row["size"]))
                parts.append((own * a * s / s.sum()) @ log[f"{t}.theta"])
                own *= 1 - a
        if not parts:
            return theta
        total, at, mixed = torch.stack(parts).sum(0), 0, {}
        for k, v in theta.items():
            mixed[k] = own * v + total[at : at + v.numel()].view_as(v)
            at += v.numel()
        return Tree(mixed)

    def needed(self, log, largest):
        """The log without rounds of which no client, not even the slowest to learn, has anything left."""
        left = 1.0
        for t in reversed(_rounds(log)):
            if left < _digits(log[f"{t}.theta"]):
                log = log.drop([k for k in log if k.startswith(f"{t}.")])
            left *= 1 - self.rate(log, t, float(largest)) if f"{t}.beta" in log else 1.0
        return log


def _rounds(log):
    return sorted(int(k.removesuffix(".beta")) for k in log if k.endswith(".beta"))


def _part(w):
    """The supervisor network that these weights are of."""
    return next(iter(w)).partition(".")[0]


def _digits(values):
    return torch.finfo(values.dtype).eps / 16
