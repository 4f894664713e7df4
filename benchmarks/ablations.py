"""Each of the five methods without its parts, as its own paper takes it apart, at a small scale.

    python benchmarks/ablations.py fedlag --data FOLDER [--rounds 100] [--seeds 0 1 2] [--out runs/fedlag-parts]

FOLDER holds Fashion-MNIST in Parquet files, as on the Hub. 100 clients, Dirichlet(0.1), a tenth of them a round, the
4-layer CNN, batches of 20; the learning rate is 0.05, for FedPAM 0.02. Runs that are finished under --out
are kept, so that the same command goes on where it was cut off. What came out is in docs/results/ablations.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from idiolect import compare
from idiolect.catalogue import build
from idiolect.errors import UsageError
from idiolect.method import Method

SETTING = {
    "clients": 100, "ratio": 0.1, "split": "dirichlet:0.1", "network": "cnn4", "batch_size": 20,
    "test_from": "merged", "backend": "serial",
}  # fmt: skip
RATES = {"fedpam": 0.02}  # at 0.05 its loss, of weight 30, diverges
PARTS: dict[str, dict[str, Method]] = {
    "fedaims": {
        "none": build("fedaims", {"supervision": "none", "mu": 0.0}),
        "one": build("fedaims"),
        "all": build("fedaims", {"supervision": "all"}),
    },
    "fedlag": {
        f"k={k} xi={xi}": build("fedlag", {"warmup": 10, "top_k": k, "threshold": xi})
        for k, xi in [(0, -0.1), (1, -0.1), (2, -0.1), (4, -0.1), (2, -0.3), (2, 0.0)]
    },
    "fedsimsup": {
        "similarity, parallel": build("fedsimsup"),
        "plain mean, parallel": build("fedsimsup", {"similarity": False}),
        "similarity, serial": build("fedsimsup", {"structure": "serial"}),
        "plain mean, serial": build("fedsimsup", {"similarity": False, "structure": "serial"}),
    },
    "fedah": {
        "W = 0 (FedRep)": build("fedrep", {"head_epochs": 1}),
        "W = 1": build("fedah", {"weight_lr": 0.0}),
        "W learnt": build("fedah"),
    },
    "fedpam": {
        "PAM and PCL": build("fedpam"),
        "PAM and PCL, cosine": build("fedpam", {"inference": "cosine"}),
        "PAM alone": build("fedpam", {"contrast": False}),
        "PCL alone": build("fedpam", {"pam": False}),
        "neither": build("fedpam", {"pam": False, "contrast": False}),
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=PARTS)
    parser.add_argument("--data", required=True, metavar="FOLDER")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--evaluate-every", type=int, default=5, metavar="ROUNDS")
    parser.add_argument("--out", type=Path, help="default: runs/<method>-parts")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    out = given.out or Path("runs", f"{given.method}-parts")
    show = lambda label, seed, report: print(f"\r{label}, seed {seed}, round {report.round}  ", end="", file=sys.stderr) if report else None  # noqa: E501 # fmt: skip
    try:
        comparison = compare(
            list(PARTS[given.method].items()), seeds=given.seeds, out=out, watch=show, data=given.data,
            rounds=given.rounds,
            evaluate_every=given.evaluate_every, device=given.device, lr=RATES.get(given.method, 0.05), **SETTING,
        )  # fmt: skip
    except UsageError as error:
        sys.exit(str(error))
    print(f"\n{comparison}\n{out / 'comparison.md'}")


if __name__ == "__main__":
    main()
