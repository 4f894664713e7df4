from __future__ import annotations

from dataclasses import dataclass

import torch

from idiolect.method import Method, State, Tree, Up, UsageError
from idiolect.tree import stack, unstack


@dataclass(frozen=True)
class FedFomo(Method):
    """FedFomo. Zhang et al., ICLR 2021, section 3: no model is shared; before training, a client takes from a few
    others' models in proportion to how much each of them lowers its loss on samples that it holds out.

    A client is sent at most `models` - 1 models of the round before: random ones with probability `explore` -
    `explore_decay` r in round r, else those that helped it most so far, ties at random.
    Departs from the paper: where nothing helps, `fallback="own"` goes on from the client's last model; "old" is the
    authors' code, which undoes its last training. Preferences add up weights as they are, not divided by their sum. A
    model whose loss is no number helps nobody. From the public code: it explores; a client judges its own last model
    like the others', by the model that this was trained from, and all in eval mode; what it holds out is the same in
    every round and never trained on.
    """

    models: int = 5
    explore: float = 0.3
    explore_decay: float = 0.05
    share: float = 0.8
    fallback: str = "own"

    def __post_init__(self):
        if self.fallback not in ("own", "old"):
            raise UsageError(f"FedFomo.fallback must be 'own' or 'old'; found '{self.fallback}'.")
        if self.models < 1:
            raise UsageError(f"FedFomo.models must be 1 or more, the client's own is one; found {self.models}.")
        if not 0 <= self.explore <= 1:
            raise UsageError(f"FedFomo.explore must be a probability; found {self.explore}.")
        if not self.explore_decay >= 0:
            raise UsageError(f"FedFomo.explore_decay must be 0 or more; found {self.explore_decay}.")
        if not 0 < self.share < 1:
            raise UsageError(f"FedFomo.share must lie between 0 and 1; found {self.share}.")

    def init(self, net):
        never = torch.full((), -1)
        row = {"liked": Tree(), "chosen": never.repeat(self.models - 1), "round": never}  # liked: by client
        own = {"model": net.weights, "old": net.weights}
        return State(server={"models": Tree(), "ids": Tree(), "round": never + 1}, client=own, rows=row)

    # the server: who is sent whose models

    def plan(self, server, rows, run):
        ids = server["ids"]["ids"].tolist() if server["round"] == run.round and server["ids"] else []
        chosen = [self.chosen(i, ids, rows[i]["liked"], run) for i in run.ids]
        return server, rows.with_(run.ids, chosen=chosen, round=[server["round"]] * len(chosen))

    def chosen(self, i, ids, liked, run):
        """Whose models client i tries, as positions in `ids`; -1 where there are no more. [models - 1]"""
        draw = run.draw("explore", i)
        explores = draw.random() < self.explore - self.explore_decay * run.round
        others = [k for k, other in enumerate(ids) if other != i]
        order = [others[k] for k in draw.permutation(len(others))]
        if not explores:
            order.sort(key=lambda k: -float(liked.get(str(ids[k]), 0.0)))
        order = order[: self.models - 1]
        return torch.tensor([*order, *[-1] * (self.models - 1 - len(order))], dtype=torch.long)

    def down(self, server, row):
        if row["round"] != server["round"]:  # not asked in this round: predicts with what it has
            return {"models": Tree()}
        found = [server["models"].map(lambda v, k=k: v[k]) for k in row["chosen"].tolist() if k >= 0]
        return {"models": stack(found) if found else Tree()}

    def server(self, server, rows, up, run):
        for i, gains in zip(run.ids, up.rows["gains"], strict=True):
            liked = rows[i]["liked"]
            for k, gain in zip(rows[i]["chosen"].tolist(), gains, strict=True):
                if k >= 0:
                    name = str(int(server["ids"]["ids"][k]))
                    liked = liked | {name: liked.get(name, torch.zeros_like(gain)) + gain}
            rows = rows.with_([i], liked=[liked])
        ids = Tree({"ids": torch.tensor(run.ids)})
        return {"models": up.rows["model"], "ids": ids, "round": torch.tensor(run.round + 1)}, rows

    # the client

    def local(self, me, down, mine):
        own, held = me.split(self.share)
        candidates = [mine["model"], *(unstack(down["models"]) if down["models"] else [])]
        gains = self.gains(held, candidates, mine["old"])
        start = self.mixed(candidates, gains, mine["old"])
        w = own.train(start)
        sent = torch.cat([gains[1:], gains.new_zeros(self.models - len(gains))])
        return Up(rows={"model": w, "gains": sent}), {"model": w, "old": start}

    def gains(self, held, candidates, old):
        """By how much each candidate lowers the loss on what is held out, for each unit of its distance. [K]"""
        weights = [(w - old).drop(held.task.net.buffers) for w in candidates]
        far = torch.stack([w.norm() for w in weights]) + 1e-5
        if not held.n:
            return torch.zeros_like(far)
        lower = held.loss(old) - torch.stack([held.loss(w) for w in candidates])
        return (lower / far).nan_to_num(0.0, 0.0, 0.0)

    def mixed(self, candidates, gains, old):
        """What training starts from: old + the sum of share (w - old), whose shares sum to 1."""
        helps = gains.clamp(min=0)
        if not helps.any():
            return candidates[0] if self.fallback == "own" else old
        share = helps / helps.sum()
        return stack(candidates).map(lambda v: torch.einsum("k,k...->...", share, v))
