"""What taking replies in costs beside training: the look for NaN and inf, and each robust reduction.

    python benchmarks/reception.py [--turns 5] [--clients 20] [--json FILE]

W1: 20 clients x 200 CIFAR-shaped samples, batch 10, one epoch, the 4-layer CNN, FedAvg, all taking part, one client
after another in one thread. The sides take a whole round each in turns; seconds are those of the process itself. A
round's noise is larger than what a look at its replies costs, so that this is timed by itself as well: 20 replies, over
the seconds of a round that does not look (`on_bad_reply=accept`).
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

import measure
from idiolect.engine.reception import bad_numbers
from idiolect.engine.work import Reply
from idiolect.method import Up
from methods import Side

SIDES: dict[str, dict[str, Any]] = {
    "mean, accept": {"on_bad_reply": "accept"},
    "mean, drop": {},
    **{f"{reduce}, drop": {"reduce": reduce} for reduce in ("median", "trimmed:0.2", "krum:4", "clip:1", "geometric")},
}


def main() -> None:
    parser = measure.options(__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--samples", type=int, default=200)
    given = parser.parse_args()
    torch.set_num_threads(1)
    sides = {name: Side("fedavg", given.clients, given.samples, **fields) for name, fields in SIDES.items()}
    model = sides["mean, drop"].progress.server["model"]
    looks = {"look": lambda: [bad_numbers(Reply(i, Up({"model": model}), {})) for i in range(given.clients)]}
    look = statistics.median(measure.alternate(looks, 20)["look"].cpu)
    times = measure.alternate({name: side.round for name, side in sides.items()}, given.turns)
    plain = times["mean, accept"].cpu
    share = look / statistics.median(plain)
    rows = [[name, f"{statistics.median(t.cpu):.3f}", _ratio(t.cpu, plain)] for name, t in times.items()]
    table = measure.markdown(["reduction, on_bad_reply", "CPU seconds a round", "times the first"], rows)
    said = f"Looking at {given.clients} replies: {1000 * look:.2f} ms, {100 * share:.2f} % of a round."
    found = {name: {"cpu": t.cpu, **measure.ratio(t.cpu, plain)} for name, t in times.items()}
    measure.report(given, [table, said], {"rounds": found, "look_seconds": look, "share": share})


def _ratio(one: list[float], other: list[float]) -> str:
    found = measure.ratio(one, other)
    return f"{found['ratio']:.3f} ({found['low']:.3f} to {found['high']:.3f})"


if __name__ == "__main__":
    main()
