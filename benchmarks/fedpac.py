"""FedPAC's server: seconds to find all participants' weights of the heads, by one Gram matrix and by d x d matrices.

    python benchmarks/fedpac.py [--json FILE] [--width 512] [--classes 100] [--clients 20] [--receivers 1]

Both sides are given the same random statistics H (classes x width, float32) of every participant. By d x d matrices, as
in public code: for each receiving client, and each pair of clients, the trace of a sum over the classes of outer
products. It costs the same for every receiving client, and is measured on `--receivers` of them. The Gram form is
measured on all of them. That both give the same numbers is checked. One thread, as in a run; its own time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from idiolect.experiment import cores
from idiolect.methods.fedpac import FedPAC, quadratics

REPEATS = 5  # of the Gram form


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


def timed(fn: Callable[[], Any]) -> tuple[float, Any]:
    started = time.process_time()
    result = fn()
    return time.process_time() - started, result


def measure(clients: int, classes: int, width: int, receivers: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    H = torch.randn(clients, classes, width, generator=draw) / classes
    v = torch.rand(clients, generator=draw)
    forms = [timed(lambda: list(quadratics(H, 0 * v))) for _ in range(REPEATS)]
    whole = [timed(lambda: FedPAC().weights(H, v))[0] for _ in range(REPEATS)]
    traces = [timed(lambda i=i: by_traces(H, i)) for i in range(receivers)]
    apart = max(float((forms[0][1][i] - D).abs().max() / D.abs().max()) for i, (_, D) in enumerate(traces))
    assert apart < 1e-4, f"the two forms differ by {apart}"
    gram, solved = (statistics.median(times) for times in ([s for s, _ in forms], whole))
    matrices = clients * statistics.median(s for s, _ in traces)
    return {
        "clients": clients,
        "classes": classes,
        "width": width,
        "seconds_by_matrices": matrices,
        "receivers_measured": receivers,
        "seconds_by_gram": gram,
        "seconds_by_gram_with_weights": solved,
        "times_cheaper": matrices / gram,
        "times_cheaper_with_weights": matrices / solved,  # their own solver not counted
        "largest_relative_difference": apart,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    parser.add_argument("--width", type=int, default=512, help="d, the dimension of a feature")
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--clients", type=int, default=20, help="participants of the round")
    parser.add_argument("--receivers", type=int, default=1, help="clients for whom the d x d matrices are measured")
    options = parser.parse_args()
    if not 1 <= options.receivers <= options.clients:
        parser.error(f"--receivers must be between 1 and the number of clients, {options.clients}.")
    torch.set_num_threads(1)
    found = measure(options.clients, options.classes, options.width, options.receivers)
    print(
        f"{found['clients']} participants, {found['classes']} classes, d = {found['width']}; torch {torch.__version__}"
    )
    print(f"by d x d matrices: {found['seconds_by_matrices']:9.2f} s a round ({options.receivers} clients measured)")
    for form, name in (("the Gram form", "gram"), ("and the weights", "gram_with_weights")):
        times = found["times_cheaper" + name.removeprefix("gram")]
        print(f"{form:17s}: {found[f'seconds_by_{name}']:9.3f} s a round, {times:,.0f} times cheaper")
    if options.json:
        machine = {"cores": cores(), "machine": platform.machine(), "python": platform.python_version()}
        machine["torch"] = torch.__version__
        options.json.write_text(
            json.dumps({"machine": machine, "load": os.getloadavg(), "results": [found]}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
