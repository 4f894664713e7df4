"""What a client's last evaluation rests on: where nothing of it has changed, its scores stand."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from idiolect.engine.work import Job, Reply, Score
from idiolect.tree import Tree, entries

Marks = Mapping[str, tuple[Any, int]]  # tensors, known but not held, and how often they were written to
NOTHING = Tree()


@dataclass(frozen=True)
class Standing:
    """A client's last scores; its visits then, which its private state follows; and the received slots that were asked
    for, or None where the scores rest on more than that (the round, say)."""

    scores: tuple[Score, ...]
    visits: int
    received: Mapping[str, Marks] | None

    @staticmethod
    def of(job: Job, reply: Reply) -> Standing:
        values = {slot: job.down.get(slot, NOTHING) for slot in reply.uses or ()}
        known = reply.uses is not None and all(isinstance(v, Tree | Tensor) for v in values.values())
        return Standing(reply.scores, job.visits, {s: marks(v) for s, v in values.items()} if known else None)

    def holds(self, job: Job) -> bool:
        if self.received is None or self.visits != job.visits:
            return False
        return all(_unchanged(known, job.down.get(slot, NOTHING)) for slot, known in self.received.items())


def marks(value: Tree | Tensor) -> Marks:
    return {k: (weakref.ref(t), t._version) for k, t in entries(value).items()}


def _unchanged(known: Marks, value: Any) -> bool:
    named = entries(value)
    return named.keys() == known.keys() and all(
        known[k][0]() is t and known[k][1] == t._version for k, t in named.items()
    )


def changed(
    jobs: Iterable[Job], standing: Mapping[int, Standing], together: int, asked: dict[int, Job]
) -> Iterator[Job]:
    """Of all clients' evaluations those whose last scores do not stand, in the parcels that they have among all."""
    for place, job in enumerate(jobs):
        if job.client not in standing or not standing[job.client].holds(job):
            asked[job.client] = replace(job, parcel=place // together)
            yield asked[job.client]
