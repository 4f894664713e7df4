"""`compare`: several methods on the same clients, with the same participants, and one table of how they do."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, isfinite
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from idiolect import __version__, catalogue
from idiolect.data import Split, SplitFile
from idiolect.engine.progress import Report
from idiolect.errors import UsageError
from idiolect.experiment import Run
from idiolect.files import write
from idiolect.method import Method
from idiolect.report import figures, tables
from idiolect.running import HELD_OUT, MOMENTS, SUMMARY, begun, run, withdraw

PLAN = "plan.json"
SAVED = (PLAN, "comparison.csv", "comparison.md", "curves.png", "comparison.json")  # the last one means: finished
Entry = str | Method | tuple[str, Method]
Watch = Callable[[str, int, Report | None], None]  # label, seed, one round's report; None: the run was there already
Plan = dict[tuple[str, int], Run]  # (label, seed) -> its run


@dataclass(frozen=True)
class Found:
    """What one run found: its summary.json, and the rows of its two Parquet files."""

    summary: Mapping[str, Any]
    rounds: Sequence[Mapping[str, Any]]
    clients: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Comparison:
    """How several methods did. `summary` is comparison.json: `methods` holds an entry for each, the best one first;
    `curves` is each method's accuracy over the rounds, for every seed."""

    summary: Mapping[str, Any]
    curves: Mapping[str, figures.Curves]
    path: Path | None = None

    @property
    def methods(self) -> dict[str, Mapping[str, Any]]:
        """The entries by label, the best one first."""
        return {entry["label"]: entry for entry in self.summary["methods"]}

    def __str__(self) -> str:
        return tables.markdown(self.summary)


def compare(
    methods: Sequence[Entry],
    *,
    seeds: Sequence[int] = (0,),
    out: str | Path | None = None,
    watch: Watch | None = None,
    **fields: Any,
) -> Comparison:
    """Run each method with each seed; `fields` are `Run`'s. A method is a name, a value, or (label, value).

    With `out`, every run has its directory there, `<label>/seed-<seed>`, without models. Runs that are finished there
    are taken as they are, those that were cut off go on; anything else that lies there is refused. The table and the
    curves are saved beside them.
    """
    runs = plan(methods, seeds, fields)
    path = Path(out) if out is not None else None
    if path is not None:
        refuse(path, runs)
        path.mkdir(parents=True, exist_ok=True)
        write(path / PLAN, json.dumps(_settings(runs), indent=1) + "\n")
    found: dict[tuple[str, int], Found] = {}
    for (label, seed), experiment in runs.items():
        place = path / label / f"seed-{seed}" if path is not None else None
        found[label, seed] = _found(label, seed, experiment, place, watch)
    curves = {label: {seed: curve(one) for seed, one in of.items()} for label, of in _by_label(found).items()}
    comparison = Comparison(summarise(runs, found), curves, path)
    if path is not None:
        save(path, comparison)
        (path / PLAN).unlink()
    return comparison


def planned(path: Path) -> tuple[list[Entry], dict[str, Any]]:
    """The methods of a comparison that was begun there, and its other settings, as `compare` takes them."""
    if (path / "comparison.json").exists():
        raise UsageError(f"{path} holds a finished comparison; there is nothing to go on with.")
    try:
        settings = json.loads((path / PLAN).read_text())
        tables = {label: tomllib.loads(text) for label, text in settings["runs"].items()}
    except OSError as error:
        raise UsageError(f"Expected a comparison in {path}, found no {PLAN} there: {error.strerror}.") from None
    except (ValueError, KeyError, AttributeError):
        raise UsageError(f"{path / PLAN} is not the plan of a comparison; begin anew in another directory.") from None
    methods: list[Entry] = [(label, Run.from_table(table).method) for label, table in tables.items()]  # type: ignore[misc]
    fields = {k: v for k, v in next(iter(tables.values())).items() if k not in ("method", "seed")}
    return methods, {**fields, "seeds": settings["seeds"]}


def plan(methods: Sequence[Entry], seeds: Sequence[int], fields: Mapping[str, Any]) -> Plan:
    """Every run, valid and able to start, before the first one does."""
    named = _labelled(methods)
    for name, instead in {"method": "methods", "seed": "seeds"}.items():
        if name in fields:
            raise UsageError(f"A comparison has several of its {instead}; give {instead}=[...] instead of {name}=.")
    if isinstance(seeds, int | str) or not seeds or any(seed in seeds[:k] for k, seed in enumerate(seeds)):
        raise UsageError(f"seeds must be a list of different whole numbers, such as [0, 1, 2]; found {seeds!r}.")
    runs: Plan = {}
    for seed in seeds:
        for label, method in named.items():
            experiment = Run.from_table({**fields, "method": method, "seed": seed})
            for (
                _,
                s,
            ), earlier in runs.items():  # data and split files are read once, rows split for each seed
                vars(experiment)["dataset"] = earlier.dataset
                if isinstance(experiment.split, SplitFile):
                    vars(experiment)["_divided"] = earlier._divided
                if s == seed:
                    vars(experiment)["federation"] = earlier.federation
            _ = experiment.federation
            if seed == seeds[0]:
                _ = experiment.context().state  # a network that does not fit, a layer that is not there
            runs[label, seed] = experiment
    return runs


