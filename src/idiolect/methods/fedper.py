from __future__ import annotations

from dataclasses import dataclass

from idiolect.method import Method, State, Up


@dataclass(frozen=True)
class FedPer(Method):
    """FedPer. Arivazhagan et al., arXiv 1912.00818, 2019, Algorithms 1 and 2: shared body, private head, trained
    together.

    Departs from the paper: the private part is the head alone (the paper's K_P = 1).
    """

    def init(self, net):
        return State(server={"model": net.body}, client={"model": net.head})

    def local(self, me, down, mine):
        body, head = down["model"], mine["model"]
        w = me.train(body | head)
        return Up(mean={"model": w.pick(body)}), {"model": w.pick(head)}
