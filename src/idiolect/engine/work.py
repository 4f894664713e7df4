"""What one client does, wherever it runs. It knows no backend; `Context` is all that a process needs for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from idiolect.client import Client, Settings, Trainer
from idiolect.data.federated import Federation
from idiolect.data.shift import Shifted
from idiolect.data.stored import Stored
from idiolect.engine.finite import bad_numbers
from idiolect.engine.orders import key
from idiolect.engine.steps import train
from idiolect.engine.store import Store
from idiolect.engine.wire import Layout, pack, unpack
from idiolect.errors import ClientError, ContractError, UsageError
from idiolect.method import Method, Slots, State, Up
from idiolect.optim import Schedule
from idiolect.task import NORMS, Net, Task, chunk
from idiolect.tree import Tree

SPLITS = ("train", "validation", "test")
KEPT = "own buffers"  # the engine's private slot
STACK = 16  # clients of one stack: fixed, as numbers may depend on it and must not on how many workers there are
PARCELS = 16  # into so many at least all clients' evaluations are divided, where there are so many
RESIDENT = 1 << 30  # bytes up to which all clients' samples are laid out in memory, once


@dataclass(frozen=True)
class Fetched:
    """Rows of a data set, client after client, as each client sees them and a network takes them, when they are asked
    for: `fetched[a:b]`."""

    x: Tensor | Stored
    rows: Tensor
    dtype: torch.dtype
    shift: Shifted | None
    bounds: np.ndarray  # of the clients' rows
    device: str = "cpu"

    def __getitem__(self, part: slice) -> Tensor:
        rows = self.rows[part]
        values = self.x[rows]
        if self.shift is not None:
            places = np.arange(*part.indices(len(self.rows)))
            values = self.shift(values, np.searchsorted(self.bounds, places, "right") - 1, rows.numpy())
        if values.is_floating_point():
            values = values.to(self.dtype)
        if values.dim() == 4:
            values = values.contiguous(memory_format=torch.channels_last)
        return values.to(self.device)

    def share_memory_(self) -> None:
        self.x.share_memory_()
        self.rows.share_memory_()

    def to(self, device: str) -> Fetched:
        return replace(self, device=device)


@dataclass(frozen=True)
class Shards:
    """All clients' samples, client after client, for each split: a client's part is a view, or fetched when its turn
    comes where all together are large."""

    x: dict[str, Tensor | Fetched]
    y: dict[str, Tensor]
    bounds: dict[str, np.ndarray]

    @staticmethod
    def of(federation: Federation, dtype: torch.dtype) -> Shards:
        data = federation.dataset
        parts = {split: getattr(federation, split) for split in SPLITS}
        rows = {split: torch.from_numpy(part.rows) for split, part in parts.items()}
        x: dict[str, Tensor | Fetched] = {
            split: Fetched(data.x, rows[split], dtype, federation.shift, part.bounds) for split, part in parts.items()
        }
        if sum(map(len, rows.values())) * data.x.shape[1:].numel() * dtype.itemsize <= RESIDENT:
            x = {split: own[:] for split, own in x.items()}
        y = {split: data.y[own].to(dtype) if data.loss == "squared" else data.y[own] for split, own in rows.items()}
        return Shards(x, y, {split: part.bounds for split, part in parts.items()})

    @property
    def clients(self) -> int:
        return len(self.bounds["train"]) - 1

    def share(self) -> Shards:
        """Move the samples to shared memory, once."""
        for t in (*self.x.values(), *self.y.values()):
            t.share_memory_()
        return self

    def to(self, device: str) -> Shards:
        x: dict[str, Tensor | Fetched] = {k: v.to(device) for k, v in self.x.items()}
        return Shards(x, {k: v.to(device) for k, v in self.y.items()}, self.bounds)

    def part(self, split: str, client: int) -> tuple[Tensor, Tensor]:
        return self.samples(split, client), self.targets(split, client)

    def samples(self, split: str, client: int) -> Tensor:
        a, b = self.bounds[split][client : client + 2]
        return self.x[split][a:b]

    def targets(self, split: str, client: int) -> Tensor:
        a, b = self.bounds[split][client : client + 2]
        return self.y[split][a:b]

    def size(self, split: str, client: int) -> int:
        a, b = self.bounds[split][client : client + 2]
        return int(b - a)


@dataclass(frozen=True)
class Score:
    """One evaluation of one client on one split."""

    split: str
    correct: int
    total: int
    loss: float  # summed over the samples


@dataclass(frozen=True)
class Job:
    """One client's turn: to introduce itself ("hello"), to say what it is asked before it trains ("ask"), to train
    ("local"), to be evaluated as received ("received"), or to hand over the weights of that evaluation ("personal")."""

    kind: str
    client: int
    round: int
    visits: int
    down: Slots
    mine: Slots
    score: bool = False  # a training job: evaluate the trained model as well
    pace: float = 1.0  # the part of its steps that the client does
    parcel: int = 0  # an evaluation: which clients' samples may share a batch with this one's


@dataclass(frozen=True)
class Reply:
    client: int
    up: Up | None
    mine: Slots | None
    scores: tuple[Score, ...] = ()
    passes: float = 0.0
    seconds: float = 0.0  # of training
    weights: Tree | None = None
    uses: frozenset[str] | None = None  # the received slots that an evaluation rests on; None: on the round as well
    failed: str = ""  # why there is nothing else in it
    sound: bool = False  # its numbers were looked at where it was made, and there is no NaN or inf among them


def seen_to(reply: Reply) -> Reply:
    """With the word that its numbers are sound, where they are: not one process has to look at all clients' replies."""
    if reply.up is None or bad_numbers(reply.up, reply.mine) is not None:
        return reply
    return replace(reply, sound=True)


