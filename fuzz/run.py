"""A coverage-guided search for input that ends in anything but a result or a `UsageError`.

    pip install -e '.[dev,fuzz]'
    python fuzz/run.py [--seconds 60] [--only NAME ...] [--folder DIR] [--json FILE]

Each harness runs for so long, one after the other, each in a process of its own, from small valid files that it makes.
What led to new code (`corpus`) and what was found (`findings`) is kept in the folder, and gone on with.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import families
import measure
from fuzzing import ROOT

MEMORY = Path("/dev/shm")  # files are written thousands of times a second


def carried_out(name: str, folder: Path, seconds: int) -> dict[str, Any]:
    """One harness until its time is over: a process that ends before, at a hang or for memory, is a finding."""
    tried, coverage, spent = 0, 0, 0
    while spent < seconds:
        began = time.monotonic()
        said = attempts(name, folder, seconds - spent)
        counted = re.findall(r"^#(\d+)", said, re.MULTILINE)
        if not counted:
            raise SystemExit(f"{name} did not begin:\n{said[-2000:]}")
        tried += int(counted[-1])
        coverage = max([coverage, *map(int, re.findall(r" cov: (\d+) ", said))])
        whole = re.search(r"^Done \d+ runs in (\d+) second", said, re.MULTILINE)
        spent += int(whole[1]) if whole else max(1, int(time.monotonic() - began))
    findings = sorted(p.name for p in (folder / "findings").iterdir() if p.suffix != ".input")
    return {"inputs": tried, "seconds": spent, "coverage": coverage, "findings": findings}


def attempts(name: str, folder: Path, seconds: int) -> str:
    """What one process of a harness says."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, str(ROOT / "fuzz" / "one.py"), name, str(folder), str(seconds)]
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=MEMORY if MEMORY.is_dir() else None) as place:
        quiet = {"TMPDIR": place, "OMP_NUM_THREADS": "1", "IDIOLECT_CACHE": "off"}
        done = subprocess.run(words, env={**os.environ, **quiet}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    (folder / "log.txt").write_bytes(done.stdout)
    return done.stdout.decode(errors="replace")


def main() -> None:
    parser = measure.options(__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="of each harness")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these harnesses alone")
    parser.add_argument("--folder", type=Path, default=Path("runs/fuzz"), help="where corpus and findings are kept")
    given = parser.parse_args()
    names = [name for name in families.found() if not given.only or any(name.startswith(one) for one in given.only)]
    results = {}
    for name in names:
        results[name] = carried_out(name, given.folder / re.sub(r"\W+", "-", name), given.seconds)
        print(f"{name}: {results[name]}", file=sys.stderr, flush=True)
    rows = [
        (name, f"{r['inputs']:,}", f"{r['seconds']:.0f}", f"{r['coverage']:,}", len(r["findings"]))
        for name, r in results.items()
    ]
    every = results.values()
    total = [f"{sum(r[of] for r in every):,.0f}" for of in ("inputs", "seconds")]
    rows.append(("all", *total, "", sum(len(r["findings"]) for r in every)))
    table = measure.markdown(["", "inputs tried", "seconds", "branches seen", "findings"], rows)
    measure.report(given, [table], results)


if __name__ == "__main__":
    main()
