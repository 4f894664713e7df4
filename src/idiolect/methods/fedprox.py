from __future__ import annotations

from dataclasses import dataclass

from idiolect.method import Method, State, Up


@dataclass(frozen=True)
class FedProx(Method):
    """FedProx. Li et al., MLSys 2020, Algorithm 2: FedAvg whose local loss is tied to the received model.

    Departs from the paper: participants are drawn uniformly and averaged by samples, as for every method here (the
    paper draws by samples and averages uniformly). From the public code: mu is never 0 by default.
    """

    mu: float = 0.01

    def init(self, net):
        return State(server={"model": net.weights})

    def pull(self, g, w, received):
        return g + self.mu * (w - received)  # the gradient of mu/2 |w - received|^2

    def local(self, me, down, mine):
        w = me.train(down["model"], correct=self.pull, given=(down["model"],))
        return Up(mean={"model": w}), mine
