"""`run`: carry out one experiment, and keep what it found: metrics, models and the run itself, in common formats."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import sys
import tempfile
import threading
import time
import tomllib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from math import isfinite, nan
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import save_file

from idiolect.engine import memory, work
from idiolect.engine.checkpoint import TABLES, Checkpoints, environment
from idiolect.engine.failing import Enduring
from idiolect.engine.loop import loop
from idiolect.engine.progress import Progress, Report
from idiolect.engine.stacked import Stacked
from idiolect.engine.stepping import fastest, here, take
from idiolect.engine.store import Store
from idiolect.engine.turns import Backend, turns
from idiolect.engine.work import Context, Score
from idiolect.errors import UsageError
from idiolect.experiment import Run, cores, read
from idiolect.files import write
from idiolect.method import Rows
from idiolect.tree import Tree, entries

SUMMARY = "summary.json"
CHECKPOINT = "checkpoint"
STATES = "states.part"
# and SUMMARY, the last
FILES = ("run.toml", "rounds.parquet", "clients.parquet", "notes.safetensors", "models", CHECKPOINT, STATES)
IN_MEMORY = 1 << 30  # bytes of all clients' private states that are kept in memory; more are kept in a file
PAGE = 4096
Watch = Callable[[Report], None]
MOMENTS = ("received", "trained")
HELD_OUT = "held_out"


@dataclass
class Result:
    """What a run found. `rounds` and `clients` are the rows of rounds.parquet and clients.parquet."""

    run: Run
    summary: dict[str, Any]
    rounds: list[dict[str, Any]]
    clients: list[dict[str, Any]]
    notes: list[dict[str, Any]]
    context: Context
    progress: Progress
    path: Path | None = None

    @property
    def server(self) -> Any:
        """The server's slots after the last round."""
        return self.progress.server

    def personal(self, client: int) -> Tree:
        """The weights with which a client predicts after the last round."""
        job = next(turns(self.context, self.progress, "personal", [client]))
        return self.context.personal(job).clone()

    def private(self, client: int) -> Any:
        """A client's private slots."""
        return self.progress.store.read(client)


@dataclass
class Record:
    """Everything measured so far, as rows."""

    rounds: list[dict[str, Any]] = field(default_factory=list)
    clients: list[dict[str, Any]] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    moments: tuple[str, ...] = MOMENTS

    def add(self, report: Report) -> None:
        row: dict[str, Any] = {
            "round": report.round,
            "participants": list(report.participants),
            "dropped": list(report.dropped),
            "absent": list(report.absent),
            **{of: _named_reasons(getattr(report, of)) for of in ("refused", "failed", "unscored")},
            "bytes_down": report.bytes_down,
            "bytes_up": report.bytes_up,
            "gradient_passes": report.passes,
            "seconds_train": report.seconds_train,
            "seconds_evaluate": report.seconds_evaluate,
        }
        for moment in self.moments:
            scores = getattr(report, moment)
            row |= {f"{moment}_{k}": v for k, v in _means([s for all_ in scores.values() for s in all_]).items()}
            self.clients += [
                {"round": report.round, "client": i, "moment": moment, **vars(s)}
                for i, all_ in sorted(scores.items())
                for s in all_
            ]
        self.rounds.append(row)
        if report.notes:
            self.notes.append({k: v.detach().clone() for k, v in report.notes.items()})


def _named_reasons(reasons: Mapping[int, str]) -> list[str]:
    return [f"{client}: {why}" for client, why in sorted(reasons.items())]


def _means(scores: list[Score]) -> dict[str, float | None]:
    """Test accuracy and loss: the mean over clients, and over samples."""
    tests = [s for s in scores if s.split == "test"]
    total = sum(s.total for s in tests)
    return {
        "plain": fmean(s.correct / s.total for s in tests) if tests else None,
        "weighted": sum(s.correct for s in tests) / total if tests else None,
        "loss": sum(s.loss for s in tests) / total if tests else None,
    }


