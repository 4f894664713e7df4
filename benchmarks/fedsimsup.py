"""FedSimSup's server: seconds of a round as the federation grows, lazy and eager mixing, without the clients' training.

    python benchmarks/fedsimsup.py [--clients 100 1000 10000] [--rounds 1000] [--measured 100] [--json FILE]

LeNet-5 for 32 x 32 x 3 images as theta (52,202 weights, float32), 10 participants drawn anew each round, 50 to 500
samples and Dirichlet(0.1) label proportions per client. A reply is a random theta. Measured are the last rounds of
`--rounds`, when a client's last visit lies N/K rounds back on average. A round, as the engine runs it on the server's
side, is

    plan for the participants, down for each of them (twice: once to send it, once to count its bytes), server.

Beside it: `down` for clients who do not take part, which is what an evaluation of everybody asks N times. One thread,
as in a run; its own time, so that what else the machine does hardly counts.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch

import measure
from idiolect.engine.wire import tensors
from idiolect.method import Facts, Rows, Up, stack
from idiolect.methods.fedsimsup import FedSimSup
from idiolect.nets import build
from idiolect.task import Net

PARTICIPANTS, CLASSES, SHAPE = 10, 10, (3, 32, 32)
LIMIT = 4 * 2**30  # bytes of thetas beyond which eager mixing is not run
EAGER_ROUNDS = 12  # every round of eager mixing costs the same
ASKED = 20  # clients away that are asked for their theta after a measured round


class Server:
    """The server's side of a run, with random replies."""

    def __init__(self, mixing: str, clients: int, rounds: int) -> None:
        self.method, self.clients, self.rounds = FedSimSup(mixing=mixing), clients, rounds
        torch.manual_seed(0)
        net = Net(build("lenet5", SHAPE, CLASSES), SHAPE, CLASSES, 0, torch.float32, "lenet5")
        state = self.method.init(net)
        self.state, self.theta = state.server, net.weights
        draw = np.random.default_rng(0)
        sizes, labels = draw.integers(50, 501, clients), draw.dirichlet([0.1] * CLASSES, clients)
        said = [_hello(n, p) for n, p in zip(sizes, labels, strict=True)]
        columns = {k: [one[k] for one in said] for k in said[0]}
        self.rows = Rows(state.rows).with_(range(clients), **columns)
        self.sizes = sizes

    def round(self, r: int) -> float:
        """Seconds of one round of the server."""
        draw = np.random.default_rng((1, r))
        ids = tuple(sorted(draw.choice(self.clients, PARTICIPANTS, replace=False).tolist()))
        known = Facts(r, self.clients, ids, tuple(float(self.sizes[i]) for i in ids), 0.01, self.rounds, 0)
        started = time.process_time()
        self.state, self.rows = self.method.plan(self.state, self.rows, known)
        for _ in range(2):
            for i in ids:
                self.method.down(self.state, self.rows[i])
        seconds = time.process_time() - started
        up = Up(rows={"model": stack([self.theta.map(torch.randn_like) for _ in ids])})
        started = time.process_time()
        self.state, self.rows = self.method.server(self.state, self.rows, up, known)
        return seconds + time.process_time() - started

    def away(self, r: int) -> float:
        """Seconds of `down` for one client who is asked without taking part."""
        ids = np.random.default_rng((2, r)).choice(self.clients, ASKED, replace=False).tolist()
        started = time.process_time()
        for i in ids:
            self.method.down(self.state, self.rows[i])
        return (time.process_time() - started) / ASKED

    def memory(self) -> int:
        """Bytes that the server's tensors hold, each storage once."""
        held = tensors([dict(self.state), dict(self.rows.written)])
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())


def _hello(size: int, labels: np.ndarray) -> dict[str, torch.Tensor]:
    counts = np.round(labels * size)
    return {"size": torch.tensor([float(size)]), "labels": torch.tensor(counts / counts.sum(), dtype=torch.float32)}


def measured(mixing: str, clients: int, rounds: int, last: int) -> dict[str, Any]:
    server = Server(mixing, clients, rounds)
    if mixing == "eager":
        rounds, last = EAGER_ROUNDS, EAGER_ROUNDS - 2
    times, away = [], []
    for r in range(rounds):
        seconds = server.round(r)
        if r >= rounds - last:
            times.append(seconds)
            away.append(server.away(r))
    log = server.state["log"]
    return {
        "mixing": mixing,
        "clients": clients,
        "milliseconds_per_round": 1e3 * statistics.median(times),
        "quartiles": [1e3 * q for q in statistics.quantiles(times, n=4)],
        "milliseconds_down_away": 1e3 * statistics.median(away),
        "rounds_in_log": sum(k.endswith(".beta") for k in log),
        "mebibytes": server.memory() / 2**20,
        "rounds_run": rounds,
        "rounds_measured": len(times),
    }


def row(found: dict[str, Any]) -> list[str]:
    low, _, high = found["quartiles"]
    return [
        f"{found['mixing']}, {found['clients']:,} clients", f"{found['milliseconds_per_round']:.1f}",
        f"{low:.1f} to {high:.1f}", f"{found['milliseconds_down_away']:.2f}", str(found["rounds_in_log"]),
        f"{found['mebibytes']:.0f}",
    ]  # fmt: skip


def main() -> None:
    parser = measure.options(__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 1000, 10_000], help="sizes of the federation")
    parser.add_argument("--rounds", type=int, default=1000, help="rounds of lazy mixing, the measured ones included")
    parser.add_argument("--measured", type=int, default=100, help="measured rounds, the last ones")
    parser.add_argument("--mixing", choices=["lazy", "eager"], help="one of the two")
    given = parser.parse_args()
    torch.set_num_threads(1)
    weights = sum(p.numel() for p in build("lenet5", SHAPE, CLASSES).parameters())
    sides = [(mixing, n) for n in given.clients for mixing in ("lazy", "eager") if given.mixing in (None, mixing)]
    fits = [(mixing, n) for mixing, n in sides if mixing == "lazy" or 4 * weights * n <= LIMIT]
    found = [measured(mixing, n, given.rounds, given.measured) for mixing, n in fits]
    left_out = [f"{mixing}, {n:,} clients: {4 * weights * n / 2**30:.1f} GiB of thetas, left out" for mixing, n in sides
                if (mixing, n) not in fits]  # fmt: skip
    columns = ["", "ms a round", "quartiles", "ms for one client away", "rounds in the log", "MiB"]
    measure.report(given, [measure.markdown(columns, map(row, found)), *left_out], found)


if __name__ == "__main__":
    main()