class Slotted(Mapping[str, Any]):
    """What a client received, which remembers the slots that it was asked for."""

    def __init__(self, slots: Slots) -> None:
        self._slots, self.asked = slots, set[str]()

    def __getitem__(self, slot: str) -> Any:
        self.asked.add(slot)
        return self._slots[slot]

    def __iter__(self) -> Iterator[str]:
        self.asked.update(self._slots)
        return iter(self._slots)

    def __len__(self) -> int:
        self.asked.update(self._slots)
        return len(self._slots)


def unwatched(jobs: Sequence[Job]) -> None:
    pass


@dataclass
class Context:
    """A run as one client's process needs it."""

    view: ClassVar[type[Client]] = Client
    method: Method
    module: nn.Module
    shape: tuple[int, ...]
    classes: int
    loss: str
    dtype: torch.dtype
    shards: Shards
    settings: Settings
    lr: float
    schedule: Schedule
    rounds: int
    own_buffers: bool = False  # each client keeps its own normalisation buffers of what it receives
    device: str = "cpu"
    network: str | None = None  # the name by which `nets.build` made the module
    options: Mapping[str, Any] = field(default_factory=dict)
    num_clients: int | None = None  # that may take part; None: all
    liars: frozenset[int] = frozenset()  # clients that train on labels counted from the other end
    trainer: Trainer = field(default=train)
    autocast: torch.dtype | None = None  # what networks compute in, where not in `dtype`
    steps: str = "loop"  # how clients take their steps (engine/stepping.py)
    watch: Callable[[Sequence[Job]], None] = unwatched  # is told which jobs are under way, one or several together

    @cached_property
    def net(self) -> Net:
        return Net(
            self.module, self.shape, self.classes, self.settings.seed, self.dtype, self.network, self.options,
            self.shards.clients if self.num_clients is None else self.num_clients,
        )  # fmt: skip

    @cached_property
    def task(self) -> Task:
        _ = self.state  # `init` may add networks
        return Task(self.net, self.loss, self.device, self.autocast)

    @cached_property
    def state(self) -> State:
        """The homes' templates. Buffers that clients keep are one more private slot, which no method sees."""
        state = self.method.init(self.net)
        kept = self.net.weights.pick(k for k in self.net.weights if k in self.net.buffers)
        if self.own_buffers and kept:
            kinds = [{**kind, KEPT: kept} for kind in _kinds(state)]
            return replace(state, client=kinds if len(kinds) > 1 else kinds[0])
        return state

    def store(self, clients: int, file: Path | None = None) -> Store:
        """The store of all clients' private states; each client draws its kind where there are several."""
        kinds = _kinds(self.state)
        drawn = np.zeros(clients, np.int16)
        if len(kinds) > 1:
            drawn[:] = [key(self.settings.seed, "kind", i) % len(kinds) for i in range(clients)]
        return Store(kinds, drawn, file)

    @property
    def record(self) -> int:
        """Bytes that the store keeps of a client."""
        return max(Layout(kind).size for kind in _kinds(self.state))

    def rate(self, round: int) -> float:
        return self.schedule(self.lr, round, self.rounds)

    def client(self, job: Job, kept: Tree | None = None) -> Client:
        samples, y = self.resident.samples, self.resident.targets("train", job.client)
        if job.client in self.liars:
            y = self.classes - 1 - y
        me = self.view(
            self.task, lambda: samples("train", job.client), y, self.settings, self.trainer,
            id=job.client, round=job.round, visits=job.visits, lr=self.rate(job.round),
        )  # fmt: skip
        me.course.buffers, me.pace = kept, job.pace
        return me

    def server(self, round: int, x: Tensor, y: Tensor) -> Client:
        """What the server trains with, where a method gives it samples: on the CPU, as all that the server does."""
        task = self.task if self.device == "cpu" else Task(self.net, self.loss, autocast=self.autocast)
        settings = replace(self.settings, augment=None)
        return Client(task, x, y, settings, self.trainer, id=-1, round=round, visits=round, lr=self.rate(round))

    @cached_property
    def resident(self) -> Shards:
        """The samples where clients train."""
        return self.shards if self.device == "cpu" else self.shards.to(self.device)

    def do(self, job: Job) -> Reply:
        """Carry out a job; what goes in and what comes out is on the CPU."""
        if self.device == "cpu":
            return seen_to(self._do(job))
        with exact_convolutions():
            reply = self._do(replace(job, down=moved(job.down, self.device), mine=moved(job.mine, self.device)))
        up = reply.up
        if up is not None:
            mean, sum_, rows = moved([up.mean, up.sum, up.rows], "cpu")
            up = Up(mean, sum_, rows, up.weight)
        return seen_to(replace(reply, up=up, mine=moved(reply.mine, "cpu"), weights=moved(reply.weights, "cpu")))

    def _do(self, job: Job) -> Reply:
        with self._blamed(job):
            if job.kind == "hello":
                me = self.client(job)
                return Reply(job.client, Up(rows=self.method.hello(me, job.down, job.mine)), None, passes=me.passes)
            if job.kind == "ask":
                job, kept = self.open(job)
                me = self.client(job, kept)
                return Reply(job.client, self.method.ask(me, job.down, job.mine), None, passes=me.passes)
            if job.kind == "personal":
                return Reply(job.client, None, None, weights=self.personal(job))
            return self.local(job) if job.kind == "local" else next(self._received([job]))

    @contextmanager
    def _blamed(self, job: Job) -> Iterator[None]:
        """What goes wrong in a method's code is told with where it was."""
        self.watch([job])
        try:
            yield
        except (UsageError, ContractError, ClientError):
            raise
        except Exception as error:
            where = f"{self.method.name}, client {job.client}, round {job.round} ({job.kind})"
            raise ClientError(f"{where}: {type(error).__name__}: {error}") from error

    def local(self, job: Job) -> Reply:
        """Local training; then, where asked, the evaluation of the trained model: `personal` with the client's own
        reply in place of what it received."""
        started = time.perf_counter()
        job, kept = self.open(job)
        me = self.client(job, kept)
        up, mine = self.method.local(me, job.down, job.mine)
        seconds, passes = time.perf_counter() - started, me.passes
        scores: tuple[Score, ...] = ()
        if job.score:
            self._check(job, up, mine)  # else what is wrong would show as a failure to predict
            w = self.method.personal(self.client(job), {**job.down, **up.rows, **up.mean}, mine)
            scores = self.scores([job.client], w)[0]
        if kept is not None:
            mine = {**mine, KEPT: me.buffers}
        return Reply(job.client, up, mine, scores, passes, seconds)

    def _check(self, job: Job, up: Up, mine: Slots) -> None:
        name, where = f"{self.method.name}.local", f"client {job.client}, round {job.round}"
        checked(name, "mine", mine, job.mine, where)
        for slot in up.mean.keys() & self.state.server.keys():
            match(name, f'up.mean["{slot}"]', up.mean[slot], self.state.server[slot], where)

    def open(self, job: Job) -> tuple[Job, Tree | None]:
        """The job as the method sees it: with the client's own buffers in what it received, once it has some."""
        if KEPT not in job.mine:
            return job, None
        mine = {k: v for k, v in job.mine.items() if k != KEPT}
        kept, down = job.mine[KEPT], job.down
        if job.visits:
            down = {k: v | kept.pick(kept.keys() & v.keys()) if isinstance(v, Tree) else v for k, v in down.items()}
        received = next((v for v in down.values() if isinstance(v, Tree) and kept.keys() <= v.keys()), None)
        return replace(job, down=down, mine=mine), received.pick(kept) if received is not None else kept

    # evaluation

    @property
    def together(self) -> int:
        """Clients whose evaluation is one parcel: as many for any number of workers, as a batch's numbers may depend on
        what is in it."""
        if self.steps == "stacked":
            return STACK
        return min(max(self.shards.clients // PARCELS, 1), 32)

    @cached_property
    def joins(self) -> bool:
        """Whether samples of several clients may share a batch: each one's prediction is its own, as far as known."""
        own_batch = any(isinstance(m, NORMS) and m.running_mean is None for m in self.module.modules())
        return self.network is not None and not own_batch and self.device == "cpu"

    def received(self, jobs: Iterable[Job]) -> Iterator[Reply]:
        """The evaluations of one parcel, as received."""
        if not self.joins:
            yield from map(self.do, jobs)
            return
        yield from self._received(jobs)

    def _received(self, jobs: Iterable[Job]) -> Iterator[Reply]:
        """Clients in a row with the very same weights are scored in one pass."""
        same: list[tuple[Job, Tree, frozenset[str] | None]] = []
        for job in jobs:
            with self._blamed(job):
                w, uses = self._personal(job)
            if same and not _identical(w, same[0][1]):
                yield from self._scored(same)
                same = []
            same.append((job, w, uses))
        yield from self._scored(same)

    def _scored(self, same: list[tuple[Job, Tree, frozenset[str] | None]]) -> Iterator[Reply]:
        with self._blamed(same[0][0]):
            self.watch([job for job, _, _ in same])
            scores = self.scores([job.client for job, _, _ in same], same[0][1])
        for (job, _, uses), found in zip(same, scores, strict=True):
            yield Reply(job.client, None, None, found, uses=uses)

    def personal(self, job: Job) -> Tree:
        """The weights that the client would predict with, after download and before local training."""
        return self._personal(job)[0]

    def _personal(self, job: Job) -> tuple[Tree, frozenset[str] | None]:
        """And the received slots that they rest on, besides the client's own state and data; None: on more."""
        job, kept = self.open(job)
        me, down = self.client(job, kept), Slotted(job.down)
        w = self.method.personal(me, down, job.mine)
        return w, None if me.course.dated else frozenset(down.asked)

    def scores(self, clients: list[int], w: Tree) -> list[tuple[Score, ...]]:
        """The scores of clients that predict with these weights."""
        live = self.task.lay(w, ())
        found: list[list[Score]] = [[] for _ in clients]
        for split in ("validation", "test"):
            parts = [self.resident.part(split, i) for i in clients]
            for k, score in enumerate(self._split_scores(split, live, parts)):
                if score.total:
                    found[k].append(score)
        return [tuple(f) for f in found]

    def _split_scores(self, split: str, w: Tree, parts: list[tuple[Tensor, Tensor]]) -> list[Score]:
        correct, loss = [0] * len(parts), [0.0] * len(parts)
        with torch.no_grad():
            for pieces in _chunks([len(y) for _, y in parts], chunk(parts[0][0])):
                x, y = (_joined([parts[k][c][a:b] for k, a, b in pieces]) for c in (0, 1))
                logits = self.method.logits(self.task, w, x)
                losses = self.task.losses(logits, y).double()
                right = logits.argmax(1) == y if self.loss != "squared" else None
                at = 0
                for k, a, b in pieces:
                    here = slice(at, at := at + b - a)
                    loss[k] += float(losses[here].sum())
                    if right is not None:
                        correct[k] += int(right[here].sum())
        return [Score(split, c, len(y), v) for c, v, (_, y) in zip(correct, loss, parts, strict=True)]


def _identical(a: Tree, b: Tree) -> bool:
    """The same tensors in memory, under the same names."""
    return a.keys() == b.keys() and all(v is b[k] or _place(v) == _place(b[k]) for k, v in a.items())


def _place(t: Tensor) -> tuple[Any, ...]:
    return t.data_ptr(), t.dtype, t.shape, t.stride()


def _chunks(sizes: list[int], limit: int) -> Iterator[list[tuple[int, int, int]]]:
    """Rows (whose, from, to) in chunks of at most `limit`. Each part is cut as it would be alone."""
    chunk: list[tuple[int, int, int]] = []
    have = 0
    for k, size in enumerate(sizes):
        for a in range(0, size, limit):
            b = min(a + limit, size)
            if chunk and have + b - a > limit:
                yield chunk
                chunk, have = [], 0
            chunk.append((k, a, b))
            have += b - a
    if chunk:
        yield chunk


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def moved(value: Any, device: str) -> Any:
    """A nested value on another device. A tensor that stands in several places stays one."""
    known: dict[int, Tensor] = {}

    def move(t: Tensor) -> Tensor:
        return known.setdefault(id(t), t.to(device))

    return unpack(pack(value, move), lambda t: t)


@contextmanager
def exact_convolutions() -> Iterator[None]:
    """On a GPU: float32 as it is, by algorithms that give the same bits again."""
    flags = torch.backends.cudnn
    with flags.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        yield


def _kinds(state: State) -> list[Slots]:
    return [state.client] if isinstance(state.client, Mapping) else list(state.client)


def checked(name: str, home: str, slots: Slots, declared: Slots, where: str) -> None:
    """A home's slots have the names, shapes and dtypes that `init` declared for it."""
    if slots.keys() != declared.keys():
        raise ContractError(
            f"{name} returned {home} with slots {_list(slots)}, init declared {_list(declared)} ({where})."
        )
    for slot, value in slots.items():
        match(name, f'{home}["{slot}"]', value, declared[slot], where)


def match(name: str, entry: str, value: Any, declared: Any, where: str) -> None:
    if isinstance(declared, Tree) != isinstance(value, Tree):
        raise ContractError(
            f"{name} returned {entry} as {type(value).__name__}, init declared {type(declared).__name__} ({where})."
        )
    if isinstance(declared, Tree) and not declared:
        return  # an open slot
    if not isinstance(declared, Tree):
        value, declared = Tree({"": value}), Tree({"": declared})
    if value.keys() != declared.keys():
        extra, lacking = [k for k in value if k not in declared], [k for k in declared if k not in value]
        raise ContractError(
            f"{name} returned {entry} with {len(value)} tensors, init declared {len(declared)}"
            + (f"; extra: {', '.join(extra)}" if extra else "")
            + (f"; lacking: {', '.join(lacking)}" if lacking else "")
            + f" ({where}). Send exactly what init declared, e.g. w.pick(...)."
        )
    for k, v in value.items():
        d = declared[k]
        if v.shape != d.shape or v.dtype != d.dtype:
            raise ContractError(
                f"{name} returned {entry} entry '{k}' as {v.dtype} {list(v.shape)}, init declared {d.dtype} "
                f"{list(d.shape)} ({where})."
            )


def _list(slots: Slots) -> str:
    return ", ".join(slots) or "none"
