"""The server's side of a round, without the clients' training: its mean, and what some methods make of all replies.

    python benchmarks/server.py [--clients 100] [--network resnet18] [--parts average fedlag ...] [--json FILE]

100 replies of a ResNet-18 (11.2 M parameters, float32), one thread, as in a run. Seconds are those that the process
itself was computing.

    average    the mean of replies that come one by one, in turns with the memory's bandwidth: x.copy_(y) over as many
               floats (2 streams) and x.lerp_(y, 0.5) (3 streams, what a mean is made of). Its own bytes are 3 streams
               a reply.
    fedlag     the layers' conflicts: for each a Gram matrix of all updates. Replies are drawn layer by layer
    fedaims    the similarities of all bodies of the participants, and whom they make supervise which block
    fedamp     who mixes with whom, and the cloud models. A fifth of the clients: the others have to fit beside
    fedpac     the weights of all heads (100 classes, 512 features)
    fedsimsup  `down` of every client of a federation of 10,000, as an evaluation asks; one by one, and at once

Beside the seconds stands the memory that the step itself takes at most beyond what it is given, in models.
"""

from __future__ import annotations

import ctypes
import gc
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import measure
from fedsimsup import Server
from idiolect.engine import memory
from idiolect.engine.reduce import Reduction
from idiolect.method import Rows, Up
from idiolect.methods.fedaims import FedAIMS
from idiolect.methods.fedamp import FedAMP
from idiolect.methods.fedpac import FedPAC
from idiolect.nets import build
from idiolect.tree import Tree
from idiolect.wrap.fedlag import FedLAG

SHAPE, CLASSES = (3, 32, 32), 10
DISTINCT = 8  # replies in memory at once
FEDERATION, ROUNDS, ASKED = 10_000, 100, 128


class Watched:
    """Memory that this process comes to hold inside, at most, beyond what it held (Linux)."""

    def __enter__(self) -> Watched:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # else what was let go of before could be taken again unseen
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._before = held("VmRSS")
        return self

    def __exit__(self, *error: Any) -> None:
        self.bytes = held("VmHWM") - self._before


