"""FedPAC's server: seconds to find all participants' weights of the heads, by one Gram matrix and by d x d matrices.

    python benchmarks/fedpac.py [--width 512] [--classes 100] [--clients 20] [--receivers 1] [--json FILE]

Both sides are given the same random statistics H (classes x width, float32) of every participant. By d x d matrices, as
in public code: for each receiving client, and each pair of clients, the trace of a sum over the classes of outer
products. It costs the same for every receiving client, and is measured on `--receivers` of them. The Gram form is
measured on all of them. That both give the same numbers is checked. One thread, as in a run; its own time.
"""

from __future__ import annotations

import statistics
from functools import partial
from itertools import combinations_with_replacement
from typing import Any

import torch
from torch import Tensor

import measure
from idiolect.methods.fedpac import FedPAC, quadratics

TURNS = 5  # of the Gram form


def by_traces(H: Tensor, i: int) -> Tensor:
    """[<H_i - H_j, H_i - H_l>], each as the trace of a d x d matrix."""
    clients, classes, width = H.shape
    D = torch.zeros(clients, clients)
    for j, k in combinations_with_replacement(range(clients), 2):
        matrix = torch.zeros(width, width)
        for c in range(classes):
            matrix += torch.mm((H[i, c] - H[j, c])[:, None], (H[i, c] - H[k, c])[None])
        D[j, k] = D[k, j] = matrix.trace()
    return D


def compared(clients: int, classes: int, width: int, receivers: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    H = torch.randn(clients, classes, width, generator=draw) / classes
    v = torch.rand(clients, generator=draw)
    sides = {"gram": lambda: list(quadratics(H, 0 * v)), "weights": lambda: FedPAC().weights(H, v)}
    seconds = {name: statistics.median(t.cpu) for name, t in measure.alternate(sides, TURNS).items()}
    by_matrices, gram = measure.Times(), list(quadratics(H, 0 * v))
    for i in range(receivers):
        D = by_matrices.time(partial(by_traces, H, i))
        torch.testing.assert_close(gram[i].to(D), D, rtol=0, atol=1e-4 * float(D.abs().max()))
    seconds["matrices"] = clients * statistics.median(by_matrices.cpu)
    return {"clients": clients, "classes": classes, "width": width, "receivers_measured": receivers, "seconds": seconds}


def main() -> None:
    parser = measure.options(__doc__)
    parser.add_argument("--width", type=int, default=512, help="d, the dimension of a feature")
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--clients", type=int, default=20, help="participants of the round")
    parser.add_argument("--receivers", type=int, default=1, help="clients for whom the d x d matrices are measured")
    given = parser.parse_args()
    if not 1 <= given.receivers <= given.clients:
        parser.error(f"--receivers must be between 1 and the number of clients, {given.clients}.")
    torch.set_num_threads(1)
    found = compared(given.clients, given.classes, given.width, given.receivers)
    seconds = found["seconds"]
    named = {"by d x d matrices": "matrices", "by one Gram matrix": "gram", "the same, with the weights": "weights"}
    times = {side: seconds["matrices"] / seconds[key] for side, key in named.items()}
    rows = [(side, f"{seconds[key]:.3f}", f"{times[side]:,.0f}") for side, key in named.items()]
    measure.report(given, [measure.markdown(["", "seconds a round", "times as fast"], rows)], found)


if __name__ == "__main__":
    main()
