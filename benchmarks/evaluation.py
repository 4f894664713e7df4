"""Evaluating 1,000 clients with 12 test rows each, 100 of whom trained: processor seconds in one process, against every
client by itself and every time.

    python benchmarks/evaluation.py [--rounds 4]
"""

from __future__ import annotations

import argparse
import statistics
import time
from unittest.mock import patch

import numpy as np
import torch

from idiolect import Run
from idiolect.data import Dataset, Federation
from idiolect.engine.evaluating import Standing
from idiolect.engine.loop import evaluate, one_round
from idiolect.engine.progress import Progress, Report
from idiolect.engine.serial import Serial
from idiolect.engine.work import Context
from idiolect.method import Rows
from idiolect.running import one_thread

CLIENTS, ROWS = 1000, 12


def seconds(method: str, rounds: int) -> float:
    draw = np.random.default_rng(0)
    n = CLIENTS * 2 * ROWS
    x = torch.tensor(draw.normal(size=(n, 561)), dtype=torch.float32)
    data = Dataset("noise", x, torch.tensor(draw.integers(6, size=n)), 6, "mlp")
    parts = np.arange(n).reshape(CLIENTS, 2 * ROWS)
    split = Federation(data, tuple(parts[:, :ROWS]), tuple(parts[:, :0]), tuple(parts[:, ROWS:]), "0", "noise")
    run = Run(
        method=method, data=data, split=split, clients=CLIENTS, rounds=10**6, ratio=0.1, network="mlp",
        network_options={"hidden": (100,)}, evaluate_every=10**6, backend="serial",
    )  # fmt: skip
    context = run.context()
    progress, backend = (
        Progress(context.state.server, Rows(context.state.rows), context.store(CLIENTS)),
        Serial(context),
    )
    evaluate(run, context, backend, progress, Report(0))
    times = []
    for _ in range(rounds):
        one_round(run, context, backend, progress)
        started = time.process_time()
        evaluate(run, context, backend, progress, Report(0))
        times.append(time.process_time() - started)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    rounds = parser.parse_args().rounds
    print(f"torch {torch.__version__}")
    with one_thread():
        for method in ("fedavg", "fedper", "local"):
            now = seconds(method, rounds)
            with patch.object(Context, "together", 1), patch.object(Standing, "holds", lambda self, job: False):
                alone = seconds(method, rounds)
            print(f"{method:<8} now {now:.3f}  each by itself {alone:.3f}  {alone / now:.2f} times", flush=True)


if __name__ == "__main__":
    main()
