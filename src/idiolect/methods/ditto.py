from __future__ import annotations

from dataclasses import dataclass

from idiolect.method import Method, State, Up


@dataclass(frozen=True)
class Ditto(Method):
    """Ditto. Li et al., ICML 2021, Algorithm 1: FedAvg, and beside it a private model tied to the received one.

    Departs from the paper: participants are drawn uniformly and averaged by samples. Both models see the same batches,
    as in the authors' code, and the private one is tied to the model received, not to the one trained from it.
    """

    lam: float = 1.0
    personal_epochs: int | None = None

    def init(self, net):
        return State(server={"model": net.weights}, client={"model": net.weights})

    def pull(self, g, v, received):
        return g + self.lam * (v - received)  # the gradient of lam/2 |v - received|^2

    def local(self, me, down, mine):
        received = down["model"]
        w = me.train(received, order=0)
        v = me.train(mine["model"], correct=self.pull, given=(received,), epochs=self.personal_epochs, order=0)
        return Up(mean={"model": w}), {"model": v}
