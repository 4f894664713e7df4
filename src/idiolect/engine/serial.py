"""One client after another in this process: the backend to debug with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from idiolect.engine.work import Context, Job, Reply


class Serial:
    def __init__(self, context: Context) -> None:
        self.context = context

    def do(self, jobs: Iterable[Job]) -> Iterator[Reply]:
        for parcel in self.parcels(jobs):
            yield from self.carry_out(parcel)

    def parcels(self, jobs: Iterable[Job]) -> Iterator[list[Job]]:
        """Evaluations as they share batches, everything else one by one."""
        for (kind, _), parcel in groupby(jobs, key=lambda job: (job.kind, job.parcel)):
            if kind == "received":
                yield list(parcel)
            else:
                yield from ([job] for job in parcel)

    def carry_out(self, jobs: Sequence[Job]) -> Iterator[Reply]:
        return self.context.received(jobs) if jobs[0].kind == "received" else map(self.context.do, jobs)

    def close(self) -> None:
        pass