def held(line: str) -> int:
    found = re.search(rf"^{line}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def network(name: str) -> Tree:
    """The weights of a network, drawn."""
    return Tree((k, v.detach()) for k, v in build(name, SHAPE, CLASSES).named_parameters())


def average(w: Tree, clients: int, turns: int) -> dict[str, Any]:
    replies = [w.map(torch.rand_like) for _ in range(DISTINCT)]
    x, y = torch.rand(w.size), torch.rand(w.size)

    def mean() -> None:
        reduction = Reduction("fedavg.local", {"model": w})
        for i in range(clients):
            reduction.add(i, Up(mean={"model": replies[i % DISTINCT]}), 100.0 + i)
        reduction.result()

    sides = {"copy": lambda: x.copy_(y), "lerp": lambda: x.lerp_(y, 0.5), "mean": mean}
    streams = {"copy": 2, "lerp": 3, "mean": 3 * clients}
    times = measure.alternate(sides, turns)
    speed = {k: streams[k] * w.nbytes / statistics.median(t.cpu) / 1e9 for k, t in times.items()}
    with Watched() as watched:
        mean()
    return {
        "part": "average", "seconds": statistics.median(times["mean"].cpu), "models": watched.bytes / w.nbytes,
        "gigabytes_per_second": speed, "said": f"{speed['mean']:.0f} GB/s; copy {speed['copy']:.0f}, lerp "
        f"{speed['lerp']:.0f}: {speed['mean'] / max(speed['copy'], speed['lerp']):.2f} of the faster",
    }  # fmt: skip


def timed(part: str, step: Callable[[], Any], model: int, turns: int, said: str) -> dict[str, Any]:
    times = measure.alternate({part: step}, turns)[part]
    with Watched() as watched:
        step()
    return {"part": part, "seconds": statistics.median(times.cpu), "models": watched.bytes / model, "said": said}


def fedlag(w: Tree, clients: int, turns: int) -> dict[str, Any]:
    """Layer by layer, as the replies of all layers together would fill the memory."""
    method, times, most = FedLAG(FedAMP()), measure.Times(), 0
    layers: dict[str, Tree] = {}
    for name, value in w.items():
        layer = name.rpartition(".")[0]
        layers[layer] = layers.get(layer, Tree()) | {name: value}
    for layer, start in layers.items():
        ended = start.map(lambda v: v + torch.rand(clients, *v.shape))
        times.time(lambda ended=ended, start=start, layer=layer: method.conflicts(ended, start, [layer]))  # type: ignore[misc]
        with Watched() as watched:
            method.conflicts(ended, start, [layer])
        most = max(most, watched.bytes)
    return {
        "part": "fedlag", "seconds": sum(times.cpu), "models": most / w.nbytes,
        "said": f"conflicts of {len(layers)} layers, {clients} clients",
    }  # fmt: skip


def fedaims(w: Tree, clients: int, turns: int) -> dict[str, Any]:
    """`plan` of FedAIMS, on rows of which few are distinct in memory."""
    flat = [torch.nn.functional.normalize(torch.rand(w.size), dim=0) for _ in range(DISTINCT)]
    rows = Rows({"block": torch.zeros((), dtype=torch.uint8), "compared": flat[0]})
    rows = rows.with_(range(clients), compared=[flat[i % DISTINCT] for i in range(clients)])
    method, server = FedAIMS(), {"model": w}
    known: Any = type("Known", (), {"ids": tuple(range(clients))})
    return timed("fedaims", lambda: method.plan(server, rows, known), w.nbytes, turns, f"plan for {clients} clients")


def fedamp(w: Tree, clients: int, turns: int) -> dict[str, Any]:
    clients = max(clients // 5, 2)
    models, method = w.map(lambda v: torch.rand(clients, *v.shape)), FedAMP()
    weights = lambda: method.weights(models)
    return timed("fedamp", weights, w.nbytes, turns, f"attention of {clients} clients")


def fedpac(w: Tree, clients: int, turns: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    H, v = torch.randn(clients, 100, 512, generator=draw) / 100, torch.rand(clients, generator=draw)
    return timed("fedpac", lambda: FedPAC().weights(H, v), H[0].nbytes, turns, f"weights of {clients} heads, solved")


def fedsimsup(w: Tree, clients: int, turns: int) -> dict[str, Any]:
    server = Server("lazy", FEDERATION, ROUNDS)
    for r in range(ROUNDS):
        server.round(r)
    rows = [server.rows[i] for i in range(0, FEDERATION, FEDERATION // ASKED)][:ASKED]
    method, state = server.method, server.state

    def at_once() -> None:
        for k in range(0, ASKED, 64):
            list(method.downs(state, rows[k : k + 64]))

    sides = {"one by one": lambda: [method.down(state, row) for row in rows], "at once": at_once}
    times = {k: statistics.median(t.cpu) * FEDERATION / ASKED for k, t in measure.alternate(sides, turns).items()}
    with Watched() as watched:
        at_once()
    return {
        "part": "fedsimsup", "seconds": times["at once"], "models": watched.bytes / server.theta.nbytes,
        "said": f"down of {FEDERATION:,} clients after {ROUNDS} rounds; one by one {times['one by one']:.1f} s",
    }  # fmt: skip


PARTS: dict[str, Callable[[Tree, int, int], dict[str, Any]]] = {
    f.__name__: f for f in (average, fedlag, fedaims, fedamp, fedpac, fedsimsup)
}


def main() -> None:
    parser = measure.options(__doc__)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--network", default="resnet18")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    memory.keep()  # as a run does
    w = network(given.network)
    found = [PARTS[part](w, given.clients, given.turns) for part in given.parts]
    rows = [(one["part"], f"{one['seconds']:.2f}", f"{one['models']:.2f}", one["said"]) for one in found]
    measure.report(given, [measure.markdown(["", "seconds", "models of memory", "what"], rows)], found)


if __name__ == "__main__":
    main()