def _labelled(methods: Sequence[Entry]) -> dict[str, Method]:
    if isinstance(methods, str) or not methods:
        raise UsageError(f"Expected a list of methods, such as ['local', 'fedavg']; found {methods!r}.")
    named: dict[str, Method] = {}
    for entry in methods:
        label, method = entry if isinstance(entry, tuple) else ("", entry)
        method = catalogue.build(method) if isinstance(method, str) else method
        if not isinstance(method, Method) or not isinstance(label, str):
            raise UsageError(f"A method is a name, a value such as FedRep(), or (label, method); found {entry!r}.")
        label = label or method.name
        if label in named:
            raise UsageError(f"'{label}' is there twice; leave one out, or label it: ('{label} 2', method).")
        if label.startswith(".") or set(label) & set('/\\:*?"<>|') or label in SAVED:
            raise UsageError(f"A label is the name of a directory; found '{label}'.")
        named[label] = method
    return named


# the directory

_KEPT = "{} holds a finished {}, which is never overwritten; choose another directory."


def refuse(path: Path, runs: Plan) -> None:
    """Nothing is overwritten that is not an unfinished part of this very comparison."""
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; choose a directory.")
    report = path / "comparison.json"
    if report.exists() and json.loads(report.read_text())["settings"] != _settings(runs):
        raise UsageError(_KEPT.format(path, "comparison with other settings"))
    known = {label for label, _ in runs} | set(SAVED) | {f"{name}.part" for name in SAVED}
    others = sorted(p.name for p in path.iterdir() if p.name not in known) if path.exists() else []
    if others:
        raise UsageError(f"{path} holds other things ({', '.join(others[:3])}); choose an empty or new directory.")
    for (label, seed), experiment in runs.items():
        finished(path / label / f"seed-{seed}", experiment)


def finished(place: Path, experiment: Run) -> bool:
    """Whether this very run is finished there; another one that is finished there is refused."""
    if not (place / SUMMARY).exists():
        return False
    if not experiment.made((place / "run.toml").read_text()):
        raise UsageError(_KEPT.format(place, "run with other settings"))
    if json.loads((place / SUMMARY).read_text())["split_hash"] != experiment.federation.split_hash:
        raise UsageError(_KEPT.format(place, "run on other data"))
    return True


def _found(label: str, seed: int, experiment: Run, place: Path | None, watch: Watch | None) -> Found:
    if place is not None and finished(place, experiment):
        if watch is not None:
            watch(label, seed, None)
        import pyarrow.parquet as pq

        rounds, clients = (pq.read_table(place / f"{name}.parquet").to_pylist() for name in ("rounds", "clients"))
        return Found(json.loads((place / SUMMARY).read_text()), rounds, clients)
    resume = place is not None and begun(place)
    if place is not None and not resume:
        withdraw(place)
    told = (lambda report: watch(label, seed, report)) if watch else None
    result = run(experiment, place, told, models=False, resume=resume)
    return Found(result.summary, result.rounds, result.clients)


def save(path: Path, comparison: Comparison) -> None:
    path.mkdir(parents=True, exist_ok=True)
    write(path / "comparison.csv", tables.csv(comparison.summary))
    write(path / "comparison.md", f"{comparison}\n![Accuracy over the rounds](curves.png)\n")
    write(path / "curves.png", figures.png(comparison.summary, comparison.curves))
    write(path / "comparison.json", json.dumps(comparison.summary, indent=1) + "\n")


def _settings(runs: Plan) -> dict[str, Any]:
    """What makes two comparisons the same: the seeds, and each method's run file for the first of them."""
    seeds = list(dict.fromkeys(seed for _, seed in runs))
    return {"seeds": seeds, "runs": {label: r.to_toml() for (label, seed), r in runs.items() if seed == seeds[0]}}


# the numbers

EVALUATION = {
    "trained": "after local training, the round's participants",
    "held_out": "as received, of the clients that never train, where there are any; they are in no other number",
    "plain": "mean over clients",
    "weighted": "over test samples",
    "last": "the last round",
    "best": "the best round on the test rows",
    "last10": "the mean of the last ten evaluations",
    "mean, std": "over seeds; std is the sample standard deviation, null for one seed",
    "std_over_clients": "the sample standard deviation over clients, last round",
    "worst_decile": "the mean over the lowest tenth of the clients, last round",
    "gain_over_local": "the mean over clients of accuracy minus what the same client reaches with Local, last round",
    "worse_than_local": "the share of clients below what they reach with Local, last round; a tie is not below",
    "diverged": "the share of seeds with a loss that is no number in the last round; accuracies mean nothing then",
    "refused": "the share of replies that were not taken in, as they had NaN or inf in them",
    "failed": "the share of replies that never came, as the client failed twice",
    "ranking": "received, plain, last",
}


