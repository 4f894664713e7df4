"""The one loop of federated training. Every method, backend and deployment goes through it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

from idiolect.engine.evaluating import Standing, changed
from idiolect.engine.faults import NONE, Faults
from idiolect.engine.progress import Progress, Report
from idiolect.engine.reduce import Reduction, copied, summed
from idiolect.engine.wire import nbytes, sizes
from idiolect.engine.work import Context, Job, Reply, checked
from idiolect.errors import ClientError
from idiolect.method import Facts, Rows, Written

# what clients do, and what the server then makes of it; the first is for methods that ask
EXCHANGES = (("ask", "answered"), ("local", "server"))

BLOCK = 64  # clients whose downloads are made at once


class Backend(Protocol):
    """Where clients run. `do` answers in the order of the jobs, whatever the order in which they were done."""

    def do(self, jobs: Iterable[Job]) -> Iterator[Reply]: ...

    def close(self) -> None: ...


def loop(run: Any, context: Context, backend: Backend, progress: Progress, report: Callable[[Report], None]) -> None:
    if progress.round == 0:
        report(evaluate(run, context, backend, progress, hello(run, context, backend, progress)))
    while progress.round < run.rounds:
        done = one_round(run, context, backend, progress)
        if run.evaluates(progress.round):
            evaluate(run, context, backend, progress, done)
        report(done)


def hello(run: Any, context: Context, backend: Backend, progress: Progress) -> Report:
    """Every client introduces itself, where the method has it do so. One whose introduction is refused stays a stranger
    with an unwritten row, and is away in every round: the server knows nothing of it that the method rests on."""
    done = Report(0)
    if context.method.says_hello:
        name, met = f"{context.method.name}.hello", {}
        for reply in backend.do(turns(context, progress, "hello", range(run.num_clients))):
            if reply.failed:
                raise ClientError(
                    f"{context.method.name}.hello: client {reply.client} failed twice ({reply.failed}), and the method "
                    "cannot begin before every client has introduced itself. Mend that, or take another method."
                )
            assert reply.up is not None
            done.passes += reply.passes / run.num_clients
            done.bytes_up += nbytes(reply.up.rows)
            if fault := run.reception.fault(name, reply, 0):
                done.refused[reply.client] = fault
                continue
            summed(context.method.name, reply.up, run.secure)
            sent = {slot: copied(value) for slot, value in reply.up.rows.items()}
            met[reply.client] = {**progress.rows[reply.client], **sent}
        if not met:
            raise ClientError(f"{name}: every client's introduction was refused, the first for {fault}.")
        progress.rows, progress.strangers = Rows(progress.rows.template, Written(met)), frozenset(done.refused)
    return done


def one_round(run: Any, context: Context, backend: Backend, progress: Progress) -> Report:
    started, r, method = time.perf_counter(), progress.round, context.method
    done = attendance(run, progress)
    ids = done.participants
    if ids:
        known = facts(run, context, r, {i: context.shards.size("train", i) for i in ids})
        progress.server, progress.rows = method.plan(progress.server, progress.rows, known)
    told = []  # what the server held at each exchange: what comes down twice is sent once
    for kind, then in EXCHANGES if method.asks else EXCHANGES[1:]:
        told.append((progress.server, progress.rows))
        heard = exchange(run, context, backend, progress, done, kind)
        if not heard.weights:
            break  # nobody was: there is nothing to answer
        known = facts(run, context, r, heard.weights)
        progress.server, progress.rows = getattr(method, then)(*told[-1], heard.result(), known)
        checked(f"{method.name}.{then}", "server", progress.server, context.state.server, f"round {r}")
        run.reception.guard(f"{method.name}.{then}", told[-1][0], progress.server, r)
    done.bytes_down = sum(sizes([method.down(server, rows[i]) for server, rows in told] for i in ids))
    progress.round = r + 1
    done.notes = dict(method.notes(progress.server))
    done.seconds_train = time.perf_counter() - started
    return done


def attendance(run: Any, progress: Progress) -> Report:
    """Who takes part in this round, who of those drawn is away, and whose reply will be lost."""
    r = progress.round
    here, away = run.faults.there(r, run.participants(r))
    ids = tuple(i for i in here if i not in progress.strangers)
    absent = tuple(sorted({*away, *here} - {*ids}))
    return Report(r + 1, ids, tuple(i for i in ids if run.faults.lost(r, i)), absent)


def exchange(run: Any, context: Context, backend: Backend, progress: Progress, done: Report, kind: str) -> Reduction:
    """A message to each participant, and the replies, combined. Of those that are lost or refused neither the reply nor
    the new state counts; a client that was refused or failed has no more part in the round."""
    name, r = f"{context.method.name}.{kind}", progress.round
    heard = run.reception.begin(name, progress.server, r)
    ids = [i for i in done.participants if i not in done.refused and i not in done.failed]
    for reply in backend.do(turns(context, progress, kind, ids, run.evaluates(r + 1), run.faults)):
        i = reply.client
        if reply.failed:
            done.failed[i] = reply.failed
            continue
        done.passes += reply.passes / len(done.participants)
        if i in done.dropped:
            continue
        assert reply.up is not None
        done.bytes_up += nbytes([reply.up.mean, reply.up.sum, reply.up.rows])
        if fault := run.reception.fault(name, reply, r):
            done.refused[i] = fault
            continue
        summed(context.method.name, reply.up, run.secure)
        heard.add(i, reply.up, context.shards.size("train", i))
        if reply.mine is not None:
            checked(name, "mine", reply.mine, progress.store.template(i), f"client {i}, round {r}")
            progress.store.write(i, reply.mine)
            if i not in run.reception.attackers:
                done.trained[i] = reply.scores
    return heard


def facts(run: Any, context: Context, r: int, weights: Mapping[int, float]) -> Facts:
    """What the server may know of a round in which these clients count, with these weights."""
    ids = tuple(sorted(weights))
    weighed = tuple(weights[i] for i in ids)
    return Facts(r, run.num_clients, ids, weighed, context.rate(r), run.rounds, run.seed, partial(context.server, r))


def evaluate(run: Any, context: Context, backend: Backend, progress: Progress, done: Report) -> Report:
    """Score clients with the model that they would have after download: every one, unless the run says how many; and
    apart, those that never train. Scores of which nothing changed stand."""
    started = time.perf_counter()
    asked: dict[int, Job] = {}
    everyone = turns(context, progress, "received", run.evaluated)
    for reply in backend.do(changed(everyone, progress.standing, context.together, asked)):
        job = asked.pop(reply.client)
        if reply.failed:
            done.unscored[reply.client] = reply.failed
            progress.standing.pop(reply.client, None)
        else:
            progress.standing[reply.client] = Standing.of(job, reply)
    for i in order(context, run.evaluated):
        if i in done.unscored:
            continue
        scores = done.received if i < run.num_clients else done.held_out
        scores[i] = progress.standing[i].scores
    done.seconds_evaluate = time.perf_counter() - started
    return done


def order(context: Context, ids: Iterable[int]) -> list[int]:
    """The order in which replies are combined: the longest clients first, then by id."""
    return sorted(ids, key=lambda i: (-context.shards.size("train", i), i))


def turns(
    context: Context,
    progress: Progress,
    kind: str,
    ids: Iterable[int],
    score: bool = False,
    faults: Faults = NONE,
) -> Iterator[Job]:
    """Jobs in the order in which replies are combined."""
    server = context.method.published(progress.server) if kind in ("received", "personal") else progress.server
    ids = order(context, ids)
    for block in (ids[k : k + BLOCK] for k in range(0, len(ids), BLOCK)):
        downs = context.method.downs(server, [progress.rows[i] for i in block])
        for i, down in zip(block, downs, strict=True):
            visits, mine, pace = int(progress.store.visits[i]), progress.store.read(i), faults.pace(progress.round, i)
            yield Job(kind, i, progress.round, visits, down, mine, score, pace)
