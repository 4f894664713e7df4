"""What taking replies in costs beside training: the look for NaN and inf, the mean, and each robust reduction.

    python benchmarks/reception.py [--turns 5] [--clients 20] [--json FILE]

W1: 20 clients x 200 CIFAR-shaped samples, batch 10, one epoch, the 4-layer CNN, FedAvg, all taking part, one client
after another in one thread. What is looked for is less than a round's noise, so that the parts are timed by themselves,
over all replies of a round, and set against whole rounds that go without the look (`on_bad_reply=accept`). Seconds are
those of the process itself; each is a median over the turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

import measure
from idiolect.engine import robust
from idiolect.engine.reception import Reception, bad_numbers
from idiolect.engine.work import Reply
from idiolect.method import Up
from methods import Side

RULES = ("mean", "median", "trimmed:0.2", "krum:4", "multikrum:4", "clip:1", "geometric")


def main() -> None:
    parser = measure.options(__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--samples", type=int, default=200)
    given = parser.parse_args()
    torch.set_num_threads(1)
    side = Side("fedavg", given.clients, given.samples, on_bad_reply="accept")
    server = side.progress.server
    draw = torch.Generator().manual_seed(0)
    ups = [
        Up({"model": server["model"].map(lambda v: v + 0.01 * torch.randn(v.shape, generator=draw))})
        for _ in range(given.clients)
    ]
    parts: dict[str, Callable[[], Any]] = {"the look": lambda: [bad_numbers(Reply(0, up, {})) for up in ups]}
    parts |= {text: lambda text=text: reduced(text, server, ups) for text in RULES}
    times = measure.alternate(parts, given.turns)
    round = statistics.median(measure.alternate({"round": side.round}, given.turns)["round"].cpu)
    found = {name: statistics.median(t.cpu) for name, t in times.items()}
    rows = [[name, f"{1000 * seconds:.1f}", f"{100 * seconds / round:.2f}"] for name, seconds in found.items()]
    said = f"{given.clients} replies of {server['model'].size:,} numbers; a round takes {round:.2f} s."
    table = measure.markdown(["part", "ms", "% of a round"], rows)
    measure.report(given, [said, table], {"round_seconds": round, "part_seconds": found})


def reduced(text: str, server: Any, ups: list[Up]) -> Up:
    heard = Reception(rule=robust.rule(text)).begin("fedavg.local", server, 0)
    for client, up in enumerate(ups):
        heard.add(client, up, 1.0)
    return heard.result()


if __name__ == "__main__":
    main()
