"""A rehearsal: a method on four tiny clients for a few rounds, and what can be seen of the method in them.

Nothing here is known of any method: `facts` runs it and looks at what was sent, kept and computed, and at what changes
a client's prediction. `refuse` is for a run that could not be what it says it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from idiolect.client import Client, Phase
from idiolect.data import Dataset, Federation
from idiolect.data.federated import split_hash
from idiolect.data.ragged import Ragged
from idiolect.engine.introductions import hello
from idiolect.engine.loop import loop, one_round
from idiolect.engine.progress import Progress, Report
from idiolect.engine.serial import Serial
from idiolect.engine.steps import train
from idiolect.engine.turns import turns
from idiolect.engine.wire import nbytes, tensors
from idiolect.engine.work import Context, Job, Reply
from idiolect.errors import UsageError, individual
from idiolect.experiment import Run
from idiolect.method import Method, Rows, Slots, Up
from idiolect.running import one_thread
from idiolect.task import Task
from idiolect.tree import Tree

CLIENTS, SAMPLES, TRAINED, ROUNDS = 4, 25, 20, 100
PRESENT = {0: [0, 1], ROUNDS - 2: [1, 2], ROUNDS - 1: [0, 1]}
VETERAN, STRANGER = 1, 3  # who took part whenever anybody did, and who never did
HOMES = ("mean", "sum", "rows")


@dataclass(frozen=True)
class Passes:
    """Passes over a client's own training samples, and samples trained on that are not its own."""

    gradient: float = 0.0
    without_gradient: float = 0.0
    other_samples: int = 0


@dataclass(frozen=True)
class Facts:
    """What was seen. Bytes and passes are those of a client in its third round, of one local epoch.

    rows_of: the slots that reach the server client by client, by the message: hello, ask or local.
    through: what a prediction depends on beside what all receive. None: all clients predict with the same weights.
    equal_networks: a weight of the body, told by its shape, is sent or received.
    served: what a client that never took part predicts with is not what it would have been before the run.
    partial: it runs with clients away, and all numbers are finite.
    """

    keeps: Mapping[str, int]
    down: Mapping[str, int]
    mean: Mapping[str, int]
    sum: Mapping[str, int]
    rows: Mapping[str, int]
    rows_of: Mapping[str, tuple[str, ...]]
    passes: Passes
    predicting: Passes
    through: tuple[str, ...]
    equal_networks: bool
    served: bool
    partial: bool


class Rehearsed(Run):
    """A run in which a few take part in the first round and in the last two, and nobody in between: what waits for a
    warm-up has begun. With `ratio` 1 all clients do."""

    def participants(self, round: int) -> list[int]:
        few = PRESENT.get(round, [])
        return list(range(CLIENTS)) if few and self.ratio == 1 else few


class Counted(Client):
    """A client that counts what it does with samples besides training on its own."""

    foreign = False  # a view of samples that are not its own

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._besides = {"swept": 0.0, "other": 0.0}  # shared with parts of this client

    @property
    def spent(self) -> Passes:
        other = self._besides["other"]
        own = (self.course.seen - other) / self.course.n
        return Passes(round(own, 3), round(self._besides["swept"] / self.course.n, 3), int(other))

    def over(self, x: Tensor, y: Tensor, batch_size: int | None = None) -> Counted:
        part: Any = super().over(x, y, batch_size)
        part.foreign = True
        return part

    def _part(self, rows: Tensor) -> Counted:
        part: Any = super()._part(rows)
        part.foreign = self.foreign
        return part

    def train(self, w: Tree, **how: Any) -> Tree:
        before = self.course.seen
        w = super().train(w, **how)
        self._besides["other"] += self.foreign * (self.course.seen - before)
        return w

    def sweep(self, *args: Any, **kwargs: Any) -> Any:
        self._swept()
        return super().sweep(*args, **kwargs)

    def logits(self, *args: Any, **kwargs: Any) -> Tensor:
        self._swept()
        return super().logits(*args, **kwargs)

    def features(self, w: Tree) -> Tensor:
        known = self._known
        z = super().features(w)
        if self._known is not known:
            self._swept()
        return z

    def _swept(self) -> None:
        self._besides["swept"] += (not self.foreign) * self.n


