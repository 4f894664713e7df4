"""Rounds of 100 clients out of very many, each with a private head, over ten million rows that stay in their file.

    python benchmarks/scale.py [--json FILE] [--rounds 40] [--folder FOLDER] [--epochs 5]

FedPer with an MLP 32-64-10 and 5 local epochs; a client has 10 rows, 8 to train on and 2 to test on, scattered over the
file. The rounds of all numbers of clients are measured in turns; so are evaluations of 1,000 clients. `opened`: seconds
until a first round is over, from the files and a split in memory. `rows read`: samples that one round reads from the
map, counted, and those of them that are not its cohort's; where all samples together are small they are laid out once
instead. `states`: the private states' file, what was declared for it at most, and what lies on the disk. Memory is that
of all processes of all numbers of clients together, each page once (PSS).
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from idiolect import Run
from idiolect.data import Federation, load
from idiolect.data.dataset import Dataset
from idiolect.data.ragged import Ragged
from idiolect.data.stored import Stored
from idiolect.engine.loop import evaluate, one_round
from idiolect.engine.progress import Progress, Report
from idiolect.engine.serial import Serial
from idiolect.engine.work import Fetched
from idiolect.engine.workers import Workers
from idiolect.experiment import cores
from idiolect.method import Rows
from idiolect.running import PAGE
from measure import alternate, options, report

COHORT, FEATURES, CLASSES, TRAINING, TESTING = 100, 32, 10, 8, 2
EACH = TRAINING + TESTING
EVALUATED = 1000


def write_data(folder: Path, rows: int) -> None:
    """Ten classes in Gaussian clouds, some rows at a time."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    centres = draw.normal(size=(CLASSES, FEATURES)).astype(np.float32)
    y = draw.integers(CLASSES, size=rows).astype(np.uint8)
    x = np.lib.format.open_memmap(folder / "x.npy", "w+", np.float32, (rows, FEATURES))
    for start in range(0, rows, 100_000):
        own = y[start : start + 100_000]
        x[start : start + 100_000] = centres[own] + draw.standard_normal((len(own), FEATURES), np.float32)
    x.flush()
    np.save(folder / "y.npy", y)


def divided(data: Dataset, clients: int) -> Federation:
    order = np.random.default_rng(1).permutation(len(data))[: clients * EACH].reshape(clients, EACH)
    train, test = np.sort(order[:, :TRAINING], 1), np.sort(order[:, TRAINING:], 1)
    bounds = np.arange(clients + 1)
    parts = (
        Ragged(np.ascontiguousarray(train).reshape(-1), bounds * TRAINING),
        Ragged(np.empty(0, np.int64), bounds * 0),
        Ragged(np.ascontiguousarray(test).reshape(-1), bounds * TESTING),
    )
    return Federation(data, *parts, f"{clients}", f"{clients} clients")


class Side:
    """One number of clients: its run, its processes, its file of states."""

    def __init__(self, folder: Path, clients: int, epochs: int) -> None:
        started = time.perf_counter()
        data = load(folder / "data")
        read = time.perf_counter() - started
        split = divided(data, clients)
        started = time.perf_counter()
        self.run = Run(
            method="fedper", data=data, split=split, clients=clients, rounds=10**6, ratio=COHORT / clients,
            epochs=epochs, network="mlp", network_options={"hidden": (64,)}, evaluate_every=10**6,
            evaluate_clients=min(EVALUATED, clients),
        )  # fmt: skip
        self.context = self.run.context()
        self.file = folder / f"states-{clients}"
        state = self.context.state
        self.progress = Progress(state.server, Rows(state.rows), self.context.store(clients, self.file))
        self.pool = Workers(self.context, self.progress.store, cores())
        self.round()
        self.opened = read + time.perf_counter() - started

    def round(self) -> None:
        one_round(self.run, self.context, self.pool, self.progress)

    def evaluate(self) -> None:
        evaluate(self.run, self.context, self.pool, self.progress, Report(0))

    def rows(self) -> dict[str, Any]:
        """The rows that one round reads from the map, beside those of its cohort."""
        with counted() as read:
            report = one_round(self.run, self.context, Serial(self.context), self.progress)
        cohort = {int(row) for i in report.participants for row in self.run.federation.train[i]}
        return {
            "read": len(read),
            "of others": len(set(read) - cohort),
            "cohort": len(cohort),
            "laid out at start": not isinstance(self.context.shards.x["train"], Fetched),
        }

    def states(self) -> dict[str, int]:
        touched, record = int((self.progress.store.visits > 0).sum()), self.context.record
        held = self.file.stat()
        declared = min(record * self.run.clients, touched * (record + 2 * PAGE))
        return {"record": record, "clients": touched, "length": held.st_size, "declared": declared,
                "disk": held.st_blocks * 512}  # fmt: skip


