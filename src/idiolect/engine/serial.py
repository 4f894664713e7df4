"""One client after another in this process: the backend to debug with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import groupby

from idiolect.engine.work import Context, Job, Reply


class Serial:
    def __init__(self, context: Context) -> None:
        self.context = context

    def do(self, jobs: Iterable[Job]) -> Iterator[Reply]:
        for (kind, _), parcel in groupby(jobs, key=lambda job: (job.kind, job.parcel)):
            carry_out = self.context.received if kind == "received" else partial(map, self.context.do)
            yield from carry_out(parcel)

    def close(self) -> None:
        pass