@dataclass
class Observed(Context):
    """A context whose clients count. `made`: those of the job, the one that does it first."""

    view: ClassVar[type[Client]] = Counted
    made: list[Counted] = field(default_factory=list)

    def client(self, job: Job, kept: Tree | None = None) -> Client:
        me = super().client(job, kept)
        assert isinstance(me, Counted)
        self.made.append(me)
        return me

    def spent(self) -> Passes:
        """What the job's client did since it was last asked."""
        done = self.made[0].spent
        self.made.clear()
        return done


@dataclass(frozen=True)
class Turn:
    job: Job
    reply: Reply
    spent: Passes


class Watched(Serial):
    """The serial backend, which remembers every client's last turn of each kind."""

    def __init__(self, context: Observed) -> None:
        super().__init__(context)
        self.last: dict[tuple[str, int], Turn] = {}

    def do(self, jobs: Iterable[Job]) -> Iterator[Reply]:
        assert isinstance(self.context, Observed)
        for job in jobs:
            self.context.made.clear()
            reply = self.context.do(job)
            self.last[job.kind, job.client] = Turn(job, reply, self.context.spent())
            yield reply


def first_step(task: Task, phase: Phase) -> Tree:
    """A step of each phase is enough to see what it does."""
    return train(task, replace(phase, indices=phase.indices[:1]))


def stage(method: Method, ratio: float = 0.5) -> tuple[Rehearsed, Observed]:
    """The run and its context. They are made with FedAvg: only the rehearsal itself asks anything of the method."""
    federation = _federation()
    run = Rehearsed(
        method="fedavg", data=federation.dataset, split=federation, clients=CLIENTS, rounds=ROUNDS, ratio=ratio,
        evaluate_every=ROUNDS, backend="serial", on_bad_reply="accept",
    )  # fmt: skip
    same = {f.name: getattr(run.context(), f.name) for f in fields(Context)}
    return run, Observed(**{**same, "method": method, "trainer": first_step})


