from __future__ import annotations

from dataclasses import dataclass

from idiolect.method import Method, State, Up, UsageError


@dataclass(frozen=True)
class FedDyn(Method):
    """FedDyn. Acar et al., ICLR 2021, Algorithm 1: FedAvg whose clients' losses get a linear and a quadratic term,
    anew in every round, so that in the end the minima of all of them and of their mean agree. g and h as in the paper.

    Departs from the paper: a local loss is minimised by the run's epochs, not fully. From the public code: alpha is
    the same for all clients, not divided by their samples; nothing is clipped unless the run says so; clients predict
    with the model that is sent to them next.
    """

    alpha: float = 0.01

    def __post_init__(self):
        if self.alpha <= 0:
            raise UsageError(f"FedDyn.alpha must be above 0; found {self.alpha}.")

    def init(self, net):
        zero = net.trainable.zeros()  # normalisation statistics have no gradient
        return State(server={"model": net.weights, "h": zero}, client={"g": zero})

    def down(self, server, row):
        return {"model": server["model"]}

    def dynamic(self, grad, w, received, g):
        return grad - g + self.alpha * (w - received)  # the gradient of -<g, w> + alpha/2 |w - received|^2

    def local(self, me, down, mine):
        received, g = down["model"], mine["g"]
        w = me.train(received, correct=self.dynamic, given=(received, g))
        return Up(mean={"model": w}, weight=1), {"g": g - self.alpha * (w - received).pick(g)}

    def server(self, server, rows, up, run):
        mean, h = up.mean["model"], server["h"]
        share = len(run.ids) / run.num_clients  # h is the mean of all clients' g, whoever took part
        h = h - self.alpha * share * (mean - server["model"]).pick(h)
        return {"model": mean | (mean.pick(h) - h / self.alpha), "h": h}, rows
