"""What every benchmark here does alike: sides that take turns, medians, what the machine is, a table, a JSON file.

Sides are measured in turns in the same minutes, so that what else the machine does falls on all of them; a ratio is of
their medians, and its quartiles are those of the single turns. Beside seconds on the clock stand those that this
process itself was computing (`cpu`), which others on the machine disturb far less.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from idiolect import __version__
from idiolect.experiment import cores

PACKAGES = ("torch", "numpy")


@dataclass
class Times:
    """Seconds of every turn of a side: on the clock, and of this process alone."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def time(self, turn: Callable[[], Any]) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        done = turn()
        self.cpu.append(time.process_time() - cpu)
        self.wall.append(time.perf_counter() - wall)
        return done


def alternate(sides: Mapping[str, Callable[[], Any]], turns: int, warm: int = 1) -> dict[str, Times]:
    """Each side so many times, in turns: forwards, then backwards. The first `warm` turns do not count."""
    times = {name: Times() for name in sides}
    for turn in range(-warm, turns):
        for name in list(sides)[:: -1 if turn % 2 else 1]:
            (times[name] if turn >= 0 else Times()).time(sides[name])
    return times


def ratio(one: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """How many times what the other is: of medians, and the quartiles over the turns."""
    turns = [a / b for a, b in zip(one, other, strict=True)]
    low, _, high = statistics.quantiles(turns, n=4) if len(turns) > 1 else turns * 3
    return {"ratio": statistics.median(one) / statistics.median(other), "low": low, "high": high}


def machine() -> dict[str, Any]:
    """What the figures were measured on and with."""
    known = {"idiolect": __version__} | {name: version(name) for name in PACKAGES}
    return {"cpu": cpu(), "cores": cores(), "python": platform.python_version(), **known, "load": os.getloadavg()[0]}


def cpu() -> str:
    """The processor's name for itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def command() -> str:
    """The command line by which this was asked for, as one can type it."""
    return shlex.join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]])


def options(description: str | None) -> argparse.ArgumentParser:
    """A parser with what all benchmarks take."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file as well")
    return parser


def markdown(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table; numbers to the right."""
    rows = [[str(cell) for cell in row] for row in rows]
    marks = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [list(header), marks, *rows])


def report(given: argparse.Namespace, tables: Sequence[str], results: Any) -> None:
    """Print the tables below the command and the machine; write everything down where that was asked for."""
    known = machine()
    print(f"`{command()}`: " + ", ".join(f"{k} {v}" for k, v in known.items() if k != "load"))
    print(f"(load {known['load']:.1f} in the minute before the end)", *tables, sep="\n\n")
    if given.json:
        said = {"command": command(), "machine": known, "results": results}
        given.json.write_text(json.dumps(said, indent=2) + "\n")