def run(
    experiment: Run,
    out: str | Path | None = None,
    watch: Watch | None = None,
    models: bool = True,
    resume: bool = False,
) -> Result:
    """Carry out an experiment. With `out`, its directory: run.toml, rounds.parquet, clients.parquet, models/ (unless
    `models` is off), and summary.json, which is written last: its presence means that the run is finished.

    Until then `checkpoint/` holds all that is needed to go on: with `resume` a run that was cut off goes on from its
    last whole checkpoint and ends with the same bits. Ctrl-C and SIGTERM take effect after the round under way, with a
    checkpoint; the second time at once."""
    path = Path(out) if out is not None else None
    if path is not None:
        experiment = settled(experiment, path)
        ready_to_go_on(path, experiment) if resume else refuse(path)
    started = time.perf_counter()
    context = experiment.context()
    state = context.state
    record = Record(moments=(*MOMENTS, HELD_OUT) if experiment.num_clients < experiment.clients else MOMENTS)
    checkpoints = _checkpoints(experiment, path) if path is not None and experiment.checkpoint_every else None

    def report(report: Report) -> None:
        record.add(report)
        if watch is not None:
            watch(report)
        if checkpoints is not None and report.round:
            asked = stop.asked and report.round < experiment.rounds
            if asked or report.round % experiment.checkpoint_every == 0:
                checkpoints.seconds = earlier + time.perf_counter() - started
                checkpoint(checkpoints, progress, record)
            if asked:
                raise KeyboardInterrupt

    with one_thread(), withdrawn(path), Stop(checkpoints is not None) as stop, ExitStack() as until_done:
        steps, measured = fastest(context) if experiment.steps == "auto" else (experiment.steps, {})
        take(context, steps)
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
            write(path / "run.toml", experiment.to_toml(steps=steps))
        store = until_done.enter_context(states(experiment, context, path))
        progress = Progress(state.server, Rows(state.rows), store)
        if checkpoints is not None and resume:
            restored, broken = checkpoints.load(progress)
            for sentence in broken:
                warnings.warn(sentence, stacklevel=2)
            record = Record(**restored, moments=record.moments)
            if watch is not None:
                for row in record.rounds:
                    watch(Report(row["round"]))  # that it was carried out, without its scores
        earlier = checkpoints.seconds if checkpoints is not None else 0.0
        history = _history(checkpoints, progress.round)
        pool = backend(experiment, context, store)
        unsaved: dict[int, str] = {}
        try:
            loop(experiment, context, pool, progress, report)
            if path is not None and models:
                unsaved = save_models(path / "models", context, progress, pool, experiment.clients)
        finally:
            pool.close()
        summary = summarise(experiment, context, record, earlier + time.perf_counter() - started)
        if unsaved:
            summary["without_model"] = {str(client): why for client, why in sorted(unsaved.items())}
        summary["made_with"] = history
        if measured:
            summary["steps_measured"] = measured
        if path is not None:
            write_record(path, record)
            write(path / SUMMARY, json.dumps(summary, indent=2) + "\n")
            shutil.rmtree(path / CHECKPOINT, ignore_errors=True)
    if stop.asked:  # in its last round
        raise KeyboardInterrupt
    return Result(experiment, summary, record.rounds, record.clients, record.notes, context, progress, path)


def begun(path: Path) -> bool:
    """Whether a run was cut off here that can go on."""
    return not (path / SUMMARY).exists() and any((path / CHECKPOINT).glob("*.json"))


@contextmanager
def states(experiment: Run, context: Context, path: Path | None) -> Iterator[Store]:
    """The store of private states. Where all together are large it is a file, which holds what was written and nothing
    of the other clients; it has no name any more when the run is over, and is gone with the last who reads it."""
    size = context.record * experiment.clients
    if size <= IN_MEMORY:
        yield context.store(experiment.clients)
        return
    folder = path or Path(tempfile.mkdtemp(prefix="idiolect-"))
    file = folder / STATES
    file.unlink(missing_ok=True)  # of a run that was killed
    try:
        room_for_states(experiment, context, folder)
        yield context.store(experiment.clients, file)
    finally:
        file.unlink(missing_ok=True)
        if path is None:
            folder.rmdir()


