"""bfloat16 autocast: what it saves and what it costs.

    python benchmarks/bf16.py [--data digits] [--network cnn4] [--rounds 30] [--seeds 0 1 2] [--json FILE]

FedAvg and FedRep on the same clients with and without `autocast="bfloat16"`: the mean accuracy over clients as received
in the last round, in %, seed by seed, and the difference. Then the seconds of a FedAvg round of networks on random
images, with it in turns with without it: 2 clients x 100 samples in batches of 10 and of 64, one thread. Seconds are
those that the process itself was computing. A processor without the instructions is refused.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

import measure
from idiolect import Run, run
from idiolect.engine import memory
from methods import Side

AUTOCAST = "bfloat16"
METHODS = ("fedavg", "fedrep")
OTHERS: dict[str, Any] = {"split": str, "batch_size": int, "lr": float, "evaluate_clients": int}


def accuracy(method: str, seed: int, autocast: str | None, fields: dict[str, Any]) -> float:
    """In %."""
    result = run(Run(method=method, seed=seed, autocast=autocast, evaluate_every=fields["rounds"], **fields))
    return 100 * float(result.summary["accuracy"]["received"]["plain"]["last"])


def accuracies(method: str, seeds: list[int], fields: dict[str, Any]) -> dict[str, Any]:
    found = {how or "float32": [accuracy(method, s, how, fields) for s in seeds] for how in (None, AUTOCAST)}
    apart = [b - a for a, b in zip(found["float32"], found[AUTOCAST], strict=True)]
    return {"method": method, **found, "difference": statistics.fmean(apart), "differences": apart}


def speed(network: str, batch: int, turns: int) -> dict[str, Any]:
    fields = {"network": network, "batch_size": batch}
    sides = {str(how): Side("fedavg", 2, 100, autocast=how, **fields) for how in (None, AUTOCAST)}
    times = measure.alternate({name: side.round for name, side in sides.items()}, turns)
    return {**fields, **measure.ratio(times["None"].cpu, times[AUTOCAST].cpu), "seconds": times["None"].cpu}


def main() -> None:
    parser = measure.options(__doc__)
    parser.add_argument("--data", default="digits", help="a data set's name or path")
    parser.add_argument("--network", help="default: the data set's")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--ratio", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=30)
    for name, kind in OTHERS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help="default: the run's")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--turns", type=int, default=7, help="measured rounds of each side")
    parser.add_argument("--networks", nargs="+", default=["lenet5", "cnn4", "convnet4"], help="those that are timed")
    given = parser.parse_args()
    torch.set_num_threads(1)
    memory.keep()  # as a run does
    fields = {name: getattr(given, name) for name in ("data", "network", "clients", "ratio", "rounds")}
    fields |= {name: value for name in OTHERS if (value := getattr(given, name)) is not None}
    found = [accuracies(method, given.seeds, fields) for method in given.methods]
    means = lambda one: [f"{statistics.fmean(one[how]):.2f}" for how in ("float32", AUTOCAST)]
    apart = lambda one: ", ".join(f"{d:+.2f}" for d in one["differences"])
    scores = measure.markdown(
        ["method", "float32", "bfloat16", "difference", "seed by seed"],
        [(one["method"], *means(one), f"{one['difference']:+.2f}", apart(one)) for one in found],
    )
    faster = [speed(network, batch, given.turns) for network in given.networks for batch in (10, 64)]
    speeds = measure.markdown(
        ["network", "batch", "times as fast", "quartiles"],
        [(f["network"], f["batch_size"], f"{f['ratio']:.2f}", f"{f['low']:.2f} to {f['high']:.2f}") for f in faster],
    )
    measure.report(given, [scores, speeds], {"accuracy": found, "speed": faster})


if __name__ == "__main__":
    main()