@contextmanager
def counted() -> Iterator[list[int]]:
    """The rows that are read from any map, in this process."""
    read: list[int] = []
    original = Stored.__getitem__

    def watched(self: Stored, rows: Any) -> torch.Tensor:
        read.extend(np.arange(len(self))[rows].tolist() if isinstance(rows, slice) else rows.tolist())
        return original(self, rows)

    Stored.__getitem__ = watched  # type: ignore[method-assign]
    try:
        yield read
    finally:
        Stored.__getitem__ = original  # type: ignore[method-assign]


@dataclass
class Memory:
    """Bytes of this process and of those that it started, each page once; and those that are of no file."""

    memory: int
    anonymous: int


def memory(root: int) -> Memory:
    found = Memory(0, 0)
    for number in [root, *children(root)]:
        lines = Path(f"/proc/{number}/smaps_rollup").read_text().splitlines()[1:]
        sizes = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines}
        found.memory += sizes["Pss"]
        found.anonymous += sizes["Pss_Anon"]
    return found


def children(root: int) -> list[int]:
    found = []
    for place in Path(f"/proc/{root}/task").glob("*/children"):
        for number in map(int, place.read_text().split()):
            found += [number, *children(number)]
    return found


def measure(folder: Path, counts: list[int], rounds: int, epochs: int) -> dict[str, Any]:
    sides = {count: Side(folder, count, epochs) for count in counts}
    try:
        training = alternate({str(n): side.round for n, side in sides.items()}, rounds, warm=5)
        scoring = alternate({str(n): side.evaluate for n, side in sides.items()}, max(3, rounds // 4))
        used = memory(os.getpid())
        return {
            "bytes": {"x.npy": (folder / "data" / "x.npy").stat().st_size, **vars(used)},
            "clients": {
                str(n): {
                    "opened": side.opened,
                    "round": float(np.median(training[str(n)].wall)),
                    "round ratio": relative(training[str(n)].wall, training[str(counts[0])].wall),
                    "evaluation": float(np.median(scoring[str(n)].wall)),
                    "evaluation ratio": relative(scoring[str(n)].wall, scoring[str(counts[0])].wall),
                    "rows": side.rows(),
                    "states": side.states(),
                }
                for n, side in sides.items()
            },
        }  # fmt: skip
    finally:
        for side in sides.values():
            side.pool.close()


def relative(one: list[float], other: list[float]) -> float:
    return float(np.median(one) / np.median(other))


def table(found: dict[str, Any]) -> str:
    header = ["clients", "opened, s", "round, ms", "ratio", "evaluation, ms", "ratio", "rows read", "of others",
              "states, MB: length", "declared", "on disk"]  # fmt: skip
    lines = ["| " + " | ".join(header) + " |", "|" + " ---: |" * len(header)]
    for n, of in found["clients"].items():
        rows, states = of["rows"], of["states"]
        read = "none: laid out at start" if rows["laid out at start"] else f"{rows['read']:,}"
        cells = [
            f"{int(n):,}", f"{of['opened']:.1f}", f"{1e3 * of['round']:.0f}", f"{of['round ratio']:.2f}",
            f"{1e3 * of['evaluation']:.0f}", f"{of['evaluation ratio']:.2f}", read, f"{rows['of others']}",
            *(f"{states[k] / 1e6:,.1f}" for k in ("length", "declared", "disk")),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="measured rounds of each number of clients")
    parser.add_argument("--folder", type=Path, help="where the data lie, or are written and left; default: nowhere")
    parser.add_argument("--epochs", type=int, default=5, help="local epochs, of one step each")
    parser.add_argument("--clients", default="1000,100000,1000000", help="numbers of clients")
    given = parser.parse_args()
    counts = [int(text) for text in given.clients.split(",")]
    torch.set_num_threads(1)
    folder = given.folder or Path(tempfile.mkdtemp(prefix="scale-"))
    try:
        if not (folder / "data").exists():
            write_data(folder / "data", max(counts) * EACH)
        found = measure(folder, counts, given.rounds, given.epochs)
    finally:
        for file in folder.glob("states-*"):
            file.unlink()
        if given.folder is None:
            shutil.rmtree(folder)
    sizes = ", ".join(f"{k} {v / 1e9:.2f} GB" for k, v in found["bytes"].items())
    report(given, [table(found), sizes], found)


if __name__ == "__main__":
    main()
