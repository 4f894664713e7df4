"""One client after another in this process: the backend to debug with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from idiolect.engine.work import Context, Job, Reply


class Serial:
    def __init__(self, context: Context) -> None:
        self.context = context

    def do(self, jobs: Iterable[Job]) -> Iterator[Reply]:
        for job in jobs:
            yield self.context.do(job)

    def close(self) -> None:
        pass
