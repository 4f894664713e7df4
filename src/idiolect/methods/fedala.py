from __future__ import annotations

from dataclasses import dataclass

import torch

from idiolect.method import SGD, Method, State, Up, unit_interval


@dataclass(frozen=True)
class FedALA(Method):
    """FedALA. Zhang et al., AAAI 2023, Algorithm 1: each client learns, per weight of the last layers, how much of the
    global model to take, and starts its training there.

    Departs from the paper: the first mixing runs `first_epochs` epochs ("until it converges" in the paper, a loop that
    can hang in the public code). An evaluation learns the mixture on the side and keeps nothing of it.
    """

    mix_lr: float = 1.0
    layers: int = 1
    share: float = 0.8
    first_epochs: int = 10

    def init(self, net):
        mix = net.last(self.layers).ones()
        own = {"model": net.weights, "mix": mix, "mixed": torch.zeros((), dtype=torch.uint8)}
        return State(server={"model": net.weights}, client=own)

    def mixture(self, task, mix, batch, new, old):
        return task.loss(blend(new, old, mix), batch)

    def learn(self, me, new, mine):
        """The mixing weights of this round; all ones in round 0, in which nothing has been learnt yet."""
        mix = mine["mix"]
        if me.round == 0:
            return mix
        epochs = 1 if mine["mixed"] else self.first_epochs
        old = mine["model"].pick(mix)
        # the body stands still: over several epochs it is run once
        body = new if epochs > 1 and mix.keys() <= me.task.net.head.keys() else None
        # d loss / d mix is the paper's rule (eq. 5) by the chain rule
        return me.train(
            mix, loss=self.mixture, given=(new, old), features=body, lr=self.mix_lr,
            optimizer=SGD(), project=unit_interval, epochs=epochs, order=9, share=self.share,
        )  # fmt: skip

    def local(self, me, down, mine):
        new = down["model"]
        mix = self.learn(me, new, mine)
        w = me.train(new if me.round == 0 else blend(new, mine["model"].pick(mix), mix))
        mixed = torch.full_like(mine["mixed"], me.round > 0)
        return Up(mean={"model": w}), {"model": w, "mix": mix, "mixed": mixed}

    def personal(self, me, down, mine):
        new = down["model"]
        if me.round == 0:
            return new
        mix = self.learn(me, new, mine)
        return blend(new, mine["model"].pick(mix), mix)


def blend(new, old, mix):
    return new | old.lerp(new, mix)  # eq. 3; lower layers are taken whole
