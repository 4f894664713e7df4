"""Evaluating 1,000 clients with 12 test rows each, 100 of whom trained: processor seconds in one process, against every
client by itself and every time.

    python benchmarks/evaluation.py [--rounds 4] [--json FILE]
"""

from __future__ import annotations

import statistics
import time
from unittest.mock import patch

import numpy as np
import torch

import measure
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


class Side:
    """A federation of its own, whose rounds are evaluated and timed."""

    def __init__(self, method: str) -> None:
        draw = np.random.default_rng(0)
        n = CLIENTS * 2 * ROWS
        x = torch.tensor(draw.normal(size=(n, 561)), dtype=torch.float32)
        data = Dataset("noise", x, torch.tensor(draw.integers(6, size=n)), 6, "mlp")
        parts = np.arange(n).reshape(CLIENTS, 2 * ROWS)
        split = Federation(data, tuple(parts[:, :ROWS]), tuple(parts[:, :0]), tuple(parts[:, ROWS:]), "0", "noise")
        self.run = Run(
            method=method, data=data, split=split, clients=CLIENTS, rounds=10**6, ratio=0.1, network="mlp",
            network_options={"hidden": (100,)}, evaluate_every=10**6, backend="serial",
        )  # fmt: skip
        self.context = self.run.context()
        state = self.context.state
        self.progress = Progress(state.server, Rows(state.rows), self.context.store(CLIENTS))
        self.backend = Serial(self.context)
        self.evaluated()

    def evaluated(self) -> float:
        """Processor seconds of an evaluation."""
        started = time.process_time()
        evaluate(self.run, self.context, self.backend, self.progress, Report(0))
        return time.process_time() - started

    def seconds(self) -> float:
        one_round(self.run, self.context, self.backend, self.progress)
        return self.evaluated()


class Alone(Side):
    """The same, each client by itself and every time."""

    def evaluated(self) -> float:
        with patch.object(Context, "together", 1), patch.object(Standing, "holds", lambda self, job: False):
            return super().evaluated()


def main() -> None:
    parser = measure.options(__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    given = parser.parse_args()
    found = {}
    with one_thread():
        for method in ("fedavg", "fedper", "local"):
            sides = Side(method), Alone(method)
            turns = [[side.seconds() for side in sides] for _ in range(given.rounds)]
            now, alone = zip(*turns, strict=True)
            found[method] = {"now": now, "alone": alone, **measure.ratio(alone, now)}
    median = statistics.median
    rows = [[m, f"{median(f['now']):.3f}", f"{median(f['alone']):.3f}", f"{f['ratio']:.1f}"] for m, f in found.items()]
    measure.report(given, [measure.markdown(["method", "now, s", "each by itself, s", "ratio"], rows)], found)


if __name__ == "__main__":
    main()
