"""Runs whose pool of workers a test can reach, and what is to be said of them afterwards."""

from __future__ import annotations

import multiprocessing

import torch

from idiolect.engine import workers
from idiolect.engine.loop import loop
from idiolect.engine.progress import Progress
from idiolect.engine.serial import Serial
from idiolect.method import Rows
from idiolect.running import one_thread


def begin(experiment, count=2, parcel=None, file=None):
    context = experiment.context()
    store = context.store(experiment.clients, file)
    pool = workers.Workers(context, store, count, parcel, experiment.time_limit) if count else Serial(context)
    return context, Progress(context.state.server, Rows(context.state.rows), store), pool


def carried_out(experiment, count=2, parcel=None, file=None, watch=lambda report, pool: None):
    """The loop with a pool that the test can reach."""
    context, progress, pool = begin(experiment, count, parcel, file)
    with one_thread():
        try:
            loop(experiment, context, pool, progress, lambda report: watch(report, pool))
        finally:
            pool.close()
    assert count == 0 or nobody_left(pool)
    return progress


def nobody_left(pool):
    processes = [w.process for w in pool._workers]
    return not any(p.is_alive() for p in processes) and not set(processes) & set(multiprocessing.active_children())


def same(one, two, clients=8):
    assert one.server["model"].equals(two.server["model"])
    assert one.store.visits.tolist() == two.store.visits.tolist()
    for i in range(clients):
        a, b = one.store.read(i), two.store.read(i)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[k], b[k]) if isinstance(a[k], torch.Tensor) else a[k].equals(b[k]) for k in a)
    return True
