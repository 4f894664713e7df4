"""Clients that fail: one whose process ends, hangs or runs out of memory is run again, and given up the second time.

What cannot be laid to one client, because several were under way together, is run again together once, and then each
apart: on its own every client answers for itself, and a stack's last digits are others then. A mistake in a method's
code is none of this; it ends the run.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from idiolect.engine.work import Context, Job, Reply
from idiolect.errors import ClientError

TWICE = 2
OUT_OF_MEMORY = "out of memory"
NO_MEMORY = ("can't allocate memory", "cannot allocate memory", "not enough memory")  # as PyTorch says it


@dataclass
class Parcel:
    """Jobs that are done together, until each has its reply or has failed twice. Each is of another client."""

    jobs: list[Job]
    failed: dict[int, str] = field(default_factory=dict)  # the clients that were given up, and why
    failures: Counter[int] = field(default_factory=Counter)  # of one client, when it alone was under way
    together: int = 0  # failures while several were under way

    @property
    def left(self) -> list[Job]:
        return [job for job in self.jobs if job.client not in self.failed]

    @property
    def apart(self) -> bool:
        return self.together >= TWICE

    @property
    def groups(self) -> list[list[Job]]:
        """What is left, as it is to be done."""
        return [[job] for job in self.left] if self.apart else [self.left]

    def blame(self, client: int | None, why: str) -> None:
        """It ended early: at this client, or (None) at one of several."""
        if client is not None:
            self.failures[client] += 1
            if self.failures[client] >= TWICE:
                self.failed[client] = why
            return
        self.together += 1
        if self.together >= 2 * TWICE:  # apart as well, as when replies cannot be sent
            self.failed |= {job.client: why for job in self.left}

    def answered(self, replies: Iterable[Reply]) -> list[Reply]:
        """All replies in the order of the jobs, those of what is left being these."""
        rest = iter(replies)
        failed = self.failed
        return [
            Reply(job.client, None, None, failed=failed[job.client]) if job.client in failed else next(rest)
            for job in self.jobs
        ]


def out_of_memory(error: BaseException | None) -> bool:
    """Whether this is what made the error: Python, NumPy or PyTorch got no memory."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return True
        if isinstance(error, RuntimeError) and any(words in str(error).lower() for words in NO_MEMORY):
            return True
        error = error.__cause__
    return False


def unmet(method: str, reply: Reply) -> ClientError:
    """The error for a client that failed when it was to introduce itself."""
    return ClientError(
        f"{method}.hello: client {reply.client} failed twice ({reply.failed}), and the method cannot begin before "
        "every client has introduced itself. Mend that, or take another method."
    )


class InProcess(Protocol):
    def parcels(self, jobs: Iterable[Job]) -> Iterator[list[Job]]: ...

    def carry_out(self, jobs: Sequence[Job]) -> Iterable[Reply]: ...

    def close(self) -> None: ...


class Enduring:
    """Clients in this process, which outlives one that gets no memory, and nothing worse."""

    def __init__(self, context: Context, backend: InProcess) -> None:
        self.backend = backend
        self.under_way: Sequence[Job] = ()
        context.watch = self._watch

    def _watch(self, jobs: Sequence[Job]) -> None:
        self.under_way = jobs

    def do(self, jobs: Iterable[Job]) -> Iterator[Reply]:
        for parcel in self.backend.parcels(jobs):
            yield from self._replies(Parcel(parcel))

    def _replies(self, parcel: Parcel) -> list[Reply]:
        while parcel.left:
            try:
                return parcel.answered([r for group in parcel.groups for r in self.backend.carry_out(group)])
            except Exception as error:
                if not out_of_memory(error):
                    raise
            parcel.blame(self.under_way[0].client if len(self.under_way) == 1 else None, OUT_OF_MEMORY)
        return parcel.answered([])

    def close(self) -> None:
        self.backend.close()