@cache
def _federation() -> Federation:
    """Clients with two classes of their own, and one that all have; samples are shaped like the digits."""
    x = torch.randn(CLIENTS * SAMPLES, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([8 if k % 10 == 9 else 2 * i + k % 2 for i in range(CLIENTS) for k in range(SAMPLES)])
    rows = np.arange(len(y)).reshape(CLIENTS, SAMPLES)
    train, validation, test = map(Ragged.of, (rows[:, :TRAINED], rows[:, :0], rows[:, TRAINED:]))
    data = Dataset("tiny", x, y, classes=10, network="convnet3")
    return Federation(data, train, validation, test, split_hash(train, validation, test), "tiny")


# what is seen


@cache
def facts(method: Method) -> Facts:
    """A rehearsal with clients away; where the method refuses that, with all of them."""
    try:
        return _facts(method, 0.5)
    except UsageError:
        return replace(_facts(method, 1.0), partial=False)


def _facts(method: Method, ratio: float) -> Facts:
    run, context = stage(method, ratio)
    method.check(run)
    state, backend = context.state, Watched(context)
    progress = Progress(state.server, Rows(state.rows), context.store(CLIENTS))
    reports: list[Report] = []
    begun: list[Rows] = []  # the rows once every client has introduced itself

    def watch(report: Report) -> None:
        reports.append(report)
        begun.append(progress.rows)

    with one_thread():
        loop(run, context, backend, progress, watch)
        said = [turn for kind in ("ask", "local") if (turn := backend.last.get((kind, VETERAN)))]
        ups = [turn.reply.up for turn in said if turn.reply.up is not None]
        first = [turn.reply.up for (kind, i), turn in backend.last.items() if (kind, i) == ("hello", VETERAN)]
        mine = said[-1].reply.mine
        assert mine is not None
        through, predicting = _through(context, progress)
        sent = {home: {k: n for up in ups for k, n in bytes_of(getattr(up, home)).items()} for home in HOMES}
        return Facts(
            keeps=bytes_of(mine), down={k: n for turn in said for k, n in bytes_of(turn.job.down).items()}, **sent,
            rows_of=_rows_of(backend), passes=_total([turn.spent for turn in said]), predicting=predicting,
            through=through, equal_networks=_body_travels(context, [turn.job.down for turn in said], [*ups, *first]),
            served=_served(context, progress, Progress(state.server, begun[0], progress.store, progress.round)),
            partial=_finite(context, progress, reports[-1]),
        )  # fmt: skip


def bytes_of(slots: Mapping[str, Any]) -> dict[str, int]:
    return {slot: nbytes(value) for slot, value in slots.items()}


def _total(spent: list[Passes]) -> Passes:
    return Passes(*(sum(getattr(one, f.name) for one in spent) for f in fields(Passes)))


def _rows_of(backend: Watched) -> dict[str, tuple[str, ...]]:
    found = {kind: turn.reply.up.rows for (kind, _), turn in backend.last.items() if turn.reply.up is not None}
    return {kind: tuple(found[kind]) for kind in ("hello", "ask", "local") if found.get(kind)}


def _personal(context: Observed, progress: Progress, client: int) -> Job:
    return next(turns(context, progress, "personal", [client]))


def _through(context: Observed, progress: Progress) -> tuple[tuple[str, ...], Passes]:
    """What changes a client's prediction when it is put back to its beginning, or made another's; and its passes."""
    job, method = _personal(context, progress, VETERAN), context.method
    context.made.clear()
    w = context.personal(job)
    spent = context.spent()
    begun = method.down(method.published(progress.server), progress.rows.template)
    other = {
        "private state": replace(job, mine=progress.store.template(VETERAN)),
        "row at the server": replace(job, down=begun),
        "own data": replace(job, client=STRANGER),
    }
    through = [name for name, changed in other.items() if not context.personal(changed).equals(w)]
    if spent.without_gradient and "own data" not in through:
        through.append("own data")  # it looks at its data, and here came to the same
    if spent.gradient:
        through = [name for name in through if name != "own data"] + ["training"]
    return tuple(through), spent


def _served(context: Observed, progress: Progress, begun: Progress) -> bool:
    """Whether training moved what a new client predicts with, be its data those of any of the clients."""
    now, before = (_personal(context, p, STRANGER) for p in (progress, begun))
    as_one = lambda job, i: context.personal(replace(job, client=i))
    return any(not as_one(now, i).equals(as_one(before, i)) for i in range(CLIENTS))


def _body_travels(context: Observed, downs: list[Slots], ups: list[Up | None]) -> bool:
    net = context.net
    shapes = {v.shape for k, v in net.body.items() if k not in net.buffers and v.dim() > 1}
    return any(t.shape in shapes for t in tensors([*downs, *([up.mean, up.sum, up.rows] for up in ups if up)]))


def _finite(context: Observed, progress: Progress, last: Report) -> bool:
    homes = [progress.server, *([progress.store.read(i), progress.rows[i]] for i in range(CLIENTS))]
    weights = [context.personal(_personal(context, progress, i)) for i in range(CLIENTS)]
    losses = torch.tensor([score.loss for scores in last.received.values() for score in scores])
    return all(bool(t.isfinite().all()) for t in [*tensors([*homes, *weights]), losses])


# what is refused


def refuse(method: Method, secure: bool, replaces_mean: str = "") -> None:
    """Refuse (UsageError) what a method refuses in its first round, as a wrapper does that finds nothing to wrap; of a
    secure run, a method that sends individuals; of one that puts something in the place of the mean (the field that
    says so), a method whose weights are sent otherwise.

    One that does not fit the rehearsal's network may fit the run's: of it nothing is said here."""
    try:
        _ = stage(method)[1].state
    except UsageError:
        return
    try:
        first = _first_round(method)
        rows_of = facts(method).rows_of if secure else {}
    except UsageError:
        raise
    except Exception:  # a mistake in the method, which the run shows with its place
        return
    for slots in rows_of.values():
        raise individual(method.name, slots)
    if replaces_mean and first.sends and not first.averages:
        raise UsageError(
            f"{replaces_mean} concerns what is averaged, and {method.name} sends its weights otherwise; leave it out, "
            "or take another method ('idiolect methods --json' tells what each sends)."
        )


@dataclass(frozen=True)
class FirstRound:
    """Whether a client's reply has anything in it, and whether weights are averaged: more than running statistics."""

    sends: bool
    averages: bool


@cache
def _first_round(method: Method) -> FirstRound:
    run, context = stage(method)
    backend = Watched(context)
    progress = Progress(context.state.server, Rows(context.state.rows), context.store(CLIENTS))
    with one_thread():
        hello(run, context, backend, progress)
        one_round(run, context, backend, progress)
    up = backend.last["local", VETERAN].reply.up
    assert up is not None
    averaged = [k for value in up.mean.values() if isinstance(value, Tree) for k in value]
    return FirstRound(bool(tensors([up.mean, up.sum, up.rows])), any(k not in context.net.buffers for k in averaged))
