"""A GPU: clients one after another and stacked, against a bare PyTorch loop on the same GPU.

    python benchmarks/gpu.py [--rounds 5] [--json FILE] [--device cuda]

The bare loop has all samples on the device, one nn.Module whose weights are set to the shared ones, SGD, and the mean
of the results. The workloads are those of benchmarks/engine.py. Samples per second of whole rounds, aggregation
included; the sides take turns, and a round is over when the device is. `--device cpu` shows that it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

import measure
from engine import WORKLOADS, Workload
from idiolect import Run
from idiolect.data import Dataset, Federation
from idiolect.engine.loop import one_round
from idiolect.engine.progress import Progress
from idiolect.method import Rows
from idiolect.running import backend


def bare(work: Workload, device: str) -> Callable[[], None]:
    """One client after another, as one would write it by hand."""
    x, y = (t.to(device) for t in work.data())
    model = work.module().to(device)
    shared = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    parameters, ids = list(model.parameters()), range(int(work.clients * work.ratio))

    def round() -> None:
        total = torch.zeros_like(shared)
        for i in ids:
            nn.utils.vector_to_parameters(shared.clone(), parameters)
            optimiser = torch.optim.SGD(parameters, lr=work.lr)
            own, labels = (t[i * work.samples : (i + 1) * work.samples] for t in (x, y))
            order = torch.randperm(work.samples).to(device)
            for chosen in order.split(work.batch):
                optimiser.zero_grad(set_to_none=True)
                nn.functional.cross_entropy(model(own[chosen]), labels[chosen]).backward()
                optimiser.step()
            total += nn.utils.parameters_to_vector(parameters).detach()
        shared.copy_(total / len(ids))
        waited(device)

    return round


def engine(work: Workload, device: str, kind: str) -> Callable[[], None]:
    x, y = work.data()
    parts = tuple(np.arange(i * work.samples, (i + 1) * work.samples) for i in range(work.clients))
    none = tuple(np.arange(0) for _ in parts)
    data = Dataset(work.name, x, y, work.classes, work.network)
    run = Run(
        method="fedavg", data=data, split=Federation(data, parts, none, none, "0", work.name), clients=work.clients,
        rounds=10**6, ratio=work.ratio, batch_size=work.batch, lr=work.lr, network=work.network,
        network_options=dict(work.options), evaluate_every=10**6, backend=kind, device=device,
    )  # fmt: skip
    context = run.context()
    progress = Progress(context.state.server, Rows(context.state.rows), context.store(work.clients))
    pool = backend(run, context, progress.store)

    def round() -> None:
        one_round(run, context, pool, progress)
        waited(device)

    return round


def waited(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def main() -> None:
    parser = measure.options(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", metavar="NAMES", default="W1,W2,W3")
    parser.add_argument("--small", action="store_true", help="a fifth of the samples, to try it")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows, results = [], []
    for work in WORKLOADS:
        if work.name not in given.only.split(","):
            continue
        work = replace(work, samples=work.samples // 5) if given.small else work
        sides: dict[str, Any] = {"bare": bare(work, given.device)}
        sides |= {kind: engine(work, given.device, kind) for kind in ("serial", "stacked")}
        times = measure.alternate(sides, given.rounds)
        samples = int(work.clients * work.ratio) * work.samples
        ratios = {kind: measure.ratio(times["bare"].wall, times[kind].wall) for kind in ("serial", "stacked")}
        rate = {name: samples / float(np.median(t.wall)) for name, t in times.items()}
        told = [f"{r['ratio']:.2f} ({r['low']:.2f} to {r['high']:.2f})" for r in ratios.values()]
        rows.append([work.name, f"{rate['bare']:,.0f}", *told])
        results.append({"workload": work.name, "samples_per_second": rate, "ratios": ratios})
        print(rows[-1], flush=True)
    name = torch.cuda.get_device_name() if given.device.startswith("cuda") else "CPU"
    table = measure.markdown(["workload", "bare, samples/s", "one after another", "stacked"], rows)
    measure.report(given, [f"Device: {name}.", table], {"device": name, "workloads": results})


if __name__ == "__main__":
    main()
