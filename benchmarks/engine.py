"""The engine against a bare PyTorch loop: samples per second of whole rounds, aggregation included.

    python benchmarks/engine.py [--json FILE] [--rounds 12] [--only W1]

The bare loop is the least that one can write: one process per core with one thread, its clients' tensors in memory
(channels_last), one model whose weights are set to the shared ones, plain SGD, the results in shared memory, and their
mean. Both sides run in turns in the same minutes, so that what else the machine does falls on both; a ratio is of
medians over rounds.

W1: 20 clients x 200 CIFAR-shaped samples, batch 10, one epoch, the 4-layer CNN. W2: the same with LeNet-5.
W3: 1,000 clients x 50 samples of 561 features, 100 a round, MLP 561-100-6.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from idiolect import Run
from idiolect.data import Dataset, Federation
from idiolect.engine.loop import one_round
from idiolect.engine.progress import Progress
from idiolect.engine.workers import Workers
from idiolect.experiment import cores
from idiolect.method import Rows
from idiolect.nets import build


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
        self.links = []
        for _ in range(processes):
            ours, theirs = context.Pipe()
            context.Process(target=bare, args=(theirs, work, x, y, self.shared, self.results), daemon=True).start()
            self.links.append(ours)

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
    """FedAvg as every method runs."""

    def __init__(self, work: Workload, processes: int) -> None:
        x, y = work.data()
        parts = tuple(np.arange(i * work.samples, (i + 1) * work.samples) for i in range(work.clients))
        none = tuple(np.arange(0) for _ in parts)
        data = Dataset(work.name, x, y, work.classes, work.network)
        self.run = Run(
            method="fedavg", data=data, split=Federation(data, parts, none, none, "0", work.name), clients=work.clients,
            rounds=10**6, ratio=work.ratio, batch_size=work.batch, lr=work.lr, network=work.network,
            network_options=dict(work.options), evaluate_every=10**6,
        )  # fmt: skip
        self.context = self.run.context()
        state = self.context.state
        self.progress = Progress(state.server, Rows(state.rows), self.context.store(work.clients))
        self.pool = Workers(self.context, self.progress.store, processes)

    def round(self, ids: list[int]) -> None:
        one_round(self.run, self.context, self.pool, self.progress)

    def close(self) -> None:
        self.pool.close()


def measure(work: Workload, rounds: int, processes: int) -> dict[str, Any]:
    sides = {"bare": Bare(work, processes), "engine": Engine(work, processes)}
    count = int(work.clients * work.ratio)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for r in range(rounds + 2):
        ids = sorted(np.random.default_rng(r).choice(work.clients, count, replace=False).tolist())
        for name in sorted(sides, reverse=bool(r % 2)):
            started = time.perf_counter()
            sides[name].round(ids)
            if r >= 2:  # the first rounds warm both sides up
                times[name].append(time.perf_counter() - started)
    for side in sides.values():
        side.close()
    samples = count * work.samples
    speed = {name: samples / statistics.median(t) for name, t in times.items()}
    paired = [b / e for b, e in zip(times["bare"], times["engine"], strict=True)]
    return {
        "workload": work.name,
        "bare_samples_per_second": speed["bare"],
        "engine_samples_per_second": speed["engine"],
        "ratio": speed["engine"] / speed["bare"],
        "ratio_quartiles": statistics.quantiles(paired, n=4),
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    parser.add_argument("--rounds", type=int, default=12, help="measured rounds per workload and side")
    parser.add_argument("--only", choices=[w.name for w in WORKLOADS], help="one workload")
    options = parser.parse_args()
    processes = cores()
    torch.set_num_threads(1)
    machine = {
        "cores": processes,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    print(f"{processes} processes, one thread each; torch {torch.__version__}")
    found = []
    for work in WORKLOADS:
        if options.only in (None, work.name):
            found.append(measure(work, options.rounds * (3 if work.name == "W3" else 1), processes))
            low, _, high = found[-1]["ratio_quartiles"]
            print(
                f"{work.name}: bare {found[-1]['bare_samples_per_second']:9.0f}/s  "
                f"engine {found[-1]['engine_samples_per_second']:9.0f}/s  "
                f"ratio {found[-1]['ratio']:.3f}  (rounds' quartiles {low:.3f} to {high:.3f})", flush=True,
            )  # fmt: skip
    if options.json:
        options.json.write_text(
            json.dumps({"machine": machine, "load": os.getloadavg(), "results": found}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