def room_for_states(experiment: Run, context: Context, folder: Path) -> None:
    """Refuse a run whose private states would fill the disk, before it begins."""
    touched = experiment.sampler.most(experiment.num_clients, experiment.rounds)
    needed = min(context.record * experiment.clients, touched * (context.record + 2 * PAGE))
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UsageError(
            f"The private states of {touched:,} clients take up to {needed / 1e9:.1f} GB in '{folder}', which has "
            f"{free / 1e9:.1f} GB free; choose another place (out, or the variable TMPDIR), or fewer rounds or clients."
        )


def refuse(path: Path) -> None:
    """Nothing is overwritten: a finished run stays, and so does anything else that lies there."""
    if (path / SUMMARY).exists():
        raise UsageError(f"{path} holds a finished run, which is never overwritten; choose another directory.")
    if begun(path):
        raise UsageError(
            f"{path} holds a run that was cut off: 'idiolect run --resume {path}' goes on with it. Otherwise choose "
            "another directory, or remove it."
        )
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UsageError(f"{path} exists and is not an empty directory; choose another, or remove it.")


def settled(experiment: Run, path: Path) -> Run:
    """The experiment with the way of taking steps that was chosen when it was begun there."""
    if experiment.steps != "auto" or not (path / "run.toml").exists():
        return experiment
    chosen = replace(experiment, steps=read(path / "run.toml").get("steps", "loop"))
    kept = ("dataset", "federation")  # which were read and split already
    vars(chosen).update({name: vars(experiment)[name] for name in kept if name in vars(experiment)})
    return chosen


def ready_to_go_on(path: Path, experiment: Run) -> None:
    """Only this very run goes on, and only where it was cut off."""
    if (path / SUMMARY).exists():
        raise UsageError(f"{path} holds a finished run; there is nothing to go on with.")
    if not (path / "run.toml").exists():
        raise UsageError(f"Expected a run that was cut off in {path}, found no run.toml there; check the path.")
    if Run.from_table(_filled(read(path / "run.toml"), experiment)).identity != experiment.identity:
        raise UsageError(f"{path} holds another run than the one to go on with; its run.toml says which.")


def _filled(table: dict[str, Any], experiment: Run) -> dict[str, Any]:
    """The file's fields; what it can only name is the experiment's, if that has the same name for it."""
    own = tomllib.loads(experiment.to_toml())
    return {
        k: getattr(experiment, k) if str(v).startswith("<given: ") and own.get(k) == v else v for k, v in table.items()
    }


def _checkpoints(experiment: Run, path: Path) -> Checkpoints:
    about = {
        "settings": hashlib.sha256(experiment.identity.encode()).hexdigest(),
        "split": experiment.federation.split_hash,
        "data": experiment.dataset.digest,
    }
    return Checkpoints(path / CHECKPOINT, about)


def _history(checkpoints: Checkpoints | None, round: int) -> list[dict[str, Any]]:
    """What the run is carried out with: an entry more where that is not what it began with."""
    here = environment(round)
    history = checkpoints.history if checkpoints is not None else []
    if not history or {**history[-1], "from_round": round} != here:
        history.append(here)
    return history


def checkpoint(checkpoints: Checkpoints, progress: Progress, record: Record) -> None:
    try:
        checkpoints.save(progress, {name: getattr(record, name) for name in TABLES})
    except OSError as error:
        there = [file.stem for file in checkpoints.listed()]
        kept = f"the checkpoint after round {there[0]} is whole" if there else "there is none before it"
        raise UsageError(
            f"The checkpoint after round {progress.round} could not be written to {checkpoints.folder}: "
            f"{error.strerror or error}; {kept}. Mend that, and go on with --resume {checkpoints.folder.parent}."
        ) from error


