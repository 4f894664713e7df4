from __future__ import annotations

from dataclasses import dataclass

from idiolect.method import Method, State, Up, UsageError


@dataclass(frozen=True)
class FedBABU(Method):
    """FedBABU. Oh, Kim and Yun, ICLR 2022, Algorithm 1: FedAvg of the body alone, under the initial head,
    which is everybody's and never trained; a client predicts with a copy that it fine-tunes on its own data.

    Departs from the paper: fine-tuning has the run's optimiser, and the rate of the round that would come next. From
    the public code: bodies are averaged by samples; the head is left out of training, not given a gradient of 0, with
    which weight decay still moves it; every client tunes the newest shared body, and anew for each evaluation.
    """

    tune_epochs: int = 5
    tune_part: str = "all"

    def __post_init__(self):
        if self.tune_epochs < 0:
            raise UsageError(f"FedBABU.tune_epochs must be 0 or more; found {self.tune_epochs}.")
        if self.tune_part not in ("all", "head"):
            raise UsageError(f"FedBABU.tune_part must be 'all' or 'head'; found '{self.tune_part}'.")

    def init(self, net):
        if not net.body:
            raise UsageError("FedBABU trains the body alone, and the network has none. Use a deeper one.")
        return State(server={"model": net.body}, client={"model": net.head})

    def local(self, me, down, mine):
        body, head = down["model"], mine["model"]
        w = me.train(body | head, only=body)
        return Up(mean={"model": w.pick(body)}), mine

    def personal(self, me, down, mine):
        body, head = down["model"], mine["model"]
        only = head if self.tune_part == "head" else None
        return me.train(body | head, only=only, epochs=self.tune_epochs, order=8)
