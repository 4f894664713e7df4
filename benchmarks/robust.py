"""What each reduction saves from hostile clients: mean accuracy of the honest ones, method by method, attack by attack.

    python benchmarks/robust.py --kept FILE.jsonl [--methods fedavg,ditto] [--seeds 0,1,2] [--jobs 2] [--json FILE]

scikit-learn's digits over 20 clients, Dirichlet(0.5), all of them every round, 20 rounds, an MLP of 64, batches of 20,
learning rate 0.1, one local epoch. FedAIMS, which supervises a block below the last, has an MLP of 64, 64. A fifth of
the clients attacks, the same four for every method with the same seed. They are not scored: a number is the test
accuracy in % as received after the last round, the plain mean over the honest clients, and over the seeds. `none` is
the reference: nobody attacks, and the same clients are scored.

The attacks: sign, the update turned round and five times as long; scale, ten times as long; random, normal numbers ten
times as long as the update; little, the attackers' mean less as many deviations as hide among the honest; labels,
honest updates of training on wrong labels.

Every finished run is a line of the file `--kept`: what is there is not run again. A method that refuses has a
dash. `ended`: with some seed the numbers grew until the server's were no numbers any more.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

import measure
from idiolect import Run, run
from idiolect.errors import ClientError, UsageError

CLIENTS, SHARE = 20, 0.2
METHODS = ("fedavg", "ditto", "fedrep", "fedaims", "fedavg+fedlag", "fedsimsup", "fedah", "fedpam")
SETTINGS: dict[str, dict[str, Any]] = {
    # what it averages is then Up.mean, and its layers are chosen in a run this short
    "fedavg+fedlag": {"name": "fedavg+fedlag", "fedlag": {"weights": "samples", "warmup": 5, "top_k": 2}}
}
NETWORKS: dict[str, dict[str, Any]] = {"fedaims": {"network_options": {"hidden": [64, 64]}}}
SIZES = {"none": "", "sign": ",5", "scale": ",10", "random": ",10", "little": "", "labels": ""}
BAD = int(CLIENTS * SHARE)
REDUCTIONS = ("mean", "median", f"trimmed:{SHARE}", f"krum:{BAD}", f"multikrum:{BAD}", "clip:0.3", "geometric")
FIELDS: dict[str, Any] = {
    "data": "digits", "split": "dirichlet:0.5", "clients": CLIENTS, "network": "mlp", "batch_size": 20, "lr": 0.1,
    "backend": "serial", "checkpoint_every": 0, "network_options": {"hidden": [64]},
}  # fmt: skip


class Cell(NamedTuple):
    method: str
    attack: str
    reduce: str
    seed: int
    rounds: int


def main() -> None:
    parser = measure.options(__doc__)
    parser.add_argument("--kept", type=Path, required=True, metavar="FILE", help="finished runs, a line each")
    parser.add_argument("--methods", type=_words, default=METHODS)
    parser.add_argument("--attacks", type=_words, default=tuple(SIZES))
    parser.add_argument("--reductions", type=_words, default=REDUCTIONS)
    parser.add_argument("--seeds", type=lambda text: tuple(map(int, text.split(","))), default=(0,))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    given = parser.parse_args()
    cells = [
        Cell(*place, given.rounds) for place in product(given.methods, given.attacks, given.reductions, given.seeds)
    ]
    found = kept(given.kept)
    with given.kept.open("a") as lines:
        for cell, outcome in carried_out([c for c in cells if c not in found], given.jobs):
            found[cell] = outcome
            lines.write(json.dumps({**cell._asdict(), **outcome}) + "\n")
            lines.flush()
            print(f"{cell.method} attack={cell.attack} reduce={cell.reduce}: {outcome}", file=sys.stderr, flush=True)
    header = ["method", "attack", *given.reductions]
    rows = [
        [method, attack, *(_shown([found[Cell(method, attack, r, s, given.rounds)] for s in given.seeds])
        for r in given.reductions)] for method, attack in product(given.methods, given.attacks)
    ]  # fmt: skip
    measure.report(given, [measure.markdown(header, rows)], [{**c._asdict(), **found[c]} for c in cells])


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def kept(path: Path) -> dict[Cell, dict[str, Any]]:
    """The runs that are finished; a line that was cut off is none."""
    found: dict[Cell, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        cell = Cell(*(row.pop(name) for name in Cell._fields))
        found[cell] = row
    return found


def carried_out(cells: list[Cell], jobs: int) -> Iterator[tuple[Cell, dict[str, Any]]]:
    if jobs == 1:
        yield from ((cell, outcome(cell)) for cell in cells)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        under_way = {pool.submit(outcome, cell): cell for cell in cells}
        yield from ((under_way[done], done.result()) for done in as_completed(under_way))


def outcome(cell: Cell) -> dict[str, Any]:
    """A run's accuracy; or why it refuses, or ended before its last round."""
    torch.set_num_threads(1)
    attack = "none" if cell.attack == "none" else f"{cell.attack}:{SHARE}{SIZES[cell.attack]}"
    method = SETTINGS.get(cell.method, {"name": cell.method})
    more = {"seed": cell.seed, "rounds": cell.rounds, "evaluate_every": cell.rounds, "reduce": cell.reduce}
    try:
        made = {**FIELDS, **NETWORKS.get(cell.method, {}), **more, "method": method, "attack": attack}
        found = run(Run.from_table(made))
    except UsageError as refusal:
        return {"refused": str(refusal)}
    except ClientError as end:  # no client's number was odd by itself, but what the server made of them was
        return {"ended": str(end)}
    attackers = Run(method="fedavg", clients=CLIENTS, seed=cell.seed, attack=f"sign:{SHARE}").reception.attackers
    last = [r for r in found.clients if r["round"] == cell.rounds and r["moment"] == "received"]
    tests = [r for r in last if r["split"] == "test" and r["client"] not in attackers]
    return {
        "accuracy": fmean(r["correct"] / r["total"] for r in tests),
        "replies_refused": found.summary["replies"]["refused"],
        "seconds": found.summary["seconds"]["total"],
    }


def _shown(outcomes: Iterable[dict[str, Any]]) -> str:
    outcomes = list(outcomes)
    if any("ended" in o for o in outcomes):
        return "ended"
    values = [o["accuracy"] for o in outcomes if "accuracy" in o]
    return f"{100 * fmean(values):.1f}" if values else "–"


if __name__ == "__main__":
    main()
