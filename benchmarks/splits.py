"""Ten million rows over a million clients: what a split takes of time and memory, and how long its file takes to open.

    python benchmarks/splits.py [--json FILE] [--rows 10000000] [--clients 1000000] [--only iid]

Every split is made in a process of its own, with a quarter of each client's rows kept for the test, and saved; another
process opens the file. Time is that of the call alone, without imports and without making the labels; memory is the
most that the process held in all, labels included. Samples are left out: no split here looks at them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import measure
from idiolect.data import Dataset, SplitFile, federate, save_split

SPLITS = (
    "dirichlet:0.1,minimum=1",
    "dirichlet:0.1,minimum=2",
    "dirichlet:0.1",
    "quantity:0.5,minimum=1",
    "iid",
    "given",
)
CLASSES = 10


def dataset(rows: int, clients: int, grouped: bool) -> Dataset:
    draw = np.random.default_rng(0)
    group = draw.permutation(np.arange(rows) % clients) if grouped else None
    x = torch.zeros(1, 1).expand(rows, 1)
    return Dataset("labels", x, torch.from_numpy(draw.integers(0, CLASSES, rows)), CLASSES, "mlp", group)


def timed(what: str, call: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """Seconds on the clock, and of the processor: they part where the machine has other work."""
    clock, processor = time.perf_counter(), time.process_time()
    found = call()
    return found, {f"{what}_s": time.perf_counter() - clock, f"{what}_cpu_s": time.process_time() - processor}


def make(split: str, path: str, rows: int, clients: int) -> dict[str, Any]:
    data = dataset(rows, clients, split == "given")
    federation, seconds = timed("split", lambda: federate(data, split, clients, seed=0))
    known = {"split": split, "split_hash": federation.split_hash, **seconds, "split_peak_gb": peak_gb()}
    _, saving = timed("save", lambda: save_split(federation, path))
    return {**known, **saving, "file_mb": os.path.getsize(path) / 1e6}


def reopen(split: str, path: str, rows: int, clients: int) -> dict[str, Any]:
    data = dataset(rows, clients, split == "given")
    federation, seconds = timed("open", lambda: SplitFile.named(path).open(data))  # type: ignore[union-attr]
    return {"opened_hash": federation.split_hash, **seconds, "open_peak_gb": peak_gb()}


def peak_gb() -> float:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kilobytes, but bytes on macOS
    return most / (1e9 if sys.platform == "darwin" else 1e6)


def apart(step: str, split: str, path: str, options: argparse.Namespace) -> dict[str, Any]:
    """A step in a process of its own."""
    sizes = ["--rows", str(options.rows), "--clients", str(options.clients)]
    words = [sys.executable, __file__, "--step", step, "--only", split, "--path", path, *sizes]
    found: dict[str, Any] = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    return found


def in_processes(split: str, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "split.parquet"))
        found = apart("make", split, path, options) | apart("reopen", split, path, options)
    if found.pop("opened_hash") != found["split_hash"]:
        raise SystemExit(f"{split}: the file opened with another hash than it was saved with")
    return found


def _shown(f: dict[str, Any]) -> list[str]:
    made, opened = (f"{f[f'{what}_s']:.2f} ({f[f'{what}_cpu_s']:.2f})" for what in ("split", "open"))
    return [made, f"{f['split_peak_gb']:.2f}", f"{f['save_s']:.1f}", f"{f['file_mb']:.0f}", opened]


def main() -> None:
    parser = measure.options(__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--only", help="one split, as '--split' takes it")
    parser.add_argument("--step", choices=("make", "reopen"), help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.step is not None:
        step = make if given.step == "make" else reopen
        print(json.dumps(step(given.only, given.path, given.rows, given.clients)))
        return
    found = [in_processes(split, given) for split in ([given.only] if given.only else SPLITS)]
    rows = [[f["split"], *_shown(f)] for f in found]
    header = ["split", "made, s (of processor)", "most memory, GB", "saved, s", "file, MB", "opened, s (of processor)"]
    table = measure.markdown(header, rows)
    measure.report(given, [f"{given.rows:,} rows over {given.clients:,} clients.", table], found)


if __name__ == "__main__":
    main()
