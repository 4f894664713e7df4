from __future__ import annotations

from dataclasses import dataclass

from idiolect.method import Method, State, Up


@dataclass(frozen=True)
class FedBN(Method):
    """FedBN. Li et al., ICLR 2021, Algorithm 1: FedAvg whose clients keep their normalisation layers, weights and
    statistics, to themselves.

    Departs from the paper: group and layer normalisation are private like batch normalisation; replies are averaged
    by samples, not uniformly. From the public code: a layer is known by its kind, not by having "bn" in its name.
    """

    def init(self, net):
        own = net.weights.pick(k for k in net.weights if k.rpartition(".")[0] in net.norms)
        return State(server={"model": net.weights.drop(own)}, client={"model": own})

    def local(self, me, down, mine):
        shared, own = down["model"], mine["model"]
        w = me.train(shared | own)
        return Up(mean={"model": w.pick(shared)}), {"model": w.pick(own)}
