"""The one loop of federated training. Every method, backend and deployment goes through it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from idiolect.engine.cohort import attendance, facts
from idiolect.engine.evaluating import Standing, changed
from idiolect.engine.introductions import hello
from idiolect.engine.progress import Progress, Report
from idiolect.engine.reduce import Reduction, summed
from idiolect.engine.turns import Backend, order, turns
from idiolect.engine.wire import nbytes, sizes
from idiolect.engine.work import Context, Job, checked

# what clients do, and what the server then makes of it; the first is for methods that ask
EXCHANGES = (("ask", "answered"), ("local", "server"))


def loop(run: Any, context: Context, backend: Backend, progress: Progress, report: Callable[[Report], None]) -> None:
    if progress.round == 0:
        report(evaluate(run, context, backend, progress, hello(run, context, backend, progress)))
    while progress.round < run.rounds:
        done = one_round(run, context, backend, progress)
        if run.evaluates(progress.round):
            evaluate(run, context, backend, progress, done)
        report(done)


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


def evaluate(run: Any, context: Context, backend: Backend, progress: Progress, done: Report) -> Report:
    """Score clients with the model that they would have after download: every one, unless the run says how many; and
    apart, those that never train. Scores of which nothing changed stand."""
    started = time.perf_counter()
    asked: dict[int, Job] = {}
    everyone = turns(context, progress, "received", run.evaluated)
    for reply in backend.do(changed(everyone, progress.standing, context.together, asked)):
        progress.standing[reply.client] = Standing.of(asked.pop(reply.client), reply)
        if reply.failed:  # it stands without a score
            done.unscored[reply.client] = reply.failed
    for i in order(context, run.evaluated):
        scores = done.received if i < run.num_clients else done.held_out
        scores[i] = progress.standing[i].scores
    done.seconds_evaluate = time.perf_counter() - started
    return done
