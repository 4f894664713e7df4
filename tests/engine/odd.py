"""Methods that do what no method should, for the tests of what the engine then does. Worker processes import this file."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from idiolect.errors import UsageError
from idiolect.method import Method, State, Tree, Up


@dataclass(frozen=True)
class Shared(Method):
    """FedAvg with a private counter, to be made odd."""

    def init(self, net):
        return State(server={"model": net.weights}, client={"count": torch.zeros((), dtype=torch.int64)})

    def local(self, me, down, mine):
        self.before(me)
        return Up(mean={"model": me.train(down["model"])}), {"count": mine["count"] + 1}

    def before(self, me):
        pass


@dataclass(frozen=True)
class KilledOnce(Shared):
    """The worker is killed at one client, or at that client in every round, but never twice for the same round."""

    folder: str = ""
    client: int = 0
    every_round: bool = False

    def before(self, me):
        flag = Path(self.folder, f"killed-{me.round if self.every_round else 0}")
        if me.id == self.client and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Waiting(Shared):
    """One client says where it runs and waits until somebody has killed that process."""

    folder: str = ""
    client: int = 0

    def before(self, me):
        told = Path(self.folder, "pid")
        if me.id == self.client and not told.exists():
            beside = told.with_suffix(".part")
            beside.write_text(str(os.getpid()))
            beside.rename(told)
            while True:
                time.sleep(0.01)


@dataclass(frozen=True)
class AlwaysKilled(Shared):
    client: int = 0

    def before(self, me):
        if me.id == self.client:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Raising(Shared):
    """A mistake, a complaint to the user, or a reply of the wrong names."""

    client: int = 0
    kind: str = "mistake"

    def local(self, me, down, mine):
        if me.id == self.client and self.kind == "mistake":
            self.a_step_down()
        if me.id == self.client and self.kind == "complaint":
            raise UsageError("This method needs more samples; found 3.")
        if me.id == self.client and self.kind == "reply":
            return Up(mean={"model": down["model"].pick(list(down["model"])[:1])}), mine
        if me.id == self.client and self.kind == "state":
            return Up(mean={"model": down["model"]}), {}
        return Up(mean={"model": down["model"]}), mine

    def a_step_down(self):
        raise ZeroDivisionError("of all things")


@dataclass(frozen=True)
class Threads(Shared):
    """Sends home how many threads its process uses."""

    def local(self, me, down, mine):
        return Up(mean={"model": down["model"]}, sum={"threads": torch.tensor(float(torch.get_num_threads()))}), mine

    def server(self, server, rows, up, run):
        assert float(up.sum["threads"]) == len(run.ids)
        return server, rows


@dataclass(frozen=True)
class Looking(Shared):
    """Sends home the sum of the samples that its process sees."""

    def local(self, me, down, mine):
        return Up(mean={"model": down["model"]}, rows={"seen": me.inputs.sum()}), mine


@dataclass(frozen=True)
class Slow(Shared):
    """One client takes its time."""

    client: int = 0

    def before(self, me):
        time.sleep(1.0 if me.id == self.client else 0.0)


@dataclass(frozen=True)
class Chatty(Shared):
    """So many tensors go down and come back."""

    count: int = 10

    def init(self, net):
        many = Tree({str(k): torch.tensor(float(k)) for k in range(self.count)})
        return replace(super().init(net), server={"model": net.weights, "many": many})

    def ask(self, me, down, mine):
        return Up(sum={"many": down["many"] + 1.0})


@dataclass(frozen=True)
class Remembering(Method):
    """Keeps the model before the last beside the last: what it returns are views of its own record, exchanged."""

    def init(self, net):
        return State(server={"model": net.weights}, client={"last": net.weights, "before": net.weights.zeros()})

    def local(self, me, down, mine):
        w = me.train(down["model"])
        return Up(mean={"model": w}), {"last": w, "before": mine["last"]}
