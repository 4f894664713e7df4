from __future__ import annotations

from dataclasses import dataclass

import torch

from idiolect.method import Method, State, Tree, Up, UsageError
from idiolect.tree import stack, unstack


@dataclass(frozen=True)
class FedFomo(Method):
    """FedFomo. Zhang et al., ICLR 2021, section 3: no model is shared; before training, a client takes from a few
    others' models in proportion to how much each of them lowers its loss on samples that it held out.

    A client is sent at most `models` - 1 models of the round before: random ones with probability `explore` -
    `explore_decay` r in round r, else those that helped it most so far, ties at random.
    Departs from the paper: the samples held out are the same in every round, and never trained on; where nothing
    helps, `fallback="own"` goes on from the client's last model; "old" is the authors' code, in which its last
    training is undone; a model whose loss is no number helps nobody. From the public code: it explores; a client
    judges its own last model like the others', and all of them in eval mode.
    """

    models: int = 5
    explore: float = 0.3
    explore_decay: float = 0.05
    share: float = 0.8
    fallback: str = "own"

    def __post_init__(self):
        if self.fallback not in ("own", "old"):
            raise UsageError(f"FedFomo.fallback must be 'own' or 'old'; found '{self.fallback}'.")
        if self.models < 1 or not 0 <= self.explore <= 1 or self.explore_decay < 0 or not 0 < self.share <= 1:
            raise UsageError(
                "FedFomo needs models >= 1 (the client's own is one), 0 <= explore <= 1, explore_decay >= 0 and "
                f"0 < share <= 1; found {self}."
            )

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
        others = unstack(down["models"]) if down["models"] else []
        start, gains = self.start(held, [mine["model"], *others], mine["old"])
        w = own.train(start)
        gains = torch.cat([gains[1:], gains.new_zeros(self.models - len(gains))])
        return Up(rows={"model": w, "gains": gains}), {"model": w, "old": start}

    def start(self, held, candidates, old):
        """What training starts from, and each candidate's weight before normalising; the first is the client's own."""
        buffers = held.task.net.buffers
        some = next(iter(old.drop(buffers).values()))
        if held.n:
            before = held.loss(old)
            far = [(w - old).drop(buffers).norm() + 1e-5 for w in candidates]
            gains = torch.stack([(before - held.loss(w)) / d for w, d in zip(candidates, far, strict=True)])
            gains = gains.nan_to_num(0.0, 0.0, 0.0).to(some.dtype)
        else:
            gains = some.new_zeros(len(candidates))
        helps = gains.clamp(min=0)
        if not helps.any():
            return (candidates[0] if self.fallback == "own" else old), gains
        share = helps / helps.sum()
        return stack(candidates).map(lambda v: torch.einsum("k,k...->...", share.to(v.dtype), v)), gains
