"""What a checkpoint costs: seconds and bytes, and the share of the rounds between two.

    python benchmarks/checkpoint.py [--turns 5] [--json FILE]

20 clients with CNN4 and private heads (FedRep), and 100 clients that each keep a whole MLP of their own (Ditto).
Data are drawn: 100 images of 28 x 28 a client, 60 vectors. All take part in every round, so that each checkpoint
writes every private state; with fewer participants only theirs are written.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import measure
from idiolect import Run
from idiolect.data import from_arrays
from idiolect.engine.checkpoint import Checkpoints
from idiolect.running import run

DRAW = np.random.default_rng(0)
IMAGES = from_arrays(DRAW.normal(size=(2000, 1, 28, 28)).astype("f4"), np.arange(2000) % 10, name="drawn images")
CASES: dict[str, dict[str, Any]] = {
    "20 clients, cnn4, private heads (fedrep)": {"method": "fedrep", "clients": 20, "network": "cnn4", "data": IMAGES},
    "100 clients, whole private models (ditto)": {
        "method": "ditto", "clients": 100, "network": "mlp", "network_options": {"hidden": [200]}, "data": "synthetic",
        "data_options": {"clients": 100}, "split": "given",
    },
}  # fmt: skip


def measured(fields: dict[str, Any], turns: int) -> dict[str, float]:
    seconds, sizes = [], []
    save = Checkpoints.save

    def watched(checkpoints: Checkpoints, progress: Any, record: Any) -> None:
        began, before = time.perf_counter(), set(checkpoints.folder.glob("*"))
        save(checkpoints, progress, record)
        seconds.append(time.perf_counter() - began)
        sizes.append(sum(f.stat().st_size for f in set(checkpoints.folder.glob("*")) - before))

    Checkpoints.save = watched  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as place:
            result = run(Run(**fields, rounds=turns, checkpoint_every=1, evaluate_every=turns), Path(place, "run"))
    finally:
        Checkpoints.save = save  # type: ignore[method-assign]
    rounds = [row["seconds_train"] for row in result.rounds[1:]]
    one = statistics.median(seconds)
    return {"seconds": one, "bytes": statistics.median(sizes), "round": statistics.median(rounds)}


def main() -> None:
    parser = measure.options(__doc__)
    parser.add_argument("--turns", type=int, default=5, help="rounds, each with a checkpoint")
    given = parser.parse_args()
    results = {name: measured(fields, given.turns) for name, fields in CASES.items()}
    rows = [
        (
            name,
            f"{1000 * r['seconds']:.0f}",
            f"{r['bytes'] / 1e6:.1f}",
            f"{1000 * r['round']:.0f}",
            f"{100 * r['seconds'] / (10 * r['round'] + r['seconds']):.1f}",
        )
        for name, r in results.items()
    ]
    header = ["", "ms", "MB", "a round, ms", "% of the time, every 10 rounds"]
    measure.report(given, [measure.markdown(header, rows)], results)


if __name__ == "__main__":
    main()
