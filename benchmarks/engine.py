"""The engine against a bare PyTorch loop: samples per second of whole rounds, aggregation included.

    python benchmarks/engine.py [--json FILE] [--rounds 12] [--only W1] [--steps loop,compiled]

The bare loop is the least that one can write: one process per core with one thread, its clients' tensors in memory
(channels_last), one model whose weights are set to the shared ones, plain SGD, the results in shared memory, and their
mean. All sides run in turns in the same minutes, so that what else the machine does falls on all; a ratio is of
medians over rounds. Beside it stands the ratio of processor time, parent and workers together, which says more where
the machine is shared.

W1: 20 clients x 200 CIFAR-shaped samples, batch 10, one epoch, the 4-layer CNN. W2: the same with LeNet-5.
W3: 1,000 clients x 50 samples of 561 features, 100 a round, MLP 561-100-6. W4: the same with logistic regression.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import measure
from idiolect import Run
from idiolect.data import Dataset, Federation
from idiolect.engine.loop import one_round
from idiolect.engine.progress import Progress
from idiolect.engine.stepping import take
from idiolect.experiment import cores
from idiolect.method import Rows
from idiolect.nets import build
from idiolect.running import backend


@dataclass(frozen=True)
class Workload:
    name: str
    clients: int
    samples: int
    shape: tuple[int, ...]
    classes: int
    network: str
    ratio: float
    options: tuple[tuple[str, Any], ...] = ()
    batch: int = 10
    lr: float = 0.01

    def data(self) -> tuple[torch.Tensor, torch.Tensor]:
        draw = np.random.default_rng(0)
        n = self.clients * self.samples
        x = torch.tensor(draw.normal(size=(n, *self.shape)), dtype=torch.float32)
        return x, torch.tensor(draw.integers(self.classes, size=n))

    def module(self) -> nn.Module:
        torch.manual_seed(0)
        return build(self.network, self.shape, self.classes, **dict(self.options))


WORKLOADS = (
    Workload("W1", 20, 200, (3, 32, 32), 10, "cnn4", 1.0),
    Workload("W2", 20, 200, (3, 32, 32), 10, "lenet5", 1.0),
    Workload("W3", 1000, 50, (561,), 6, "mlp", 0.1, (("hidden", (100,)),)),
    Workload("W4", 1000, 50, (561,), 6, "logistic", 0.1),
)


class Bare:
    """The bare loop."""

    def __init__(self, work: Workload, processes: int) -> None:
        self.work = work
        x, y = work.data()
        x, y = x.share_memory_(), y.share_memory_()
        self.shared = nn.utils.parameters_to_vector(work.module().parameters()).detach().share_memory_()
        self.results = torch.empty(int(work.clients * work.ratio), len(self.shared)).share_memory_()
        context = multiprocessing.get_context("spawn")
        self.links, self.processes = [], []
        for _ in range(processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=bare, args=(theirs, work, x, y, self.shared, self.results), daemon=True)
            process.start()
            self.links.append(ours)
            self.processes.append(process.pid)

    def round(self, ids: list[int]) -> None:
        for k, link in enumerate(self.links):
            link.send([(place, i) for place, i in enumerate(ids)][k :: len(self.links)])
        for link in self.links:
            link.recv()
        torch.mean(self.results, dim=0, out=self.shared)

    def close(self) -> None:
        for link in self.links:
            link.send(None)


def bare(
    link: Any, work: Workload, x: torch.Tensor, y: torch.Tensor, shared: torch.Tensor, results: torch.Tensor
) -> None:
    torch.set_num_threads(1)
    model = work.module()
    if x.dim() == 4:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    model.train()
    parameters = list(model.parameters())
    while (turn := link.recv()) is not None:
        for place, i in turn:
            with torch.no_grad():
                at = 0
                for p in parameters:
                    p.copy_(shared[at : at + p.numel()].view_as(p))
                    at += p.numel()
            optimiser = torch.optim.SGD(parameters, lr=work.lr)
            own, labels = x[i * work.samples : (i + 1) * work.samples], y[i * work.samples : (i + 1) * work.samples]
            order = torch.randperm(work.samples)
            for start in range(0, work.samples, work.batch):
                chosen = order[start : start + work.batch]
                optimiser.zero_grad(set_to_none=True)
                nn.functional.cross_entropy(model(own[chosen]), labels[chosen]).backward()
                optimiser.step()
            with torch.no_grad():
                torch.cat([p.reshape(-1) for p in parameters], out=results[place])
        link.send(None)


class Engine:
    """FedAvg as every method runs, its steps taken in one of the ways that there are."""

    def __init__(self, work: Workload, processes: int, steps: str) -> None:
        x, y = work.data()
        parts = tuple(np.arange(i * work.samples, (i + 1) * work.samples) for i in range(work.clients))
        none = tuple(np.arange(0) for _ in parts)
        data = Dataset(work.name, x, y, work.classes, work.network)
        self.run = Run(
            method="fedavg", data=data, split=Federation(data, parts, none, none, "0", work.name), clients=work.clients,
            rounds=10**6, ratio=work.ratio, batch_size=work.batch, lr=work.lr, network=work.network,
            network_options=dict(work.options), evaluate_every=10**6, steps=steps, workers=processes,
        )  # fmt: skip
        self.context = self.run.context()
        state = self.context.state
        self.progress = Progress(state.server, Rows(state.rows), self.context.store(work.clients))
        take(self.context, steps)
        self.pool = backend(self.run, self.context, self.progress.store)
        self.processes = [w.process.pid for w in self.pool._workers]

    def round(self, ids: list[int]) -> None:
        one_round(self.run, self.context, self.pool, self.progress)

    def close(self) -> None:
        self.pool.close()


def compared(work: Workload, rounds: int, processes: int, steps: list[str]) -> dict[str, Any]:
    sides: dict[str, Any] = {"bare": Bare(work, processes)} | {way: Engine(work, processes, way) for way in steps}
    count = int(work.clients * work.ratio)
    times: dict[str, list[float]] = {name: [] for name in sides}
    busy = dict.fromkeys(sides, 0.0)
    for r in range(rounds + 2):
        ids = sorted(np.random.default_rng(r).choice(work.clients, count, replace=False).tolist())
        for name in sorted(sides, reverse=bool(r % 2)):
            side = sides[name]
            started, spent = time.perf_counter(), time.process_time() + cpu(side.processes)
            side.round(ids)
            if r >= 2:  # the first rounds warm all sides up
                times[name].append(time.perf_counter() - started)
                busy[name] += time.process_time() + cpu(side.processes) - spent
    for side in sides.values():
        side.close()
    samples = count * work.samples
    found: dict[str, Any] = {"workload": work.name, "rounds": rounds}
    for name, t in times.items():
        paired = [b / e for b, e in zip(times["bare"], t, strict=True)]
        found[name] = {
            "samples_per_second": samples / statistics.median(t),
            "ratio": statistics.median(times["bare"]) / statistics.median(t),
            "ratio_quartiles": statistics.quantiles(paired, n=4),
            "processor_ratio": busy["bare"] / busy[name] if busy[name] else None,
        }
    return found


def cpu(processes: list[int]) -> float:
    """Processor seconds of other processes so far, as Linux counts them."""
    total = 0
    for pid in processes if Path("/proc/self/stat").exists() else []:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = measure.options(__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="measured rounds per workload and side")
    parser.add_argument("--only", choices=[w.name for w in WORKLOADS], help="one workload")
    parser.add_argument("--steps", default="loop", help="ways to take steps, with commas: loop, compiled, stacked")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows, found, sides = [], [], ("bare", *given.steps.split(","))
    for work in WORKLOADS:
        if given.only in (None, work.name):
            rounds = given.rounds * (3 if work.ratio < 1 else 1)
            found.append(compared(work, rounds, cores(), list(sides[1:])))
            rows += [[work.name, name, *_shown(found[-1][name])] for name in sides]
    header = ["workload", "steps", "samples/s", "ratio", "quartiles of the rounds", "processor time"]
    measure.report(given, [measure.markdown(header, rows)], found)


def _shown(side: dict[str, Any]) -> list[str]:
    low, _, high = side["ratio_quartiles"]
    numbers = [f"{side['samples_per_second']:.0f}", f"{side['ratio']:.2f}", f"{low:.2f} to {high:.2f}"]
    return [*numbers, f"{side['processor_ratio'] or 0:.2f}"]


if __name__ == "__main__":
    main()
