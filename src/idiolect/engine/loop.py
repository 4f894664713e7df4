"""The one loop of federated training. Every method, backend and deployment goes through it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from idiolect.engine.orders import draw
from idiolect.engine.reduce import Reduction, copied
from idiolect.engine.store import Store
from idiolect.engine.wire import nbytes
from idiolect.engine.work import Context, Job, Reply, Score, checked
from idiolect.method import Facts, Rows, Slots, Up


class Backend(Protocol):
    """Where clients run. `do` answers in the order of the jobs, whatever the order in which they were done."""

    def do(self, jobs: Iterable[Job]) -> Iterator[Reply]: ...

    def close(self) -> None: ...


@dataclass
class Progress:
    """All that a run is between two rounds."""

    server: Slots
    rows: Rows
    store: Store
    round: int = 0


@dataclass
class Report:
    """What one round says of itself. `received`: each client's scores with what it would download after this round;
    `trained`: the participants' after local training."""

    round: int  # rounds finished
    participants: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()
    received: dict[int, tuple[Score, ...]] = field(default_factory=dict)
    trained: dict[int, tuple[Score, ...]] = field(default_factory=dict)
    bytes_down: int = 0
    bytes_up: int = 0
    passes: float = 0.0  # gradient passes over the participants' own data, on average
    seconds_train: float = 0.0
    seconds_evaluate: float = 0.0
    notes: dict[str, Any] = field(default_factory=dict)  # the method's own (Method.notes)


def loop(run: Any, context: Context, backend: Backend, progress: Progress, report: Callable[[Report], None]) -> None:
    if progress.round == 0:
        report(evaluate(run, context, backend, progress, hello(run, context, backend, progress)))
    while progress.round < run.rounds:
        done = one_round(run, context, backend, progress)
        if run.evaluates(progress.round):
            evaluate(run, context, backend, progress, done)
        report(done)


def hello(run: Any, context: Context, backend: Backend, progress: Progress) -> Report:
    """Every client introduces itself, where the method has it do so."""
    done = Report(0)
    if context.method.says_hello:
        met = {}
        for reply in backend.do(turns(context, progress, "hello", range(run.clients))):
            sent = {slot: copied(value) for slot, value in reply.up.rows.items()}  # type: ignore[union-attr]
            met[reply.client] = {**progress.rows[reply.client], **sent}
            done.bytes_up += nbytes(sent)
            done.passes += reply.passes / run.clients
        progress.rows = Rows(progress.rows.template, met)
    return done


def one_round(run: Any, context: Context, backend: Backend, progress: Progress) -> Report:
    started, r, method = time.perf_counter(), progress.round, context.method
    ids = run.participants(r)
    if ids:
        sizes = {i: context.shards.size("train", i) for i in ids}
        known = facts(run, context, r, sizes)
        progress.server, progress.rows = method.plan(progress.server, progress.rows, known)
    reduction = Reduction(method.name, progress.server)
    lost, done = [], Report(r + 1, tuple(ids))
    jobs = turns(context, progress, "local", ids, score=run.evaluates(r + 1))
    for reply in backend.do(jobs):
        i, n = reply.client, context.shards.size("train", reply.client)
        done.passes += reply.passes / len(ids)
        if run.drop and draw(run.seed, "drop", r, i).random() < run.drop:
            lost.append(i)  # neither its reply nor its new state counts
            continue
        assert reply.up is not None
        assert reply.mine is not None
        checked(f"{method.name}.local", "mine", reply.mine, progress.store.template(i), f"client {i}, round {r}")
        reduction.add(i, reply.up, n)
        progress.store.write(i, reply.mine)
        done.trained[i] = reply.scores
        done.bytes_up += nbytes([reply.up.mean, reply.up.sum, reply.up.rows])
    done.bytes_down = sum(nbytes(method.down(progress.server, progress.rows[i])) for i in ids)
    done.dropped = tuple(sorted(lost))
    if reduction.weights:
        up: Up = reduction.result()
        known = facts(run, context, r, reduction.weights)
        server, rows = method.server(progress.server, progress.rows, up, known)
        checked(f"{method.name}.server", "server", server, context.state.server, f"round {r}")
        progress.server, progress.rows = server, rows
    progress.round = r + 1
    done.notes = dict(method.notes(progress.server))
    done.seconds_train = time.perf_counter() - started
    return done


def facts(run: Any, context: Context, r: int, weights: Mapping[int, float]) -> Facts:
    """What the server may know of a round in which these clients count, with these weights."""
    ids = tuple(sorted(weights))
    return Facts(r, run.clients, ids, tuple(weights[i] for i in ids), context.rate(r), run.rounds, run.seed)


def evaluate(run: Any, context: Context, backend: Backend, progress: Progress, done: Report) -> Report:
    """Score every client with the model that it would have after download."""
    started = time.perf_counter()
    for reply in backend.do(turns(context, progress, "received", range(run.clients))):
        done.received[reply.client] = reply.scores
    done.seconds_evaluate = time.perf_counter() - started
    return done


def turns(context: Context, progress: Progress, kind: str, ids: Iterable[int], score: bool = False) -> Iterator[Job]:
    """Jobs in the order in which replies are combined: the longest clients first, then by id."""
    server = context.method.published(progress.server) if kind in ("received", "personal") else progress.server
    for i in sorted(ids, key=lambda i: (-context.shards.size("train", i), i)):
        down = context.method.down(server, progress.rows[i])
        yield Job(kind, i, progress.round, int(progress.store.visits[i]), down, progress.store.read(i), score)
