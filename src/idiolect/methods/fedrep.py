from __future__ import annotations

from dataclasses import dataclass

from idiolect.method import Method, State, Up


@dataclass(frozen=True)
class FedRep(Method):
    """FedRep. Collins et al., ICML 2021, Algorithm 1: shared body, private head; each round the head first, then the
    body.

    Departs from the paper: bodies are averaged by samples (uniformly in its theory). The body phase has the run's
    epochs unless `body_epochs` is set; the paper has 10 epochs of head and 1 of body.
    """

    head_epochs: int = 10
    body_epochs: int | None = None

    def init(self, net):
        return State(server={"model": net.body}, client={"model": net.head})

    def local(self, me, down, mine):
        body, head = down["model"], mine["model"]
        w = me.train(body | head, only=head, epochs=self.head_epochs)
        w = me.train(w, only=body, epochs=self.body_epochs)
        return Up(mean={"model": w.pick(body)}), {"model": w.pick(head)}
