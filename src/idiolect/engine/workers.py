"""Worker processes: one per core, one thread each, the data once in shared memory.

Jobs go out in order, a few clients at a time, to the worker that has least to do; replies are handed on strictly in
order, so that the numbers do not depend on how many workers there are. A worker has a few slots for parcels under way
and replies that wait for their turn: that bounds memory.

A worker that is killed, runs out of memory or is too long at one client is replaced, and its parcels are sent again. It
has left a mark that says at which client it was; the second time this client's reply says that it failed.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
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
from idiolect.engine.compiled import Compiled
from idiolect.engine.failing import OUT_OF_MEMORY, Parcel, out_of_memory
from idiolect.engine.mark import Mark
from idiolect.engine.memory import keep
from idiolect.engine.stepping import here
from idiolect.engine.store import Store
from idiolect.engine.wire import Arena, nbytes, pack, tensors, unpack, view
from idiolect.engine.work import Context, Job, Reply, Shards
from idiolect.errors import ClientError, ContractError, UsageError
from idiolect.method import Up

SLOTS, WAITING = 8, 256 << 20  # of a worker at most, and the bytes that its waiting replies may have
QUICK = 0.02  # seconds; behind a parcel that is done sooner the next one is already waiting
STARTS, KILLS = 3, 20  # a worker may end so many times in a row, or be killed, without having begun with a client
LOOKS, LONGEST = 4, 1.0  # at workers, in the time that a client may take; seconds between two of them at most
LOST = 255  # the exit code that `multiprocessing` makes up when the server of which workers are forks has died
WAITS, PAUSE = 50, 0.1  # for the death of that server to be known, so that another is started
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
    def __init__(
        self, context: Context, store: Store, count: int, parcel: int | None = None, limit: float | None = None
    ) -> None:
        """`limit`: seconds that a client may take; several that are under way together have as much each."""
        self.context, self.store, self.parcel, self.limit = context, store, parcel, limit
        self.look = None if limit is None else min(limit / LOOKS, LONGEST)
        context.shards.share()
        self.told = _told(context, store)
        self._methods = forking.context()
        self._broadcast = Arena()
        self._held: dict[int, Any] = {}
        self._places: dict[int, Any] = {}  # of the tensors that all were told
        self._same: dict[int, Any] = {}  # downloads of several jobs, packed
        try:
            self._workers = [_Worker(self) for _ in range(count)]
        except (EOFError, ConnectionError) as error:  # their server died: it imports the script that is run
            raise UsageError(f"No worker could start. {GUARD}") from error

    def do(self, jobs: Iterable[Job]) -> Iterator[Reply]:
        jobs = list(jobs)
        self._announce(jobs)
        ahead = 1
        waiting = deque(map(Parcel, self._parcels(jobs)))
        number, turn = 0, 0  # parcels sent, the next to hand on
        ready: dict[int, tuple[_Worker, int, list[Reply]]] = {}
        try:
            while waiting or turn < number:
                while waiting and (worker := min(self._workers, key=lambda w: (not w.free, w.busy))).free:
                    if worker.busy >= ahead or (worker.busy and _heavy(waiting[0].jobs)):
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
        started = time.monotonic()
        awake = {id(handles[h]): handles[h] for h in wait(list(handles), self.look)}  # type: ignore[index]
        if self.limit is not None and self.look is not None:
            # not more than was asked for: the whole process may have stood still
            waited = min(time.monotonic() - started, 2 * self.look)
            for worker in self._workers:
                worker.count(waited, self.limit)
        return list(awake.values())

    def close(self) -> None:
        for worker in self._workers:
            worker.stop()


Done = tuple[int, int, list[Reply]]  # a parcel's number, its slot, its replies


class _Worker:
    """The parent's side of one process: its link, its arenas, the parcels that it has."""

    def __init__(self, pool: Workers) -> None:
        self.pool = pool
        reply = sum(layout.size for layout in pool.store.layouts) + nbytes(pool.context.state.server)
        slots = max(2, min(SLOTS, WAITING // (reply * (pool.parcel or 8))))
        self.arenas = [Arena() for _ in range(slots)]
        self.free = deque(range(slots))
        self.sent: dict[int, tuple[int, Parcel]] = {}  # parcel -> its slot, its jobs
        self.mark = Mark()
        self.unbegun = 0  # ends in a row without having begun with what it was sent
        self.turn, self.taken = self.mark.turn, 0.0  # what is under way, and the seconds that it was waited for
        self.overdue: int | None = None  # what was ended for taking too long
        self.over = False
        self._start()

    def _start(self) -> None:
        self.link, theirs = multiprocessing.Pipe()
        pool = self.pool
        shared = pool.context.shards, pool.store.records, self.mark.memory
        self.process = pool._methods.Process(target=serve, args=(theirs, pool.told, *shared), daemon=True)
        resource_tracker.ensure_running()  # not below: it unblocks the signal
        with forking.undisturbed():  # also the server of which workers are forks, with the first of them
            self.process.start()
        theirs.close()
        self.knows_broadcast = False
        self.replies: dict[int, torch.Tensor] = {}
        for arena in self.arenas:
            arena.grown = True

    @property
    def busy(self) -> int:
        """Parcels that it has not answered."""
        return len(self.sent)

    def send(self, number: int, parcel: Parcel) -> None:
        slot = self.free.popleft()
        self.sent[number] = (slot, parcel)
        self._post(number, slot, parcel)

    def _post(self, number: int, slot: int, parcel: Parcel) -> None:
        pool, arena, jobs = self.pool, self.arenas[slot], parcel.left
        arena.clear()
        arena.reserve(sum(t.nbytes + 64 for job in jobs for t in pool.own(job.down)))
        orders = [
            (job.kind, job.client, job.round, job.visits, job.score, job.pace, pool.packed(job.down, arena.put))
            for job in jobs
        ]
        try:
            self.link.send(
                (
                    number, slot, parcel.apart, orders,
                    None if self.knows_broadcast else pool._broadcast.buffer,
                    arena.buffer if arena.grown else None,
                )
            )  # fmt: skip
            self.knows_broadcast, arena.grown = True, False
        except OSError:
            pass  # it died: `receive` will see that, and send again

    def receive(self) -> list[Done]:
        """The parcels that are finished."""
        done: list[Done] = []
        try:
            while self.link.poll():
                number, slot, outcome, buffer = self.link.recv()
                if isinstance(outcome, tuple):
                    raise _raised(outcome)
                if buffer is not None:
                    self.replies[slot] = buffer
                memory = self.replies[slot]
                _, parcel = self.sent.pop(number)
                self.unbegun = 0
                done.append((number, slot, parcel.answered([_opened(o, memory) for o in outcome])))
        except (EOFError, OSError):  # also in the middle of a message
            return done + self._replace(hung_up=True)
        if wait([self.process.sentinel], 0):
            return done + self._replace(hung_up=False)
        return done

    def count(self, seconds: float, limit: float) -> None:
        """Time that went by while the parent waited. A client that takes too long is ended with its process."""
        mark = self.mark
        if self.turn != mark.turn or mark.paused or mark.parcel not in self.sent:
            self.turn, self.taken = mark.turn, 0.0
            return
        self.taken += seconds
        among = len(self.sent[mark.parcel][1].left) if mark.client is None else 1
        if self.taken > among * limit:
            self.overdue = self.turn
            self.process.kill()

    def _replace(self, hung_up: bool) -> list[Done]:
        """The process ended. What it had not finished goes to its successor; numbers depend on jobs alone. The parcels
        of which there is nothing left to do are finished."""
        self.process.kill()  # by its number, as long as nobody asked how it ended
        self.process.join()
        lost = self.process.exitcode == LOST and not hung_up  # it was alive
        self._blame(lost)
        self.link.close()
        self.process.close()  # which also tells a lost one that it is over
        self.mark.clear()
        self.overdue = None
        self._restart()
        done = []
        for number, (slot, parcel) in list(self.sent.items()):
            if parcel.left:
                self._post(number, slot, parcel)
            else:
                del self.sent[number]
                done.append((number, slot, parcel.answered([])))
        return done

    def _blame(self, lost: bool) -> None:
        """Whose fault it was that the process ended."""
        mark = self.mark
        if self.overdue not in (None, mark.turn):
            return  # that client did finish, just then
        if mark.parcel in self.sent and not lost:
            self.unbegun = 0
            self.sent[mark.parcel][1].blame(mark.client, self._cause())
            return
        self.unbegun += bool(self.sent)
        code = self.process.exitcode or 0
        if self.unbegun >= (KILLS if code < 0 else STARTS):
            hint = f" {GUARD}" if code == 1 else ""  # an error in Python, of which a worker's own are told otherwise
            raise ClientError(
                f"A worker ended {self.unbegun} times before it began with a client (exit code {code}).{hint}"
            )

    def _cause(self) -> str:
        """Why it ended, in words."""
        code = self.process.exitcode or 0
        if self.mark.lacked_memory:
            return OUT_OF_MEMORY
        if self.overdue is not None:
            return f"took longer than {self.pool.limit:g} s"
        if code == -signal.SIGKILL:
            return "its process was killed, as the system does when memory runs out"
        return f"its process ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"

    def _restart(self) -> None:
        """As at first; if the server of which workers are forks has died as well, once that is known."""
        for left in reversed(range(WAITS)):
            try:
                return self._start()
            except (EOFError, ConnectionError) as error:
                if not left:
                    raise ClientError(
                        "A worker ended and no other could be started: the process that starts them dies as well."
                    ) from error
                time.sleep(PAUSE)

    def stop(self) -> None:
        if self.over:
            return
        self.over = True
        self.link.close()
        self.process.join(timeout=5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        if self.process.exitcode == LOST:
            self.process.close()  # which tells it that it is over, should it live


def _told(context: Context, store: Store) -> bytes:
    """What every worker is told once. Its tensors go by value: each that is shared instead takes a file descriptor, of
    which a process can be handed few hundred."""
    try:
        return pickle.dumps((replace(context, shards=None), store.kinds, store.drawn))  # type: ignore[arg-type]
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(f"{UNKNOWN} ({error}).") from None


def _heavy(jobs: list[Job]) -> bool:
    return sum(len(tensors(job.down)) for job in jobs) > LIGHT


def serve(link: Connection, told: bytes, shards: Shards, records: Any, memory: torch.Tensor) -> None:
    """The worker's side: answer parcels until the link closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # should somebody else have started the server
    threading.Thread(target=_outlive_nobody, daemon=True).start()
    torch.set_num_threads(1)
    keep()
    refusal, mark = None, Mark(memory)
    try:
        context, kinds, drawn = pickle.loads(told)  # the parent's own words, over a pipe that nobody else has
        context.shards, store = shards, Store.attached(kinds, drawn, records)
        context.watch = mark.tell
        if isinstance(context.trainer, Compiled):
            context.trainer.uncounted = mark.uncounted
    except (AttributeError, ImportError) as error:
        refusal = "UsageError", f"{UNKNOWN} ({error}).", ""
    arenas: dict[int, Arena] = {}
    inboxes: dict[int, torch.Tensor] = {}
    broadcast: Any = None
    while True:
        try:
            number, slot, apart, jobs, new_broadcast, inbox = link.recv()
        except (EOFError, OSError):
            forking.leave()
        broadcast = broadcast if new_broadcast is None else new_broadcast
        if inbox is not None:
            inboxes[slot] = inbox
        if slot not in arenas:
            arenas[slot] = Arena()
        arena = arenas[slot]
        mark.begin(number)
        try:
            outcome: Any = refusal or _answer(context, store, jobs, apart, broadcast, inboxes[slot], arena)
        except Exception as error:
            if out_of_memory(error):
                mark.out_of_memory()
                os._exit(1)  # its successor has all of it
            outcome = (type(error).__name__, str(error), traceback.format_exc())
        grown, arena.grown = arena.grown, False
        mark.clear()
        try:
            link.send((number, slot, outcome, arena.buffer if grown else None))
        except OSError:
            forking.leave()


def _outlive_nobody() -> None:
    """End with the run's process, whatever a client is at: it may never come to ask for more."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        forking.leave()


def _answer(
    context: Context, store: Store, orders: list[Any], apart: bool, broadcast: Any, inbox: Any, arena: Arena
) -> list[Any]:
    _ = context.task, context.resident  # made once, and no client's
    jobs = []
    downs: dict[int, Any] = {}  # what was packed once arrives as one object
    for kind, client, round, visits, score, pace, packed in orders:
        if (down := downs.get(id(packed))) is None:
            down = downs[id(packed)] = unpack(packed, lambda a: view(broadcast if a[0] else inbox, a[1]))
        mine = store.record_of(client) if visits else store.template(client)
        jobs.append(Job(kind, client, round, visits, down, mine, score, pace))
    backend = here(context)
    replies = [reply for group in ([[job] for job in jobs] if apart else [jobs]) for reply in backend.do(group)]
    context.watch(jobs)
    values = [[r.up and [r.up.mean, r.up.sum, r.up.rows], r.mine, r.weights] for r in replies]
    packed = arena.fill(values)
    return [
        (r.client, r.scores, r.passes, r.seconds, r.uses, r.sound, r.up and r.up.weight, p)
        for r, p in zip(replies, packed[1], strict=True)
    ]


def _opened(outcome: Any, memory: Any) -> Reply:
    client, scores, passes, seconds, uses, sound, weight, packed = outcome
    parts, mine, weights = unpack(packed, lambda a: view(memory, a))
    up = Up(mean=parts[0], sum=parts[1], rows=parts[2], weight=weight) if parts else None
    return Reply(client, up, mine, scores, passes, seconds, weights, uses, sound=sound)


def _raised(outcome: tuple[str, str, str]) -> Exception:
    kind, text, trace = outcome
    if kind == "UsageError":
        return UsageError(text)
    if kind == "ContractError":
        return ContractError(text)
    return ClientError(f"{text}\n--- in the worker ---\n{trace}")
