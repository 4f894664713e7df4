from __future__ import annotations

from dataclasses import dataclass

from idiolect.method import Method, State, Up


@dataclass(frozen=True)
class FedAvg(Method):
    """FedAvg. McMahan et al., AISTATS 2017, Algorithm 1: the mean of locally trained copies, weighted by samples.

    Departs from the paper / the public code: none.
    """

    def init(self, net):
        return State(server={"model": net.weights})

    def local(self, me, down, mine):
        return Up(mean={"model": me.train(down["model"])}), mine
