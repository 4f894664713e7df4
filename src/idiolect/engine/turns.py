"""Clients' turns: the jobs of an exchange or an evaluation, in the order in which their replies count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from idiolect.engine.faults import NONE, Faults
from idiolect.engine.progress import Progress
from idiolect.engine.work import Context, Job, Reply

BLOCK = 64  # clients whose downloads are made at once


class Backend(Protocol):
    """Where clients run. `do` answers in the order of the jobs, whatever the order in which they were done."""

    def do(self, jobs: Iterable[Job]) -> Iterator[Reply]: ...

    def close(self) -> None: ...


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
