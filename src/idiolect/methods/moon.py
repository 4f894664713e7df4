from __future__ import annotations

from dataclasses import dataclass

from torch.nn.functional import cosine_similarity, relu, softplus

from idiolect.method import Method, State, Up, UsageError, linear


@dataclass(frozen=True)
class Moon(Method):
    """MOON. Li, He and Song, CVPR 2021, Algorithm 1: FedAvg whose clients hold their features near those
    of the received model and away from those of their own model of last time.

    Departs from the paper: features are the body's own; `projection` is the width of the paper's projection head (256
    there), two layers with the classifier on top of them. mu is 1 (the paper tunes it). A client has no such term
    until it has a model of last time, as in the authors' code. From other public code: the reference models are
    frozen copies in eval mode, and the old one is of the client's own last participation.
    """

    mu: float = 1.0
    tau: float = 0.5
    projection: int | None = None

    def __post_init__(self):
        if self.mu < 0:
            raise UsageError(f"Moon.mu must be 0 or more; found {self.mu}.")
        if self.tau <= 0:
            raise UsageError(f"Moon.tau must be above 0; found {self.tau}.")
        if self.projection is not None and self.projection < 1:
            raise UsageError(f"Moon.projection must be at least 1, or none; found {self.projection}.")

    def init(self, net):
        if not self.projection:
            return State(server={"model": net.weights}, client={"previous": net.body})
        d, p = net.features, self.projection
        below = net.body | net.linear("projection1", d, d) | net.linear("projection2", d, p)
        return State(server={"model": below | net.linear("classifier", p, net.classes)}, client={"previous": below})

    def projected(self, w, z):
        """z of the paper, out of the body's features."""
        return linear(w, "projection2", relu(linear(w, "projection1", z))) if self.projection else z

    def classified(self, task, w, z):
        return linear(w, "classifier", z) if self.projection else task.head(w, z)

    def contrast(self, z, batch, received, previous):
        """Eq. 3, -log(e^a / (e^a + e^b)) = softplus(b - a), which no temperature overflows."""
        near, far = cosine_similarity(z, received), cosine_similarity(z, previous)
        return batch.mean(softplus((far - near) / self.tau))

    def loss(self, task, w, batch):
        z = self.projected(w, task.features(w, batch.x))
        loss = task.criterion(self.classified(task, w, z), batch)
        return loss if batch.beside is None else loss + self.mu * self.contrast(z, batch, *batch.beside)  # eq. 4

    def local(self, me, down, mine):
        # the reference models stand still, so that one pass gives the features of all epochs
        pair = [self.projected(w, me.features(w)) for w in (down["model"], mine["previous"])] if me.visits else None
        whole = me.task.net.head | down["model"]  # with a projection, the network's own head stands idle
        w = me.train(whole, only=down["model"], loss=self.loss, beside=tuple(pair) if pair else None)
        return Up(mean={"model": w.pick(down["model"])}), {"previous": w.pick(mine["previous"])}

    def logits(self, task, w, x):
        return self.classified(task, w, self.projected(w, task.features(w, x)))
