from __future__ import annotations

from dataclasses import dataclass

from idiolect.method import Method, State, Up


@dataclass(frozen=True)
class Local(Method):
    """Local. Every client trains alone: the lower baseline that each federation has to beat.

    Nothing is sent. The participants of a round train, the same ones as for every method, so that compute is equal.
    Departs from the paper / the public code: none (folklore).
    """

    def init(self, net):
        return State(client={"model": net.weights})

    def local(self, me, down, mine):
        return Up(), {"model": me.train(mine["model"])}
