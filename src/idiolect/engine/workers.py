"""Worker processes: one per core, one thread each, the data once in shared memory.

Jobs go out in order, a few clients at a time, to the worker that has least to do; replies are handed on strictly in
order, so that the numbers do not depend on how many workers there are. A worker has a few slots for parcels under way
and replies that wait for their turn: that bounds memory. A worker that dies is replaced and its parcels are sent again.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from idiolect.engine import forking
from idiolect.engine.stepping import here
from idiolect.engine.store import Store
from idiolect.engine.wire import Arena, nbytes, pack, tensors, unpack, view
from idiolect.engine.work import Context, Job, Reply, Shards
from idiolect.errors import ClientError, ContractError, UsageError
from idiolect.method import Up

SLOTS, WAITING = 8, 256 << 20  # of a worker at most, and the bytes that its waiting replies may have
QUICK = 0.02  # seconds; behind a parcel that is done sooner the next one is already waiting
REPLACED = 3  # a worker's parcels may kill it so many times
LIGHT = 1000  # tensors whose addresses a pipe takes at once, so that sending them waits for nobody
GUARD = (
    "Workers import the script that is run: what it does belongs below 'if __name__ == \"__main__\":', or use "
    "backend=serial."
)
UNKNOWN = (
    "Worker processes import the classes and functions of a run by their names, and one of them is in no file that "
    "they can import; put it into one, or use backend='serial'"
)


class Workers:
    def __init__(self, context: Context, store: Store, count: int, parcel: int | None = None) -> None:
        self.context, self.store, self.parcel = context, store, parcel
        context.shards.share()
        self.told = _told(context, store)
        self._methods = forking.context()
        self._broadcast = Arena()
        self._held: dict[int, Any] = {}
        self._places: dict[int, Any] = {}  # of the tensors that all were told
        self._same: dict[int, Any] = {}  # downloads of several jobs, packed
        self._workers = [_Worker(self) for _ in range(count)]

    def do(self, jobs: Iterable[Job]) -> Iterator[Reply]:
        jobs = list(jobs)
        self._announce(jobs)
        ahead = 1
        waiting = deque(self._parcels(jobs))
        number, turn = 0, 0  # parcels sent, the next to hand on
        ready: dict[int, tuple[_Worker, int, list[Reply]]] = {}
        try:
            while waiting or turn < number:
                while waiting and (worker := min(self._workers, key=lambda w: (not w.free, w.busy))).free:
                    if worker.busy >= ahead or (worker.busy and _heavy(waiting[0])):
                        break
                    worker.send(number, waiting.popleft())
                    number += 1
                while turn in ready:
                    worker, slot, replies = ready.pop(turn)
                    ahead = 2 if sum(r.seconds for r in replies) < QUICK else 1
                    yield from replies
                    worker.free.append(slot)
                    turn += 1
                if turn < number:
                    for worker in self._awake():
                        for done in worker.receive():
                            ready[done[0]] = (worker, *done[1:])
        except BaseException:
            self.close()  # answers may be under way that nobody will collect
            raise

    def _parcels(self, jobs: list[Job]) -> list[list[Job]]:
        if jobs and jobs[0].kind == "received":
            return [list(parcel) for _, parcel in groupby(jobs, key=lambda job: job.parcel)]
        size = self.parcel or max(1, min(8, len(jobs) // (4 * len(self._workers))))
        return [jobs[k : k + size] for k in range(0, len(jobs), size)]

    def _announce(self, jobs: list[Job]) -> None:
        """Tensors that several clients receive are written to shared memory once."""
        seen: dict[int, Any] = {}
        common: dict[int, Any] = {}
        downs: dict[int, list[Any]] = {}  # each once, with those that share it: most methods send all the same
        for job in jobs:
            downs.setdefault(id(job.down), []).append(job.down)
        for down, *more in downs.values():
            for t in tensors(down):
                if more or id(t) in seen:
                    common[id(t)] = t
                seen[id(t)] = t
        if {k: id(v) for k, v in common.items()} != {k: id(v) for k, v in self._held.items()}:
            packed = self._broadcast.fill(list(common.values()))
            self._held = common
            self._places = dict(zip(common, (p[1] for p in packed[1]), strict=True))
            for worker in self._workers:
                worker.knows_broadcast = worker.knows_broadcast and not self._broadcast.grown
            self._broadcast.grown = False
        self._same = {k: (all_[0], pack(all_[0], self._place)) for k, all_ in downs.items() if len(all_) > 1}

    def _place(self, t: torch.Tensor) -> tuple[bool, Any]:
        return True, self._places[id(t)]

    def packed(self, down: Any, put: Callable[[torch.Tensor], Any]) -> Any:
        """What a job says of its download: where each tensor lies, in what all were told or where `put` puts it."""
        if id(down) in self._same:
            return self._same[id(down)][1]
        return pack(down, lambda t: self._place(t) if id(t) in self._places else (False, put(t)))

    def own(self, down: Any) -> list[torch.Tensor]:
        """The tensors of a download that are not among what all were told."""
        return [] if id(down) in self._same else [t for t in tensors(down) if id(t) not in self._places]

    def _awake(self) -> list[_Worker]:
        handles = {w.link: w for w in self._workers} | {w.process.sentinel: w for w in self._workers}
        awake = {id(handles[h]): handles[h] for h in wait(list(handles))}  # type: ignore[index]
        return list(awake.values())

    def close(self) -> None:
        for worker in self._workers:
            worker.stop()


class _Worker:
    """The parent's side of one process: its link, its arenas, the parcels that it has."""

    def __init__(self, pool: Workers) -> None:
        self.pool = pool
        reply = sum(layout.size for layout in pool.store.layouts) + nbytes(pool.context.state.server)
        slots = max(2, min(SLOTS, WAITING // (reply * (pool.parcel or 8))))
        self.arenas = [Arena() for _ in range(slots)]
        self.free = deque(range(slots))
        self.sent: dict[int, tuple[int, list[Job]]] = {}  # parcel -> its slot, its jobs
        self.deaths: dict[int, int] = {}
        self._start()

    def _start(self) -> None:
        self.link, theirs = multiprocessing.Pipe()
        pool = self.pool
        shared = pool.context.shards, pool.store.records
        self.process = pool._methods.Process(target=serve, args=(theirs, pool.told, *shared), daemon=True)
        resource_tracker.ensure_running()  # not below: it unblocks the signal
        try:
            with forking.undisturbed():  # also the server of which workers are forks, with the first of them
                self.process.start()
        except (EOFError, ConnectionError) as error:  # that server died: it imports the script that is run
            raise UsageError(f"No worker could start. {GUARD}") from error
        theirs.close()
        self.knows_broadcast = False
        self.replies: dict[int, torch.Tensor] = {}
        for arena in self.arenas:
            arena.grown = True

    @property
    def busy(self) -> int:
        """Parcels that it has not answered."""
        return len(self.sent)

    def send(self, number: int, jobs: list[Job]) -> None:
        slot = self.free.popleft()
        self.sent[number] = (slot, jobs)
        self._post(number, slot, jobs)

    def _post(self, number: int, slot: int, jobs: list[Job]) -> None:
        pool, arena = self.pool, self.arenas[slot]
        arena.clear()
        arena.reserve(sum(t.nbytes + 64 for job in jobs for t in pool.own(job.down)))
        orders = [
            (job.kind, job.client, job.round, job.visits, job.score, job.pace, pool.packed(job.down, arena.put))
            for job in jobs
        ]
        try:
            self.link.send(
                (
                    number, slot, orders,
                    None if self.knows_broadcast else pool._broadcast.buffer,
                    arena.buffer if arena.grown else None,
                )
            )  # fmt: skip
            self.knows_broadcast, arena.grown = True, False
        except OSError:
            pass  # it died: `receive` will see that, and send again

    def receive(self) -> list[tuple[int, int, list[Reply]]]:
        """The parcels that are finished: (number, slot, replies)."""
        done = []
        try:
            while self.link.poll():
                number, slot, outcome, buffer = self.link.recv()
                if isinstance(outcome, tuple):
                    raise _raised(outcome)
                if buffer is not None:
                    self.replies[slot] = buffer
                memory = self.replies[slot]
                del self.sent[number]
                self.deaths.pop(number, None)
                done.append((number, slot, [_opened(o, memory) for o in outcome]))
        except (EOFError, OSError):  # also in the middle of a message
            self._replace()
            return done
        if not self.process.is_alive() and not self.link.poll():
            self._replace()
        return done

    def _replace(self) -> None:
        """The process died. What it had not finished goes to its successor; numbers depend on jobs alone."""
        self.process.kill()
        self.process.join()
        code = self.process.exitcode
        for number, (_, jobs) in self.sent.items():
            self.deaths[number] = self.deaths.get(number, 0) + 1
            if self.deaths[number] >= REPLACED:
                clients = ", ".join(str(j.client) for j in jobs)
                hint = (
                    f" {GUARD}" if code == 1 else ""
                )  # an error in Python, of which a worker's own are told otherwise
                raise ClientError(f"A worker died {REPLACED} times (exit code {code}) at clients {clients}.{hint}")
        self.link.close()
        self._start()
        for number, (slot, jobs) in list(self.sent.items()):
            self._post(number, slot, jobs)

    def stop(self) -> None:
        self.link.close()
        self.process.join(timeout=5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _told(context: Context, store: Store) -> bytes:
    """What every worker is told once. Its tensors go by value: each that is shared instead takes a file descriptor, of
    which a process can be handed few hundred."""
    try:
        return pickle.dumps((replace(context, shards=None), store.kinds, store.drawn))  # type: ignore[arg-type]
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(f"{UNKNOWN} ({error}).") from None


def _heavy(jobs: list[Job]) -> bool:
    return sum(len(tensors(job.down)) for job in jobs) > LIGHT


def serve(link: Connection, told: bytes, shards: Shards, records: Any) -> None:
    """The worker's side: answer parcels until the link closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # should somebody else have started the server
    torch.set_num_threads(1)
    refusal = None
    try:
        context, kinds, drawn = pickle.loads(told)  # the parent's own words, over a pipe that nobody else has
        context.shards, store = shards, Store.attached(kinds, drawn, records)
    except (AttributeError, ImportError) as error:
        refusal = "UsageError", f"{UNKNOWN} ({error}).", ""
    arenas: dict[int, Arena] = {}
    inboxes: dict[int, torch.Tensor] = {}
    broadcast: Any = None
    while True:
        try:
            number, slot, jobs, new_broadcast, inbox = link.recv()
        except (EOFError, OSError):
            os._exit(0)
        broadcast = broadcast if new_broadcast is None else new_broadcast
        if inbox is not None:
            inboxes[slot] = inbox
        if slot not in arenas:
            arenas[slot] = Arena()
        arena = arenas[slot]
        try:
            outcome: Any = refusal or _answer(context, store, jobs, broadcast, inboxes[slot], arena)
        except Exception as error:
            outcome = (type(error).__name__, str(error), traceback.format_exc())
        grown, arena.grown = arena.grown, False
        try:
            link.send((number, slot, outcome, arena.buffer if grown else None))
        except OSError:
            os._exit(0)


def _answer(context: Context, store: Store, orders: list[Any], broadcast: Any, inbox: Any, arena: Arena) -> list[Any]:
    jobs = []
    downs: dict[int, Any] = {}  # what was packed once arrives as one object
    for kind, client, round, visits, score, pace, packed in orders:
        if (down := downs.get(id(packed))) is None:
            down = downs[id(packed)] = unpack(packed, lambda a: view(broadcast if a[0] else inbox, a[1]))
        mine = store.record_of(client) if visits else store.template(client)
        jobs.append(Job(kind, client, round, visits, down, mine, score, pace))
    replies = list(here(context).do(jobs))
    values = [[r.up and [r.up.mean, r.up.sum, r.up.rows], r.mine, r.weights] for r in replies]
    packed = arena.fill(values)
    return [
        (r.client, r.scores, r.passes, r.seconds, r.uses, r.up and r.up.weight, p)
        for r, p in zip(replies, packed[1], strict=True)
    ]


def _opened(outcome: Any, memory: Any) -> Reply:
    client, scores, passes, seconds, uses, weight, packed = outcome
    parts, mine, weights = unpack(packed, lambda a: view(memory, a))
    up = Up(mean=parts[0], sum=parts[1], rows=parts[2], weight=weight) if parts else None
    return Reply(client, up, mine, scores, passes, seconds, weights, uses)


def _raised(outcome: tuple[str, str, str]) -> Exception:
    kind, text, trace = outcome
    if kind == "UsageError":
        return UsageError(text)
    if kind == "ContractError":
        return ContractError(text)
    return ClientError(f"{text}\n--- in the worker ---\n{trace}")
