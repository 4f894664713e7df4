from __future__ import annotations

from dataclasses import dataclass

from idiolect.method import Method, State, Up, UsageError


@dataclass(frozen=True)
class FedProx(Method):
    """FedProx. Li et al., MLSys 2020, Algorithm 2: FedAvg whose local loss is tied to the received model, and
    which takes what clients have done by then: a straggler does fewer epochs, 1 to all of them.

    Departs from the paper: participants are drawn uniformly and averaged by samples, as for every method here (the
    paper draws by samples and averages uniformly); each is a straggler with the same probability (there a fixed share
    of every round). From the public code: mu is never 0 by default; a straggler may do all epochs.
    """

    mu: float = 0.01
    stragglers: float = 0.0

    def __post_init__(self):
        if self.mu < 0:
            raise UsageError(f"FedProx.mu must be 0 or more; found {self.mu}.")
        if not 0 <= self.stragglers <= 1:
            raise UsageError(f"FedProx.stragglers must be in [0, 1]; found {self.stragglers}.")

    def init(self, net):
        return State(server={"model": net.weights})

    def pull(self, g, w, received):
        return g + self.mu * (w - received)  # the gradient of mu/2 |w - received|^2

    def work(self, me):
        """The epochs that this client does in this round, whoever else takes part."""
        draw = me.draw("stragglers")
        return int(draw.integers(1, me.epochs + 1)) if draw.random() < self.stragglers else me.epochs

    def local(self, me, down, mine):
        w = me.train(down["model"], correct=self.pull, given=(down["model"],), epochs=self.work(me))
        return Up(mean={"model": w}), mine
