"""A soak: many rounds in which replies are lost and workers are killed. Memory, open files, processes, leftovers.

    python benchmarks/soak.py [--rounds 2000] [--clients 200] [--workers 2] [--kill-every 20] [--json FILE]

FedRep with a small MLP on drawn data, a tenth of all replies lost, a checkpoint every 10 rounds, and a worker killed by
SIGKILL every so many rounds. The first quarter of the rounds is warm-up; what memory does after it is a line fitted to
all rounds that follow. Then a short run of the same is left in three ways: it ends by itself, by Ctrl-C, or its process
is killed by SIGKILL; what it leaves in shared memory, among temporary files and among processes is counted.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import measure
from idiolect import Run
from idiolect.running import run

SHARED = Path("/dev/shm")


def experiment(rounds: int, clients: int, workers: int | None, backend: str = "workers") -> Run:
    return Run(
        method="fedrep", data="synthetic", data_options={"clients": clients}, split="given", clients=clients,
        rounds=rounds, ratio=0.1, drop=0.1, network="mlp", network_options={"hidden": [16]}, evaluate_every=10,
        checkpoint_every=10, backend=backend, workers=workers,
    )  # fmt: skip


# what there is


def children(parent: int) -> list[int]:
    """All processes below this one, zombies among them."""
    below: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (found := _stat(int(entry.name))):
            below.setdefault(found[1], []).append(int(entry.name))
    found, left = [], [parent]
    while left:
        new = below.get(left.pop(), [])
        found += new
        left += new
    return found


def _stat(process: int) -> tuple[str, int] | None:
    """Its state and its parent, if it is there."""
    try:
        state, parent, *_ = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return state, int(parent)


def zombies(processes: list[int]) -> int:
    return sum((_stat(p) or ("", 0))[0] == "Z" for p in processes)


def command_of(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def memory(process: int) -> int:
    """Bytes of it alone, and its part of what it shares (PSS)."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)


def handles(process: int) -> int:
    try:
        return len(os.listdir(f"/proc/{process}/fd"))
    except OSError:
        return 0


@dataclass
class Watched:
    """A row for each round: its number, memory and open files of this process and of all below it, processes."""

    kill_every: int
    rows: list[tuple[int, ...]] = field(default_factory=list)
    killed: int = 0
    draw: random.Random = field(default_factory=lambda: random.Random(0))

    def __call__(self, report: Any) -> None:
        below = children(os.getpid())
        counts = [sum(map(of, below)) for of in (memory, handles)]
        own = memory(os.getpid()), handles(os.getpid())
        self.rows.append((report.round, own[0], counts[0], own[1], counts[1], len(below), zombies(below)))
        if self.kill_every and report.round and report.round % self.kill_every == 0:
            self.kill()

    def kill(self) -> None:
        workers = self.workers()
        if workers:
            os.kill(self.draw.choice(workers), signal.SIGKILL)
            self.killed += 1

    @staticmethod
    def workers() -> list[int]:
        """The forks of the server that starts them, which is below this process."""
        mine = children(os.getpid())
        return [p for p in mine if (found := _stat(p)) and found[1] in mine and found[0] != "Z"]


NAMES = ("memory, this process", "memory, all others", "open files, this process", "open files, all others",
         "processes below", "zombies")  # fmt: skip


