"""Before the first round: what clients say of themselves, where the method asks it."""

from __future__ import annotations

from typing import Any

from idiolect.engine.failing import unmet
from idiolect.engine.progress import Progress, Report
from idiolect.engine.reduce import copied, summed
from idiolect.engine.turns import Backend, turns
from idiolect.engine.wire import nbytes
from idiolect.engine.work import Context
from idiolect.errors import ClientError
from idiolect.method import Rows, Written


def hello(run: Any, context: Context, backend: Backend, progress: Progress) -> Report:
    """Every client introduces itself, where the method has it do so. One whose introduction is refused stays a stranger
    with an unwritten row, and is away in every round: the server knows nothing of it that the method rests on."""
    done = Report(0)
    if context.method.says_hello:
        name, met = f"{context.method.name}.hello", {}
        for reply in backend.do(turns(context, progress, "hello", range(run.num_clients))):
            if reply.failed:
                raise unmet(context.method.name, reply)
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