class Stop:
    """SIGINT and SIGTERM ask for a stop after the round under way; the second one is not asked but obeyed."""

    def __init__(self, wanted: bool) -> None:
        self.asked = False
        self.wanted = wanted and threading.current_thread() is threading.main_thread()  # signals are its own
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if self.wanted:
            self.before = {s: signal.signal(s, self.hear) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def hear(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        print("Stopping after this round, with a checkpoint; once more to stop at once.", file=sys.stderr, flush=True)

    def __exit__(self, *_: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


@contextmanager
def withdrawn(path: Path | None) -> Iterator[None]:
    """A run that fails before its first checkpoint leaves nothing behind; one that is killed leaves files without a
    summary."""
    made = [p for p in (path, *path.parents) if not p.exists()] if path is not None else []
    try:
        yield
    except BaseException:
        if path is not None and not begun(path):
            withdraw(path)
            for directory in made:
                with suppress(OSError):  # something else has come to lie there
                    directory.rmdir()
        raise


def withdraw(path: Path) -> None:
    """Remove the files of a run that did not finish; whatever else lies there stays."""
    if (path / SUMMARY).exists() or not (path / "run.toml").exists():
        return
    for name in (*FILES, *(f"{file}.part" for file in (*FILES, SUMMARY))):
        shutil.rmtree(path / name) if (path / name).is_dir() else (path / name).unlink(missing_ok=True)


def backend(experiment: Run, context: Context, store: Store) -> Backend:
    if experiment.backend == "serial":
        return Enduring(context, here(context))
    if experiment.backend == "stacked":
        return Enduring(context, Stacked(context))
    from idiolect.engine.workers import Workers

    parcel = work.STACK if context.steps == "stacked" else None
    return Workers(context, store, experiment.workers or cores(), parcel, experiment.time_limit)


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread, and the caller's random state as it was: the numbers depend on neither."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    memory.keep()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(threads)
        memory.release()


def summarise(experiment: Run, context: Context, record: Record, total: float) -> dict[str, Any]:
    """The run in one object. Accuracies are fractions, on each client's own test rows."""
    rounds = record.rounds
    trained = [r for r in rounds if r["participants"]]
    return {
        "method": context.method.name,
        "data": experiment.dataset.name,
        "split": experiment.federation.recipe,
        "split_hash": experiment.federation.split_hash,
        "network_parameters": context.net.trainable.size,
        "rounds": experiment.rounds,
        "clients": experiment.num_clients,
        "seed": experiment.seed,
        "steps": context.steps,
        "accuracy": {
            moment: {
                average: _over_rounds([r[f"{moment}_{average}"] for r in rounds], max)
                for average in ("plain", "weighted")
            }
            for moment in MOMENTS
        },
        "loss": {moment: _over_rounds([r[f"{moment}_loss"] for r in rounds], min) for moment in MOMENTS},
        **_held_out(experiment, record),
        "bytes": {"down": sum(r["bytes_down"] for r in rounds), "up": sum(r["bytes_up"] for r in rounds)},
        "gradient_passes": fmean(r["gradient_passes"] for r in trained) if trained else 0.0,
        "replies": _replies(rounds),
        "seconds": {
            "total": total,
            "train": sum(r["seconds_train"] for r in rounds),
            "evaluate": sum(r["seconds_evaluate"] for r in rounds),
        },
        "evaluation": (
            f"received: after download, before local training, {experiment.evaluated_in_words}; "
            "trained: after local training, the round's participants. plain: mean over clients; weighted: over "
            "samples. best is the best round on the test rows."
        ),
    }


def _held_out(experiment: Run, record: Record) -> dict[str, Any]:
    """How the clients do that never train, and which of the split they are; here they are the last ones."""
    if HELD_OUT not in record.moments:
        return {}
    over = lambda name, best: _over_rounds([r[f"{HELD_OUT}_{name}"] for r in record.rounds], best)
    accuracy = {average: over(average, max) for average in ("plain", "weighted")}
    clients = list(experiment.federation.held_out)
    return {
        HELD_OUT: {
            "evaluation": "as received, of the clients that never train, which are in no other number",
            "clients": clients,
            "accuracy": accuracy,
            "loss": over("loss", min),
        }
    }


def _replies(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """What became of those who were drawn; of whom replies were refused, and who failed, how often. Unscored are
    evaluations of clients that failed in them."""
    lists = ("participants", "absent", "dropped", "refused", "failed", "unscored")
    counts = {of: sum(len(r[of]) for r in rounds) for of in lists}
    return {**counts, **{f"{of}_of": _how_often([e for r in rounds for e in r[of]]) for of in lists[3:]}}


def _how_often(entries: list[str]) -> dict[str, int]:
    """Of each client that is named."""
    named = Counter(entry.partition(":")[0] for entry in entries)
    return dict(sorted(named.items(), key=lambda kv: int(kv[0])))


def _over_rounds(values: list[float | None], best: Callable[..., float]) -> dict[str, float | None]:
    known = [v for v in values if v is not None]
    if not known:
        return {"last": None, "best": None, "last10": None}
    finite = [v for v in known if isfinite(v)]
    found = {"last": known[-1], "best": best(finite) if finite else nan, "last10": fmean(known[-10:])}
    return {name: v if isfinite(v) else None for name, v in found.items()}  # JSON has no word for it


def save_models(path: Path, context: Context, progress: Progress, pool: Backend, clients: int) -> dict[int, str]:
    """Shared weights, and each client's personal ones. A client whose weights are the shared ones has no file of its
    own; index.json says which file is whose, and null of one that failed. These are returned, and why."""
    if path.exists():  # of a run that was killed while it wrote them
        shutil.rmtree(path)
    path.mkdir()
    shared = context.method.published(progress.server).get("model")
    index: dict[str, str | None] = {}
    failed: dict[int, str] = {}
    slots = {f"{slot}/{k or 'value'}": v for slot, value in progress.server.items() for k, v in entries(value).items()}
    if slots:
        save_file(_own(slots), path / "server.safetensors")
    if isinstance(shared, Tree):
        save_file(_own(shared), path / "shared.safetensors")
    for reply in pool.do(turns(context, progress, "personal", range(clients))):
        if reply.failed:
            index[str(reply.client)], failed[reply.client] = None, reply.failed
            continue
        assert reply.weights is not None
        if isinstance(shared, Tree) and reply.weights.equals(shared):
            index[str(reply.client)] = "shared.safetensors"
            continue
        name = f"client-{reply.client:05d}.safetensors"
        save_file(_own(reply.weights), path / name)
        index[str(reply.client)] = name
    write(path / "index.json", json.dumps(dict(sorted(index.items(), key=lambda kv: int(kv[0]))), indent=1) + "\n")
    return failed


def _own(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each in memory of its own, as safetensors wants them: two slots may be one tensor."""
    return dict(Tree(tensors).clone())


def write_record(path: Path, record: Record) -> None:
    import pyarrow as pa  # slow to import, and not needed by a run that keeps no files
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(record.rounds), path / "rounds.parquet")
    pq.write_table(pa.Table.from_pylist(record.clients, pa.schema(list(CLIENTS.items()))), path / "clients.parquet")
    if record.notes:
        save_notes(path / "notes.safetensors", record.notes)


def save_notes(path: Path, notes: list[dict[str, Any]]) -> None:
    """Round by round. Of a Tree of numbers, which is a row of the table, the file's metadata has the names."""
    names = {k: json.dumps(list(v)) for k, v in notes[0].items() if isinstance(v, Tree)}
    save_file({k: torch.stack([n[k].flat() if k in names else n[k] for n in notes]) for k in notes[0]}, path, names)


CLIENTS = {
    "round": "int32", "client": "int32", "moment": "string", "split": "string", "correct": "int32", "total": "int32",
    "loss": "float64",
}  # fmt: skip
