"""What a round of each method costs, in rounds of FedAvg, beside what its passes over the data explain.

    python benchmarks/methods.py [NAMES ...] [--clients 20] [--samples 200] [--turns 5] [--where] [--json FILE]

W1: 20 clients x 200 CIFAR-shaped samples, batch 10, one epoch, the 4-layer CNN, all taking part; two options make it
smaller. Every method runs in turns with FedAvg, one client after another in one thread; a turn is a whole round, the
server's part included, evaluation not. Seconds are those that the process itself was computing.

    passes     gradient passes over a participant's training set, as the engine counts and reports them
    work       the arithmetic of the round over that of FedAvg's (floating-point operations of convolutions and matrix
               products, forwards and backwards, counted by torch): what gradient passes, frozen parts, passes without
               gradients and references explain together
    time       the round's seconds over those of FedAvg's, and the quartiles over the turns
    time/work  above 1.15 a method costs more than its passes explain
    where      with --where: the operators that took longest beyond what FedAvg's work explains, as shares of a round,
               by torch's profiler (seconds on the clock, for each operator the least of three rounds)

A wrapper is measured around FedAvg. FedLAG has no warm-up here; FedAF condenses to one image a class in ten iterations.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import measure
from idiolect import Run, catalogue
from idiolect.data import Dataset, Federation
from idiolect.engine import memory
from idiolect.engine.introductions import hello
from idiolect.engine.loop import one_round
from idiolect.engine.progress import Progress
from idiolect.engine.serial import Serial
from idiolect.method import Rows

ALLOWED = 1.15
SHOWN, PROFILED = 4, 3  # operators of a method, rounds
SETTINGS: dict[str, dict[str, Any]] = {
    "fedlag": {"warmup": 0},
    "fedaf": {"ipc": 1, "iterations": 10, "server_epochs": 1},
}
BEFORE = 2  # rounds before the first that is looked at: first visits cost more in some methods


class Work(TorchDispatchMode):
    """Counts the arithmetic that is done inside, by PyTorch's own formulas."""

    done = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.done += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=result)
        return result


class Side:
    """A method's run, round by round."""

    def __init__(self, name: str, clients: int, samples: int, **fields: Any) -> None:
        draw = np.random.default_rng(0)
        n = clients * samples
        x = torch.tensor(draw.normal(size=(n, 3, 32, 32)), dtype=torch.float32)
        data = Dataset("W1", x, torch.tensor(draw.integers(10, size=n)), 10, "cnn4")
        parts = tuple(np.split(np.arange(n), clients))
        none = tuple(np.arange(0) for _ in parts)
        self.run = Run(
            method=catalogue.build(name, SETTINGS.get(name)), data=data, clients=clients, rounds=100, backend="serial",
            split=Federation(data, parts, none, none, "0", "W1"), evaluate_every=100,
            **fields,
        )  # fmt: skip
        self.context = self.run.context()
        state = self.context.state
        self.progress = Progress(state.server, Rows(state.rows), self.context.store(clients))
        self.backend, self.passes = Serial(self.context), 0.0
        hello(self.run, self.context, self.backend, self.progress)
        for _ in range(BEFORE):
            self.round()

    def round(self) -> None:
        self.passes = one_round(self.run, self.context, self.backend, self.progress).passes

    def work(self) -> int:
        """Floating-point operations of one round."""
        with Work() as work:
            self.round()
        return work.done

    def operators(self) -> dict[str, float]:
        """Seconds that each operator took by itself in a round: the least of some rounds."""
        least: dict[str, float] = {}
        for _ in range(PROFILED):
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                self.round()
            found = {str(one.key): one.self_cpu_time_total / 1e6 for one in seen.key_averages()}
            least = {name: min(seconds, least.get(name, seconds)) for name, seconds in found.items()}
        return least


def beyond(method: Side, fedavg: Side, work: float) -> dict[str, float]:
    """The operators with most seconds beyond so many times FedAvg's, as shares of the method's round."""
    found, plain = method.operators(), fedavg.operators()
    more = {name: (seconds - work * plain.get(name, 0.0)) / sum(found.values()) for name, seconds in found.items()}
    return dict(sorted(more.items(), key=lambda one: -one[1])[:SHOWN])


def compared(name: str, clients: int, samples: int, turns: int, where: bool) -> dict[str, Any]:
    sides = {side: Side(side, clients, samples) for side in dict.fromkeys(("fedavg", name))}
    work = {side: of.work() for side, of in sides.items()}
    times = measure.alternate({side: of.round for side, of in sides.items()}, turns, warm=0)
    found = measure.ratio(times[name].cpu, times["fedavg"].cpu)
    seconds = {side: {"wall": of.wall, "cpu": of.cpu} for side, of in times.items()}
    work_ratio = work[name] / work["fedavg"]
    return {
        "method": name, "passes": sides[name].passes, "work": work_ratio, **found,
        "beyond": found["ratio"] / work_ratio, "seconds": seconds,
        "where": beyond(sides[name], sides["fedavg"], work_ratio) if where else {},
    }  # fmt: skip


def row(found: dict[str, Any]) -> list[str]:
    time = f"{found['ratio']:.2f} ({found['low']:.2f} to {found['high']:.2f})"
    beyond = f"{found['beyond']:.2f}"
    return [
        found["method"], f"{found['passes']:.2f}", f"{found['work']:.2f}", time,
        f"**{beyond}**" if found["beyond"] > ALLOWED else beyond,
        ", ".join(f"{name.removeprefix('aten::')} {100 * share:.0f} %" for name, share in found["where"].items()),
    ]  # fmt: skip


def main() -> None:
    parser = measure.options(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAMES", help="default: every method, and wrappers around FedAvg")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--turns", type=int, default=5, help="measured rounds of each side")
    parser.add_argument("--where", action="store_true", help="profile a round of each as well")
    given = parser.parse_args()
    torch.set_num_threads(1)
    memory.keep()  # as a run does
    found = []
    for name in given.names or catalogue.names():
        found.append(compared(name, given.clients, given.samples, given.turns, given.where))
        print(*row(found[-1]), sep="  ", file=sys.stderr, flush=True)
    found.sort(key=lambda one: -one["beyond"])
    columns = ["method", "passes", "work", "time", "time/work", "where"]
    cells = [row(one)[: len(columns) - (not given.where)] for one in found]
    measure.report(given, [measure.markdown(columns[: len(cells[0])], cells)], found)


if __name__ == "__main__":
    main()
