"""Who takes part in a round, and what the server may know of it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from idiolect.engine.progress import Progress, Report
from idiolect.engine.work import Context
from idiolect.method import Facts


def attendance(run: Any, progress: Progress) -> Report:
    """Who takes part in this round, who of those drawn is away, and whose reply will be lost."""
    r = progress.round
    here, away = run.faults.there(r, run.participants(r))
    ids = tuple(i for i in here if i not in progress.strangers)
    absent = tuple(sorted({*away, *here} - {*ids}))
    return Report(r + 1, ids, tuple(i for i in ids if run.faults.lost(r, i)), absent)


def facts(run: Any, context: Context, r: int, weights: Mapping[int, float]) -> Facts:
    """What the server may know of a round in which these clients count, with these weights."""
    ids = tuple(sorted(weights))
    weighed = tuple(weights[i] for i in ids)
    return Facts(r, run.num_clients, ids, weighed, context.rate(r), run.rounds, run.seed, partial(context.server, r))