def lines(rows: list[tuple[int, ...]]) -> dict[str, dict[str, float]]:
    """Of each column the fitted line after the warm-up: what it is at its ends, and its slope for a thousand rounds."""
    table = np.array(rows, dtype=float)
    table = table[len(table) // 4 :]
    found = {}
    for k, name in enumerate(NAMES, 1):
        slope, start = np.polyfit(table[:, 0], table[:, k], 1)
        ends = [start + slope * table[at, 0] for at in (0, -1)]
        found[name] = {"first": ends[0], "last": ends[1], "per_1000_rounds": slope * 1000, "most": table[:, k].max()}
    return found


# what is left

SCRIPT = """
import sys
sys.path.insert(0, {here!r})
import soak
from idiolect.running import run
if __name__ == "__main__":
    try:
        run(soak.experiment({rounds}, 40, 2), sys.argv[1], lambda report: print(report.round, flush=True))
    except KeyboardInterrupt:
        sys.exit(130)
"""


def left_by(end: Callable[[subprocess.Popen[str]], None], rounds: int) -> dict[str, Any]:
    """What a run that is ended so leaves behind: files in shared memory and among temporary ones, and processes."""
    with tempfile.TemporaryDirectory() as place:
        temporary = Path(place, "tmp")
        temporary.mkdir()
        script = Path(place, "soaked.py")
        script.write_text(SCRIPT.format(here=str(Path(__file__).parent), rounds=rounds))
        before = set(os.listdir(SHARED)) if SHARED.is_dir() else set()
        process = subprocess.Popen(
            [sys.executable, str(script), str(Path(place, "out"))], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, env={**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert process.stdout is not None
        while process.stdout.readline().strip() not in ("3", ""):
            pass
        below = {p: command_of(p) for p in children(process.pid)}
        end(process)
        process.stdout.read()
        code = process.wait()
        for _ in range(100):  # what is below notices by itself
            alive = [p for p, c in below.items() if c and command_of(p) == c and (_stat(p) or ("Z", 0))[0] != "Z"]
            if not alive:
                break
            time.sleep(0.1)
        after = set(os.listdir(SHARED)) if SHARED.is_dir() else set()
        named = {str(p) for p in (process.pid, *below)}  # by whom they are made: others on the machine make some, too
        mine = [name for name in after - before if named & set(re.split(r"\W|_", name))]
        files = sorted(str(p.relative_to(temporary)) for p in temporary.rglob("*") if not p.is_dir() or p.name != "tmp")
        parts = [p.name for p in Path(place, "out").rglob("*.part")]
        return {"exit": code, "processes": len(alive), "shared": mine, "temporary": files, "parts": parts}


ENDS: dict[str, tuple[Callable[[subprocess.Popen[str]], None], int]] = {
    "ends by itself": (lambda process: None, 8),
    "Ctrl-C": (lambda process: process.send_signal(signal.SIGINT), 100_000),
    "SIGKILL": (lambda process: process.kill(), 100_000),
}


def main() -> None:
    parser = measure.options(__doc__)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kill-every", type=int, default=20, help="rounds between two kills of a worker")
    given = parser.parse_args()
    watched = Watched(given.kill_every)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        result = run(experiment(given.rounds, given.clients, given.workers), Path(place, "run"), watched)
    seconds = time.monotonic() - began
    found = lines(watched.rows)
    scale = lambda name: 2**20 if name.startswith("memory") else 1
    rows = [
        (f"{name}{', MB' if scale(name) > 1 else ''}", *(f"{value / scale(name):.2f}" for value in of.values()))
        for name, of in found.items()
    ]
    table = measure.markdown(["after warm-up", "first", "last", "more in 1,000 rounds", "most"], rows)
    left = {name: left_by(*of) for name, of in ENDS.items()}
    after = measure.markdown(
        ["the process", "exit", "processes left", "in shared memory", "temporary files", "unfinished files"],
        [
            (n, r["exit"], r["processes"], *(len(r[of]) for of in ("shared", "temporary", "parts")))
            for n, r in left.items()
        ],
    )
    replies = result.summary["replies"]
    said = (
        f"{given.rounds:,} rounds of {given.clients} clients in {seconds:.0f} s: {replies['participants']:,} took "
        f"part, {replies['dropped']:,} replies lost, {watched.killed} workers killed."
    )
    results = {"seconds": seconds, "replies": replies, "killed": watched.killed, "lines": found, "left": left}
    measure.report(given, [said, table, after], results)


if __name__ == "__main__":
    main()
