"""Features of a frozen body once: seconds a round against the same phases with the body run in every step.

    python benchmarks/features.py [--json FILE] [--rounds 5] [--clients 4]

Each method trains clients of 200 CIFAR-shaped samples with the 4-layer CNN, batch 10, five epochs of head, in one
process with one thread. The plain side is the same file of the method, whose head phases are told to run the whole
network in every step. Both take turns in the same minutes; a ratio is of medians. Beside it stands the largest
difference of any weight after the rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import measure
from idiolect import Run
from idiolect.client import Client
from idiolect.data import Dataset, Federation
from idiolect.engine.loop import evaluate, one_round
from idiolect.engine.progress import Progress, Report
from idiolect.engine.serial import Serial
from idiolect.method import Rows
from idiolect.running import one_thread
from idiolect.tree import Tree

SAMPLES = 200
CASES = (
    "fedrep(head_epochs=5)", "fedah(head_epochs=5)", "fedpac(head_epochs=5)", "fedala(first_epochs=5)",
    "fedbabu(tune_epochs=5,tune_part=head)", "fedavg+finetune(epochs=5,part=head)",
)  # fmt: skip


class Plain(Client):
    """Phases of heads as they are written down: every step runs the body."""

    def train(self, w: Tree, **options: Any) -> Tree:
        if options.pop("features", None) is None and options.get("loss") is None:
            options["loss"] = _whole
        return super().train(w, **options)


def _whole(task: Any, w: Tree, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = task.loss(w, batch)
    return loss


class Side:
    def __init__(self, method: str, clients: int, view: type[Client]) -> None:
        draw = np.random.default_rng(0)
        n = clients * SAMPLES
        data = Dataset(
            "noise", torch.tensor(draw.normal(size=(n, 3, 32, 32)), dtype=torch.float32),
            torch.tensor(draw.integers(10, size=n)), 10, "cnn4",
        )  # fmt: skip
        parts = np.arange(n).reshape(clients, SAMPLES)
        split = Federation(data, tuple(parts[:, :-40]), tuple(parts[:, :0]), tuple(parts[:, -40:]), "0", "noise")
        self.run = Run(
            method=_method(method), data=data, split=split, clients=clients, rounds=10**6, evaluate_every=10**6,
            batch_size=10, lr=0.01, backend="serial",
        )  # fmt: skip
        self.context = self.run.context()
        self.context.view = view  # type: ignore[misc]
        state = self.context.state
        self.progress = Progress(state.server, Rows(state.rows), self.context.store(clients))
        self.backend = Serial(self.context)

    def round(self) -> None:
        """Training, and every client's evaluation, in which some methods tune."""
        one_round(self.run, self.context, self.backend, self.progress)
        evaluate(self.run, self.context, self.backend, self.progress, Report(0))

    def weights(self) -> list[torch.Tensor]:
        own = [self.progress.store.read(i) for i in range(self.run.clients)]
        slots = [v for state in [self.progress.server, *own] for v in state.values()]
        return [t for v in slots for t in (v.values() if isinstance(v, Tree) else [v]) if t.is_floating_point()]


def _method(text: str) -> Any:
    from idiolect import catalogue

    name, _, fields = text.rstrip(")").partition("(")
    prefix = name.rpartition("+")[2] + "." if "+" in name else ""
    given = dict(field.split("=") for field in fields.split(","))
    return catalogue.build(name, {prefix + k: int(v) if v.isdigit() else v for k, v in given.items()})


def compared(method: str, rounds: int, clients: int) -> dict[str, Any]:
    sides = {"once": Side(method, clients, Client), "plain": Side(method, clients, Plain)}
    times: dict[str, list[float]] = {name: [] for name in sides}
    clock: Callable[[], float] = time.process_time  # one thread: what else the machine does counts less than in seconds
    for r in range(rounds + 1):
        for name in sorted(sides, reverse=bool(r % 2)):
            started = clock()
            sides[name].round()
            if r:  # the first round warms both up
                times[name].append(clock() - started)
    once, plain = (statistics.median(times[name]) for name in ("once", "plain"))
    apart = max(float((a - b).abs().max()) for a, b in zip(*(s.weights() for s in sides.values()), strict=True))
    return {"method": method, "seconds": once, "plain_seconds": plain, "ratio": plain / once, "apart": apart}


def main() -> None:
    parser = measure.options(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each method and side")
    parser.add_argument("--clients", type=int, default=4)
    given = parser.parse_args()
    with one_thread():
        found = [compared(method, given.rounds, given.clients) for method in CASES]
    rows = [
        [f["method"], f"{f['seconds']:.2f}", f"{f['plain_seconds']:.2f}", f"{f['ratio']:.2f}", f"{f['apart']:.1e}"]
        for f in found
    ]
    header = ["method", "once, s", "plain, s", "ratio", "largest difference"]
    measure.report(given, [measure.markdown(header, rows)], found)


if __name__ == "__main__":
    main()
