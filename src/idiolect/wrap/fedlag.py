from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from idiolect.method import State, Tree, UsageError, Wrapper
from idiolect.tree import gram, unstack

CHOICES = {"scores": ("round", "warmup"), "weights": ("uniform", "samples")}
NOTED = ("conflicts", "scores", "personal")  # the wrapper's own slots at the server, which are not sent


@dataclass(frozen=True)
class FedLAG(Wrapper):
    """FedLAG. Nguyen et al., arXiv 2410.02845, 2024, Algorithms 1 and 2: any method whose server averages a model, but
    the layers in which most pairs of clients moved in opposed directions are not sent down: each client keeps its own.

    The first `warmup` rounds are the inner method's; so is every round with `top_k=0`, which still counts conflicts.
    Departs from the paper: it warms up only where it trains from scratch; `scores="warmup"` chooses the layers once, by
    the sum over the warm-up; `weights="samples"` averages with the inner method's weights (eq. 4: uniform). From the
    public code: the paper is followed. There an update is the last batch's gradient, the layers are chosen once, and
    after the warm-up nothing reaches the clients.
    """

    top_k: int = 5
    threshold: float = -0.1
    warmup: int = 30
    scores: str = "round"
    weights: str = "uniform"
    skip_norm: bool = False

    def __post_init__(self):
        for field, known in CHOICES.items():
            if (value := getattr(self, field)) not in known:
                raise UsageError(f"FedLAG.{field} must be one of {', '.join(known)}; found '{value}'.")
        if self.top_k < 0 or self.warmup < 0 or not -1 <= self.threshold <= 0:
            raise UsageError(f"FedLAG needs top_k >= 0, warmup >= 0 and -1 <= threshold <= 0; found {self}.")
        if self.scores == "warmup" and self.warmup == 0:
            raise UsageError("FedLAG with scores=warmup chooses its layers in the warm-up; set warmup above 0.")

    def init(self, net):
        state = self.inner.init(net)
        shared = state.server.get("model")
        if not isinstance(shared, Tree) or self.inner.down(state.server, state.rows).get("model") is not shared:
            raise UsageError(
                f"FedLAG wraps methods whose server averages one model and sends it to all; {self.inner.name} has no "
                "such model. Use fedavg, fedper, scaffold or the like."
            )
        layers = [k for k, own in net.layers.items() if own.keys() <= shared.keys()]
        layers = [k for k in layers if not (self.skip_norm and k in net.norms)]
        if not layers:
            raise UsageError(f"FedLAG finds no layer that it may personalise in the shared model of {self.inner.name}.")
        count = Tree(dict.fromkeys(layers, torch.zeros((), dtype=torch.int64)))
        noted = {"conflicts": count, "scores": count, "personal": count.map(lambda v: v > 0)}
        kinds = [state.client] if isinstance(state.client, Mapping) else state.client
        kinds = [self.beside(kind, {"returned": shared}) for kind in kinds]
        rows = {"upload": shared.drop(net.buffers), "uploaded": torch.zeros((), dtype=torch.bool)}
        client = kinds if len(kinds) > 1 else kinds[0]
        return State(self.beside(state.server, noted), client, self.beside(state.rows, rows))

    def beside(self, slots, own):
        """The inner method's slots and the wrapper's, which may not be the same."""
        if taken := slots.keys() & own.keys():
            raise UsageError(f"FedLAG has a slot {', '.join(sorted(taken))} of its own, as {self.inner.name} has.")
        return {**slots, **own}

    def check(self, run):
        super().check(run)
        if run.replaces_mean and self.weights == "uniform" and self.top_k:
            raise UsageError(
                "FedLAG with weights=uniform averages (eq. 4) what its server has of each client, not Up.mean, which "
                f"{run.replaces_mean} concerns; set fedlag.weights=samples."
            )

    # the server

    def plan(self, server, rows, run):
        new, rows = self.inner.plan(server, rows, run)
        return {**server, **new}, rows

    def down(self, server, row):
        """The inner method's, without the layers of which the client has its own."""
        down = {slot: v for slot, v in self.inner.down(server, row).items() if slot not in NOTED}
        return {**down, "model": down["model"].drop(kept(down["model"], server))} if row["uploaded"] else down

    def answered(self, server, rows, up, run):
        new, rows = self.inner.answered(server, rows, up, run)
        return {**server, **new}, rows

    def server(self, server, rows, up, run):
        conflicts = self.conflicts(up.rows["layers"], self.started(server, rows, up, run), server["conflicts"])
        if self.weights == "uniform" and self.top_k and run.round >= self.warmup:
            whole = up.rows["layers"] | up.rows["buffers"]
            up = replace(up, mean={**up.mean, "model": whole.map(lambda v: v.mean(0))})  # eq. 4
        new, rows = self.inner.server(server, rows, up, run)
        uploads = [own.clone() for own in unstack(up.rows["layers"])]
        rows = rows.with_(run.ids, upload=uploads, uploaded=[torch.tensor(True)] * len(run.ids))
        scores = self.scored(server["scores"], conflicts, run)
        personal = most(scores, self.top_k if run.round + 1 >= self.warmup else 0)
        return {**new, "conflicts": conflicts, "scores": scores, "personal": personal}, rows

    def started(self, server, rows, up, run):
        """What each participant's training started from: the shared model, or its own last upload. [K, ...] or [...]"""
        start = server["model"].pick(up.rows["layers"])
        own = [rows[i]["upload"] if rows[i]["uploaded"] else start for i in run.ids]
        return start | {k: torch.stack([w[k] for w in own]) for k in kept(start, server)}

    def conflicts(self, ended, started, layers):
        """GC of each layer (eq. 3), by the inner products of the participants' updates h (eq. 2)."""
        products = dict.fromkeys(layers, 0.0)  # [K, K] each
        for name, end in ended.items():
            if (layer := name.rpartition(".")[0]) in products:
                products[layer] = products[layer] + inner_products(end, started[name])
        return Tree({layer: opposed(found, self.threshold) for layer, found in products.items()})

    def scored(self, before, conflicts, run):
        """What layers are chosen by: this round's conflicts, or the warm-up's."""
        if self.scores == "round":
            return conflicts
        return before + conflicts if run.round < self.warmup else before

    def notes(self, server):
        return {**self.inner.notes(server), **{slot: server[slot] for slot in ("conflicts", "personal")}}

    # the client

    def filled(self, me, down, mine):
        """What was received, with the client's own layers where none came (and its buffers, if the run keeps them)."""
        model = mine["returned"] | down["model"]
        buffers = {k: v for k, v in (me.buffers or {}).items() if k in model}
        return {**down, "model": model | buffers}

    def ask(self, me, down, mine):
        return self.inner.ask(me, self.filled(me, down, mine), mine)

    def local(self, me, down, mine):
        up, new = self.inner.local(me, self.filled(me, down, mine), mine)
        if "model" not in up.mean:
            raise UsageError(f"FedLAG wraps methods that average their clients' models; {self.inner.name} does not.")
        model, buffers = up.mean["model"], me.task.net.buffers
        rows = {"layers": model.drop(buffers), "buffers": model.pick([k for k in model if k in buffers])}
        return replace(up, rows=self.beside(up.rows, rows)), {**new, "returned": model}

    def personal(self, me, down, mine):
        return self.inner.personal(me, self.filled(me, down, mine), mine)


def inner_products(end, start):
    """Inner products of all pairs of updates of one tensor. end: [K, ...]; start: [K, ...] or [...]; [K, K]"""
    end, start = end.flatten(1), start.reshape(-1, end[0].numel())  # of K or of all
    return gram(len(end), end.shape[1], lambda part: end[:, part] - start[:, part])  # h


def opposed(products, threshold):
    """Pairs whose cosine is below the threshold. products: of all pairs, [K, K]"""
    length = products.diagonal().sqrt()
    cosines = (products / torch.outer(length, length)).clamp(min=-1.0)
    return (cosines < threshold).triu(1).sum()  # what did not move has no angle: NaN is below nothing


def most(scores, k):
    """Flags of the k layers with the highest scores above 0; of equal ones the earlier."""
    best = sorted(scores, key=lambda layer: -int(scores[layer]))[:k]
    return Tree({layer: (score > 0) & (layer in best) for layer, score in scores.items()})


def kept(model, server):
    """The model's entries in layers that are personal now."""
    return [k for k in model if server["personal"].get(k.rpartition(".")[0], False)]
