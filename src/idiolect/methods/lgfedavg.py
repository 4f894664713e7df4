from __future__ import annotations

from dataclasses import dataclass

from idiolect.method import Method, State, Up, UsageError


@dataclass(frozen=True)
class LGFedAvg(Method):
    """LG-FedAvg. Liang et al., arXiv 2001.01523, 2020, Algorithm 1: private lower layers and
    shared upper ones, trained together.

    The last `layers` are shared; with `shared="bottom"` they are private, and all others shared.
    Departs from the paper: the only loss is that of the predictions; a new client starts from the initial lower layers,
    where the paper asks an ensemble of all clients'. From the public code: the text's upper layers are shared (the code
    for CIFAR-10 shares the convolutions); shared layers are averaged by samples; nothing is trained by FedAvg before,
    and no model is chosen by its accuracy on test data.
    """

    shared: str = "top"
    layers: int = 1

    def __post_init__(self):
        if self.shared not in ("top", "bottom"):
            raise UsageError(f"LGFedAvg.shared must be 'top' or 'bottom'; found '{self.shared}'.")
        if self.layers < 1:
            raise UsageError(f"LGFedAvg.layers must be at least 1; found {self.layers}.")

    def init(self, net):
        chosen = {name.rpartition(".")[0] for name in net.last(self.layers)}
        top = net.weights.pick(k for k in net.weights if k.rpartition(".")[0] in chosen)  # with their statistics
        bottom = net.weights.drop(top)
        shared, own = (top, bottom) if self.shared == "top" else (bottom, top)
        return State(server={"model": shared}, client={"model": own})

    def local(self, me, down, mine):
        shared, own = down["model"], mine["model"]
        w = me.train(shared | own)
        return Up(mean={"model": w.pick(shared)}), {"model": w.pick(own)}
