"""Start-up: seconds from a command to what it shows, and to the end of the first round of `idiolect compare`.

    python benchmarks/startup.py [--turns 5] [--json FILE]

Every turn starts each command anew in a process of its own, in turns with `python -c "import torch"`, below which
nothing that trains can come. `first round` is the demo's: all that comes before it, the first method's evaluation
before training and its first round of 20 clients in worker processes, until `idiolect compare` has been told of it.
The first start after the files were last touched is not measured: they come from the disk cache.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import measure

COMMANDS = {
    "`idiolect --help`": ["--help"],
    "`idiolect compare --help`": ["compare", "--help"],
    "`idiolect methods`": ["methods"],
    "`idiolect show fedrep`": ["show", "fedrep"],
}
# the command as it is, ended where its progress hears of the first round
FIRST = """
import os, sys
from idiolect import cli
def progress(experiment, runs):
    def advance(name, report):
        if report is not None and report.round == 1:
            for child in __import__("multiprocessing").active_children():
                child.kill()
            os._exit(0)
    yield advance
cli.progress = cli.contextmanager(progress)
if __name__ == "__main__":
    cli.main(["compare", "--out", sys.argv[1]])
"""


def started(words: list[str]) -> None:
    subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, check=True)


def first_round(place: Path) -> None:
    """In a directory that is not there yet."""
    script = place / "first.py"
    script.write_text(FIRST)
    started([str(script), str(place / f"run-{time.monotonic_ns()}")])


def main() -> None:
    parser = measure.options(__doc__)
    parser.add_argument("--turns", type=int, default=5, help="measured starts of each command")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as place:
        sides = {'`python -c "import torch"`': partial(started, ["-c", "import torch"])}
        sides |= {name: partial(started, ["-m", "idiolect", *words]) for name, words in COMMANDS.items()}
        sides["`idiolect compare`, first round"] = partial(first_round, Path(place))
        times = {name: found.wall for name, found in measure.alternate(sides, given.turns).items()}
    torch = next(iter(times.values()))
    rows = [
        (
            name,
            f"{statistics.median(t):.2f}",
            f"{min(t):.2f} to {max(t):.2f}",
            f"{measure.ratio(t, torch)['ratio']:.2f}",
        )
        for name, t in times.items()
    ]
    table = measure.markdown(["", "seconds", "least and most", "times `import torch`"], rows)
    measure.report(given, [table], times)


if __name__ == "__main__":
    main()
