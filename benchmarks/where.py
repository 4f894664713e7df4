"""Where a client's turn goes: the profile of rounds in one process, without messages.

    python benchmarks/where.py [--only W3] [--steps loop] [--rounds 10] [--json FILE]

The workloads are those of benchmarks/engine.py. A row is a function, with the functions of Python's and PyTorch's own
that it calls; its share is of the time of all rounds, that of others it calls left out. Profiling itself slows Python
down, so that shares of small functions are too large rather than too small.
"""

from __future__ import annotations

import cProfile
import pstats
from pathlib import Path

import torch

import idiolect
import measure
from engine import WORKLOADS, Engine
from idiolect.engine.stepping import here

ROOT = str(Path(idiolect.__file__).parent)
ROWS, DEEP = 14, 40


def main() -> None:
    parser = measure.options(__doc__)
    parser.add_argument("--only", default="W3", help="which workload")
    parser.add_argument("--steps", default="loop")
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args()
    torch.set_num_threads(1)
    engine = Engine(next(w for w in WORKLOADS if w.name == given.only), 1, given.steps)
    engine.pool.close()
    engine.pool = here(engine.context)
    for _ in range(3):
        engine.round([])
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(given.rounds):
        engine.round([])
    profile.disable()
    shares = own(pstats.Stats(profile))
    rows = [[name, f"{100 * share:.1f}"] for name, share in list(shares.items())[:ROWS]]
    measure.report(given, [measure.markdown(["function", "% of the time"], rows)], shares)


def own(stats: pstats.Stats) -> dict[str, float]:
    """The share of each of the package's functions, with what it calls outside of the package, however deep."""
    known = stats.stats  # type: ignore[attr-defined]
    times = {f: entry[2] for f, entry in known.items()}
    for _ in range(DEEP):  # what a foreign function took goes to who called it, by the time it took for each
        for f, entry in known.items():
            callers = {} if f[0].startswith(ROOT) else entry[4]
            whole = sum(c[3] for c in callers.values())
            if whole and times[f]:
                spent, times[f] = times[f], 0.0
                for caller, c in callers.items():
                    times[caller] += spent * c[3] / whole
    total = sum(times.values())
    ours = {f: t / total for f, t in times.items() if f[0].startswith(ROOT)}
    named = {f"`{Path(f[0]).relative_to(ROOT).with_suffix('')}.{f[2]}`": share for f, share in ours.items()}
    return dict(sorted(named.items(), key=lambda kv: -kv[1]))


if __name__ == "__main__":
    main()