def summarise(runs: Plan, found: Mapping[tuple[str, int], Found]) -> dict[str, Any]:
    """comparison.json. Methods are ranked by the plain mean over clients of the accuracy received in the last round."""
    first = next(iter(runs.values()))
    alone = next((label for (label, _), r in runs.items() if r.method.name == "local"), None)  # type: ignore[union-attr]
    entries = []
    for label, of in _by_label(found).items():
        measured = [measure(one, found.get((alone, seed)) if alone else None) for seed, one in of.items()]
        entries.append({"label": label, "method": runs[label, next(iter(of))].method.name, **over_seeds(measured)})  # type: ignore[union-attr]
    entries.sort(key=lambda e: -(e["received"]["plain"]["last"]["mean"] or 0.0))
    return {
        "idiolect": __version__,
        "data": first.dataset.name,
        "split": str(first.split) if isinstance(first.split, Split) else first.split.recipe,  # type: ignore[union-attr]
        "split_hash": {str(seed): r.federation.split_hash for (_, seed), r in runs.items()},
        "clients": first.num_clients,
        **({"held_out": first.clients - first.num_clients} if first.num_clients < first.clients else {}),
        "rounds": first.rounds,
        "seeds": list(dict.fromkeys(seed for _, seed in runs)),
        "evaluation": {"received": f"after download, before local training, {first.evaluated_in_words}", **EVALUATION},
        "methods": entries,
        "settings": _settings(runs),
    }


def _by_label(found: Mapping[tuple[str, int], Found]) -> dict[str, dict[int, Found]]:
    grouped: dict[str, dict[int, Found]] = {}
    for (label, seed), one in found.items():
        grouped.setdefault(label, {})[seed] = one
    return grouped


def curve(found: Found) -> dict[int, float]:
    """Round -> plain mean over clients of the accuracy received."""
    return {r["round"]: r["received_plain"] for r in found.rounds if r["received_plain"] is not None}


def measure(found: Found, alone: Found | None) -> dict[str, Any]:
    """One run in numbers. `alone` is Local's run on the same clients, where there is one."""
    s = found.summary
    trained = [r for r in found.rounds if r["participants"]]
    replies = sum(len(r["participants"]) for r in trained)
    return {
        **{moment: s["accuracy"][moment] | _over_clients(found, alone, moment) for moment in MOMENTS},
        **({HELD_OUT: s[HELD_OUT]["accuracy"]} if HELD_OUT in s else {}),
        "bytes_per_participant": {way: s["bytes"][way] / replies if replies else 0.0 for way in ("down", "up")},
        "gradient_passes": s["gradient_passes"],
        **{of: s["replies"][of] / replies if replies else 0.0 for of in ("refused", "failed")},
        "diverged": not isfinite(found.rounds[-1]["received_loss"] or 0.0),
        "seconds": s["seconds"] | {"round": s["seconds"]["train"] / len(trained) if trained else 0.0},
    }


def _over_clients(found: Found, alone: Found | None, moment: str) -> dict[str, float | None]:
    """How the clients differ, and what each of them gains over training alone."""
    own = last(found, moment)
    values = sorted(own.values())
    numbers = {
        "std_over_clients": stdev(values) if len(values) > 1 else None,
        "worst_decile": fmean(values[: ceil(len(values) / 10)]) if values else None,
    }
    if alone is not None:
        gains = [own[i] - accuracy for i, accuracy in last(alone, moment).items() if i in own]
        numbers["gain_over_local"] = fmean(gains) if gains else None
        numbers["worse_than_local"] = fmean(gain < 0 for gain in gains) if gains else None
    return numbers


def last(found: Found, moment: str) -> dict[int, float]:
    """Each client's test accuracy in the last round in which that moment was evaluated."""
    rows = [r for r in found.clients if r["moment"] == moment and r["split"] == "test"]
    final = max((r["round"] for r in rows), default=None)
    return {r["client"]: r["correct"] / r["total"] for r in rows if r["round"] == final}


def over_seeds(values: Sequence[Any]) -> Any:
    """Nested numbers of every seed -> the same nest of mean, sample standard deviation and the values themselves."""
    if isinstance(values[0], Mapping):
        return {name: over_seeds([value[name] for value in values]) for name in values[0]}
    known = [value for value in values if value is not None]
    mean, std = fmean(known) if known else None, stdev(known) if len(known) > 1 else None
    return {"mean": mean, "std": std, "values": list(values)}
