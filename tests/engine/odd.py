"""Methods that do what no method should, for the tests of what the engine then does. Worker processes import this file."""

from __future__ import annotations

import os
import resource
import signal
import statistics
import time
from dataclasses import dataclass, replace
from itertools import pairwise
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
class Paging(Shared):
    """Allocates a network's worth of tensors and lets go of them, again and again; says how many pages that took."""

    def init(self, net):
        state = super().init(net)
        return replace(state, server={**state.server, "pages": torch.zeros(())})

    def local(self, me, down, mine):
        up, mine = super().local(me, down, mine)
        return replace(up, sum={"pages": torch.tensor(float(pages()))}), mine

    def server(self, server, rows, up, run):
        return {**server, **up.mean, **up.sum}, rows


def pages():
    """Page faults of a turn like others: the first ones may find less memory than they need."""
    turn = lambda: [torch.ones(1 << 19) for _ in range(8)] and resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    counts = [turn() for _ in range(22)]
    return statistics.median(b - a for a, b in pairwise(counts))


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


def hog():
    """Ask for more memory than this process may have from now on."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20), limit[1]))
    held = []
    try:
        while True:
            held.append(torch.ones(4 << 20))
    finally:
        held.clear()
        resource.setrlimit(resource.RLIMIT_AS, limit)


FAILURES = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "exit": lambda: os._exit(7),
    "hang": lambda: time.sleep(10**6),
    "hog": hog,
    "list": lambda: [0] * (1 << 60),
}


@dataclass(frozen=True)
class Failing(Shared):
    """Some clients fail in one of their functions, so many times in each round that it is asked for."""

    folder: str = ""
    clients: tuple[int, ...] = ()
    how: str = "kill"
    times: int = 10**6
    where: str = "local"

    def fail(self, me, where):
        if where == self.where and me.id in self.clients:
            before = len(list(Path(self.folder).glob(f"{me.id}-{me.round}-*")))
            if before < self.times:
                Path(self.folder, f"{me.id}-{me.round}-{before}").touch(exist_ok=False)
                FAILURES[self.how]()

    def before(self, me):
        self.fail(me, "local")


@dataclass(frozen=True)
class FailingTwice(Failing):
    """Some fail always, and some once."""

    once: tuple[int, ...] = ()

    def before(self, me):
        replace(self, clients=self.once, times=1).fail(me, "local")
        self.fail(me, "local")


@dataclass(frozen=True)
class Asked(Failing):
    """Clients are asked something first."""

    def ask(self, me, down, mine):
        self.fail(me, "ask")
        return Up(sum={"n": torch.tensor(float(me.n))})


@dataclass(frozen=True)
class Greeting(Failing):
    """Clients introduce themselves."""

    def init(self, net):
        return replace(super().init(net), rows={"n": torch.tensor(0.0)})

    def down(self, server, row):
        return server

    def hello(self, me, down, mine):
        self.fail(me, "hello")
        return {"n": torch.tensor(float(me.n))}


@dataclass(frozen=True)
class Unpredictable(Failing):
    """A client that has trained fails when it is to predict with what it received, not with what it trained."""

    where: str = "personal"

    def personal(self, me, down, mine):
        if me.visits and mine["count"] == me.visits:
            self.fail(me, "personal")
        return super().personal(me, down, mine)


@dataclass(frozen=True)
class FailingTogether(Failing):
    """What several clients compute together fails the first times: a stack's loss, or the scores of one batch."""

    where: str = "loss"

    def local(self, me, down, mine):
        return Up(mean={"model": me.train(down["model"], loss=self.loss)}), {"count": mine["count"] + 1}

    def loss(self, task, w, batch):
        self.fail_together("loss")
        return task.loss(w, batch)

    def logits(self, task, w, x):
        self.fail_together("logits")
        return super().logits(task, w, x)

    def fail_together(self, where):
        if where != self.where:
            return
        before = len(list(Path(self.folder).iterdir()))
        if before < self.times:
            Path(self.folder, str(before)).touch(exist_ok=False)
            FAILURES[self.how]()


def ended():
    os._exit(3)


@dataclass(frozen=True)
class Unborn(Shared):
    """A worker ends when it is told of this method."""

    def __reduce__(self):
        return ended, ()


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


@dataclass(frozen=True)
class Orphaning(Shared):
    """One client kills the server of which its process is a fork, and waits for its own end."""

    folder: str = ""
    starter: int = 0
    client: int = 0

    def before(self, me):
        told = Path(self.folder, "orphan")
        if me.id == self.client and not told.exists():
            told.touch()
            os.kill(self.starter, signal.SIGKILL)
            time.sleep(10**6)
