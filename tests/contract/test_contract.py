"""The contract: one suite with a line per method. A method is in it by existing; a wrapper is there around FedAvg."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from inspect import isfunction
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from harness import SIZES, experiment, federation, run
from idiolect import Result, Run, catalogue, running
from idiolect.client import Client
from idiolect.data import Federation
from idiolect.data.federated import split_hash
from idiolect.engine import orders
from idiolect.engine.loop import loop
from idiolect.engine.progress import Progress
from idiolect.engine.serial import Serial
from idiolect.engine.wire import nbytes, tensors
from idiolect.errors import UsageError
from idiolect.method import Facts, Method, Rows, Up, Wrapper, Written
from idiolect.running import one_thread
from idiolect.tree import Tree

NAMES = [*catalogue.names(), "fedrep+finetune"]
QUICK = {
    **{"head_epochs": 2, "first_epochs": 2, "epochs": 2, "warmup": 1, "iterations": 3, "ipc": 2, "server_epochs": 2},
    "kappa": 1.0,  # FedDBE's, for a rate as large as ours
}  # little to do, and something in every round
CLIENTS = len(SIZES)

every_method = pytest.mark.parametrize("name", NAMES)


def method(name: str, **settings: object) -> Method:
    known = [k.rsplit(".", 1)[-1] for k in catalogue.settings(catalogue.build(name))]
    return catalogue.build(name, {k: v for k, v in (QUICK | settings).items() if known.count(k) == 1})


def prepared(name: str | Method, **fields: object) -> Run:
    """With momentum, unless the method refuses it: a mlp of two blocks, 5 of 8 unequal clients, 4 rounds, float64."""
    chosen = method(name) if isinstance(name, str) else name
    fields = {"network_options": {"hidden": (6, 5)}, "network": "mlp"} | fields
    try:
        return experiment(chosen, **fields)
    except UsageError as refusal:
        if "momentum" not in str(refusal):
            raise
        return experiment(chosen, momentum=0.0, **fields)


# what a run leaves, as one table of tensors


def table(progress: Progress, clients: int = CLIENTS) -> dict[str, Tensor]:
    homes = {"server": progress.server}
    for i in range(clients):
        homes |= {f"client {i}": progress.store.read(i), f"row {i}": progress.rows[i]}
    found = {"visits": torch.from_numpy(progress.store.visits)}
    for home, slots in homes.items():
        found |= entries(home, slots)
    return found


def entries(home: str, slots) -> dict[str, Tensor]:
    trees = {slot: v if isinstance(v, Tree) else Tree({"": v}) for slot, v in slots.items()}
    return {f"{home}: {slot} {k}": v for slot, tree in trees.items() for k, v in tree.items()}


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    assert one.keys() == two.keys()
    unequal = [k for k, v in one.items() if v.dtype != two[k].dtype or not torch.equal(v, two[k])]
    assert not unequal, f"other bits: {', '.join(unequal[:6])}"
    return True


def close(one: dict[str, Tensor], two: dict[str, Tensor], tolerance: float) -> bool:
    assert one.keys() == two.keys()
    apart = {k: float((v.double() - two[k].double()).abs().max()) for k, v in one.items() if v.numel()}
    unequal = {k: d for k, d in apart.items() if not d <= tolerance}
    assert not unequal, f"too far apart: {dict(list(unequal.items())[:6])}"
    return True


def measured(result) -> list[dict]:
    """All metrics but the seconds."""
    return [{k: v for k, v in row.items() if "seconds" not in k} for row in result.rounds] + result.clients


def finite(result) -> bool:
    tensors = table(result.progress, result.run.clients)
    tensors |= {f"personal {i} {k}": v for i in range(result.run.clients) for k, v in result.personal(i).items()}
    bad = [k for k, v in tensors.items() if not v.double().isfinite().all()]
    assert not bad, f"not finite: {', '.join(bad[:6])}"
    numbers = [v for row in measured(result) for v in row.values() if isinstance(v, float)]
    assert all(math.isfinite(v) for v in numbers)
    return True


# backends


@every_method
def test_workers_give_the_bits_of_serial_however_many_they_are(name):
    serial = run(prepared(name))
    for count in (1, 2, 4):
        found = run(prepared(name, backend="workers", workers=count))
        assert same(table(serial.progress), table(found.progress))
        assert all(serial.personal(i).equals(found.personal(i)) for i in range(CLIENTS))
        assert measured(serial) == measured(found)


@every_method
def test_workers_give_the_bits_of_serial_for_a_convolutional_network_with_batchnorm(name):
    fields = {
        "images": True,
        "network": "convnet3",
        "network_options": {},
        "rounds": 2,
        "epochs": 1,
        "dtype": "float32",
    }
    serial, found = run(prepared(name, **fields)), run(prepared(name, backend="workers", workers=2, **fields))
    assert same(table(serial.progress), table(found.progress))
    assert measured(serial) == measured(found)
    assert finite(found)


@every_method
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-10)])
def test_stacked_clients_give_the_numbers_of_serial(name, dtype, tolerance):
    serial, stacked = (run(prepared(name, dtype=dtype, backend=b)) for b in ("serial", "stacked"))
    assert close(table(serial.progress), table(stacked.progress), tolerance)
    for i in range(CLIENTS):
        assert close(dict(serial.personal(i)), dict(stacked.personal(i)), tolerance)
    assert [r["gradient_passes"] for r in serial.rounds] == [r["gradient_passes"] for r in stacked.rounds]
    assert [r["bytes_up"] for r in serial.rounds] == [r["bytes_up"] for r in stacked.rounds]


# going on


class CutOffError(Exception):
    """What ends a run in these tests."""


@every_method
def test_a_run_that_is_cut_off_twice_ends_with_the_bits_of_one_that_is_not(name, tmp_path):
    whole = run(prepared(name, drop=0.2))
    for round in (2, 4):

        def cut(report, round=round):
            if report.round == round:
                raise CutOffError

        with pytest.raises(CutOffError):
            running.run(prepared(name, drop=0.2, checkpoint_every=1), tmp_path / "run", cut, resume=round > 2)
    found = running.run(prepared(name, drop=0.2, checkpoint_every=1), tmp_path / "run", resume=True)
    assert same(table(whole.progress), table(found.progress))
    assert all(whole.personal(i).equals(found.personal(i)) for i in range(CLIENTS))
    assert measured(whole) == measured(found)
    assert unchanged(snapshot(whole.notes), snapshot(found.notes))
    assert not (tmp_path / "run" / "checkpoint").exists()


# purity

FUNCTIONS = [
    n
    for n, f in vars(Method).items()
    if isfunction(f) and not n.startswith("_") and n not in ("init", "check", "fields")
]


def snapshot(value: object) -> object:
    """A copy of every tensor in an argument, with the names around it."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Tree):
        return ("Tree", tuple(value), [v.detach().clone() for v in value.values()])
    if isinstance(value, Rows | Up):
        return [snapshot(getattr(value, f.name)) for f in dataclasses.fields(value)]
    if isinstance(value, dict):
        return (tuple(value), [snapshot(v) for v in value.values()])
    if isinstance(value, list | tuple):
        return [snapshot(v) for v in value]
    return None  # me, the task, plain numbers


def unchanged(before: object, after: object) -> bool:
    if isinstance(before, Tensor):
        return isinstance(after, Tensor) and torch.equal(before, after)
    if isinstance(before, list | tuple) and isinstance(after, list | tuple):
        return len(before) == len(after) and all(unchanged(b, a) for b, a in zip(before, after, strict=True))
    return before == after


def guarded(inner: Method) -> Method:
    """The same method, all of whose functions are held to what they were given."""
    kind = type(inner)

    def guard(function: str):
        original = getattr(kind, function)

        def held(self, *args):
            before = snapshot(args)
            result = original(self, *args)
            assert unchanged(before, snapshot(args)), f"{kind.__name__}.{function} changed what it was given"
            calls.add(function)
            return result

        return held

    calls: set[str] = set()
    own = {n: guard(n) for n in FUNCTIONS if getattr(kind, n) is not getattr(Method, n)}
    own |= {"__module__": kind.__module__, "__repr__": lambda self: "guarded", "calls": calls}
    if isinstance(inner, Wrapper):  # what a wrapper overrides is all that it is, but hello is its inner's
        own.pop("hello", None)
    fields = {f.name: getattr(inner, f.name) for f in dataclasses.fields(inner)}
    return type(kind.__name__, (kind,), own)(**fields)


@every_method
def test_nothing_that_a_method_is_given_is_changed(name):
    watched = guarded(method(name))
    found = run(prepared(watched))
    assert same(table(found.progress), table(run(prepared(name)).progress))
    assert "local" in type(watched).calls


@every_method
def test_a_method_is_a_frozen_dataclass_of_plain_numbers_and_words(name):
    made = method(name)
    assert type(made).__dataclass_params__.frozen
    for field in dataclasses.fields(made):
        assert isinstance(getattr(made, field.name), int | float | str | bool | Method | None), field.name
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.anything = 1
    assert not [k for k in vars(made) if k not in {f.name for f in dataclasses.fields(made)}]


@every_method
def test_two_runs_are_the_same_bits_and_another_seed_is_not(name):
    one, two, other = run(prepared(name)), run(prepared(name)), run(prepared(name, seed=4))
    assert same(table(one.progress), table(two.progress))
    assert measured(one) == measured(two)
    with pytest.raises(AssertionError):
        same(dict(one.personal(0)), dict(other.personal(0)))


# states


class Stop(Exception):  # noqa: N818 - no error
    pass


def advanced(run_: Run, progress: Progress | None = None, until: int = 1 << 30) -> Progress:
    """From a progress, or from the start, to the end of a round; with a new context, as after a restart."""
    context = run_.context()
    if progress is None:
        progress = Progress(context.state.server, Rows(context.state.rows), context.store(run_.clients))

    def watch(report):
        if report.round == until:
            raise Stop

    with one_thread(), contextlib.suppress(Stop):
        loop(run_, context, Serial(context), progress, watch)
    return progress


def copied(slots):
    return {k: v.clone() if isinstance(v, Tree) else v.detach().clone() for k, v in slots.items()}


def restarted(run_: Run, old: Progress) -> Progress:
    """All that a run is between two rounds, copied into a new process's worth of objects."""
    context = run_.context()
    store = context.store(run_.clients)
    store.buffer.copy_(old.store.buffer)
    store.visits[:] = old.store.visits
    rows = Rows(context.state.rows, Written({i: copied(row) for i, row in old.rows.written.items()}))
    return Progress(copied(old.server), rows, store, old.round)


@every_method
def test_a_run_that_stops_and_goes_on_is_the_run_that_did_not(name):
    run_ = prepared(name)
    through = advanced(run_)
    half = advanced(run_, until=2)
    assert half.round == 2
    gone_on = advanced(run_, restarted(run_, half))
    assert gone_on.round == through.round == 4
    assert same(table(through), table(gone_on))


@every_method
def test_every_home_stays_as_init_declared_it(name):
    run_ = prepared(name)
    declared = run_.context()
    progress = advanced(run_)
    homes = [("server", progress.server, declared.state.server)]
    homes += [(f"client {i}", progress.store.read(i), declared.store(CLIENTS).template(i)) for i in range(CLIENTS)]
    homes += [(f"row {i}", progress.rows[i], declared.state.rows) for i in range(CLIENTS)]
    for home, found, template in homes:
        assert found.keys() == template.keys(), home
        for slot, value in template.items():
            if isinstance(value, Tree) and not value:
                assert isinstance(found[slot], Tree)  # an open slot
                continue
            assert isinstance(found[slot], Tree) == isinstance(value, Tree), f"{home}: {slot}"
            own, its = entries(home, {slot: found[slot]}), entries(home, {slot: value})
            assert own.keys() == its.keys()
            for k, v in its.items():
                assert (own[k].shape, own[k].dtype) == (v.shape, v.dtype), k
                assert not own[k].requires_grad, k


class Counted(Serial):
    """What goes through this backend, tensor by tensor; what comes down twice in a round is sent once."""

    down = up = 0
    asked: ClassVar[dict] = {}

    def do(self, jobs):
        jobs = list(jobs)
        for job in jobs:
            if job.kind == "ask":
                self.asked[job.client, job.round] = job.down
            if job.kind == "local":
                self.down += nbytes([self.asked.pop((job.client, job.round), {}), job.down])
        for reply in super().do(jobs):
            if reply.up is not None:
                self.up += nbytes([reply.up.mean, reply.up.sum, reply.up.rows])
            yield reply


@every_method
def test_bytes_are_those_of_what_is_sent(name):
    run_ = prepared(name)
    context = run_.context()
    backend, reports = Counted(context), []
    with one_thread():
        loop(
            run_,
            context,
            backend,
            Progress(context.state.server, Rows(context.state.rows), context.store(CLIENTS)),
            reports.append,
        )
    assert sum(r.bytes_down for r in reports) == backend.down
    assert sum(r.bytes_up for r in reports) == backend.up


# clients


def permuted(fed: Federation, order: list[int]) -> Federation:
    parts = [(fed.train[i], fed.validation[i], fed.test[i]) for i in order]
    return Federation(fed.dataset, *zip(*parts, strict=True), split_hash(*zip(*parts, strict=True)), "permuted")


def parted_in_order(me: Client, share: float) -> tuple[Client, Client]:
    first = min(max(math.ceil(share * me.n - 1e-9), 1), max(me.n - 1, 1))
    return me._part(torch.arange(first)), me._part(torch.arange(first, me.n))


DRAWN = {
    "fedala": {"share": 1.0},
    "fedah": {"share": 1.0},
    "fedfomo": {"models": CLIENTS},
    "fedcp": {"noise": False},
}  # what leaves no choice


@every_method
def test_permuting_clients_permutes_results(name, monkeypatch):
    """Full batches and parts in order, for the order of samples is drawn by the client's number."""
    monkeypatch.setattr(Client, "split", parted_in_order)
    monkeypatch.setattr(Client, "draw", lambda me, purpose: orders.draw(0, purpose, me.round))
    monkeypatch.setattr(Facts, "draw", lambda run, purpose, client: orders.draw(0, purpose, run.round))
    monkeypatch.setattr(Client, "fresh", lambda me, purpose: me.task.net.fresh(f"{purpose} {me.round}"))
    order = [3, 0, 7, 5, 1, 2, 6, 4]
    fed = federation()
    chosen = method(name, **DRAWN.get(name, {}))
    fields = {"ratio": 1.0, "batch_size": 64, "rounds": 3}
    one = run(prepared(chosen, federation=fed, **fields))
    two = run(prepared(chosen, federation=permuted(fed, order), **fields))
    for here, there in enumerate(order):
        assert close(dict(two.personal(here)), dict(one.personal(there)), 1e-9)
    whole = {
        k for k, v in one.context.state.server.items() if not isinstance(v, Tree) or v
    }  # open slots may list clients
    a, b = ({k: v for k, v in r.server.items() if k in whole} for r in (one, two))
    assert close(entries("server", a), entries("server", b), 1e-9)


def without(fed: Federation, absent: int) -> Federation:
    """No client has any sample of a class, though the network has an output for it."""
    labels = fed.dataset.y.numpy()
    parts = [
        [rows[labels[rows] != absent] for rows in (fed.train[i], fed.validation[i], fed.test[i])]
        for i in range(fed.clients)
    ]
    parts = [p for p in parts if len(p[0])]
    return Federation(fed.dataset, *zip(*parts, strict=True), split_hash(*zip(*parts, strict=True)), "without a class")


ODD = {
    "one client": {"federation": federation((7,))},
    "clients of one class": {"federation": federation((2, 3, 4, 9)), "ratio": 1.0},
    "an absent class": {"federation": without(federation(seed=2), 2)},
    "clients smaller than a batch": {"federation": federation((2, 3, 3, 2, 5)), "batch_size": 32},
    "clients of one sample": {"federation": federation((1, 1, 6, 1))},
    "clients of one sample, all there are": {"federation": federation((1, 1)), "ratio": 1.0},
    "a batch of one": {"batch_size": 1},
    "no body": {"network": "logistic", "network_options": {}},
    "identical clients": {"federation": permuted(federation((6, 6)), [0, 0, 0]), "ratio": 1.0},
    "one sample with BatchNorm": {
        "federation": federation((1, 4), images=True),
        "network": "convnet3",
        "network_options": {},
        "ratio": 1.0,
        "rounds": 2,
    },
    "lost replies": {"drop": 0.4, "rounds": 6},
    "clients away": {"absent": 0.5, "rounds": 6},
    "slow clients": {"slow": 0.8},
    "clients that come late and leave early": {"late": 0.7, "leave": 0.7, "rounds": 6},
    "rounds of nobody": {"ratio": "bernoulli:0.1", "rounds": 6},
    "a learning rate of nearly nothing": {"lr": 1e-12},
    "no rounds": {"rounds": 0},
}


def outcome(name: str, **fields: object) -> Result | UsageError:
    try:
        return run(prepared(name, **fields))
    except UsageError as refusal:
        return refusal


@every_method
@pytest.mark.parametrize("case", ODD)
def test_odd_federations_are_survived(name, case):
    found = outcome(name, **ODD[case])
    if isinstance(found, UsageError):
        assert case == "no body", found  # a method that needs one may say so
        assert str(found).endswith(".")
        return
    assert finite(found)
    if found.run.rounds and found.run.lr > 1e-9:
        assert any(r["gradient_passes"] > 0 for r in found.rounds)


def plans(made: Method) -> bool:
    """Whether the server decides anything by who was asked to take part."""
    return plans(made.inner) if isinstance(made, Wrapper) else type(made).plan is not Method.plan


@every_method
def test_a_client_whose_reply_was_dropped_keeps_its_state(name):
    run_ = prepared(name, drop=0.4, rounds=6)
    context = run_.context()
    progress = Progress(context.state.server, Rows(context.state.rows), context.store(CLIENTS))
    before, lost, accepted = {}, [], []

    def watch(report):
        now = [copied(progress.store.read(i)) for i in range(CLIENTS)]
        visits = progress.store.visits.copy()
        if report.round:
            kept = set(range(CLIENTS)) - (set(report.participants) - set(report.dropped))
            assert all(same(entries("", now[i]), entries("", before["now"][i])) for i in kept)
            assert (visits - before["visits"]).tolist() == [int(i not in kept) for i in range(CLIENTS)]
            lost.extend(report.dropped)
            accepted.append([i for i in report.participants if i not in report.dropped])
            assert set(report.trained) == set(accepted[-1])
        before.update(now=now, visits=visits)

    with one_thread():
        loop(run_, context, Serial(context), progress, watch)
    assert lost
    assert all(accepted)
    if not plans(run_.method):  # and the whole run is that of the clients that were heard
        heard = run(prepared(name, ratio=accepted, rounds=6))
        assert same(table(progress), table(heard.progress))


FAULTS = {"absent": 0.2, "drop": 0.2, "slow": 0.5, "late": 0.3, "leave": 0.3}


@every_method
def test_with_every_fault_at_once_workers_give_the_bits_of_serial(name):
    """And participants are those of every method, in time and not."""
    fields = FAULTS | {"rounds": 6, "ratio": 0.8}
    serial, found = (run(prepared(name, **fields, **b)) for b in ({}, {"backend": "workers", "workers": 2}))
    assert same(table(serial.progress), table(found.progress))
    assert measured(serial) == measured(found)
    assert finite(found)
    faults = found.run.faults
    for r, row in enumerate(found.rounds[1:]):
        there, away = faults.there(r, found.run.participants(r))
        assert (row["participants"], row["absent"], row["refused"]) == (there, away, [])
        assert row["dropped"] == [i for i in there if faults.lost(r, i)]
    assert all(any(row[what] for row in found.rounds) for what in ("participants", "absent", "dropped"))


@every_method
def test_slow_clients_are_stacked_too(name):
    serial, stacked = (run(prepared(name, slow=0.7, backend=b)) for b in ("serial", "stacked"))
    assert close(table(serial.progress), table(stacked.progress), 1e-10)
    assert [r["gradient_passes"] for r in serial.rounds] == [r["gradient_passes"] for r in stacked.rounds]


class Poisoned(Serial):
    """One client's replies are no numbers."""

    bad = 2

    def do(self, jobs):
        for reply in super().do(jobs):
            sent = [t for t in tensors([reply.up and vars(reply.up), reply.mine or {}]) if t.is_floating_point()]
            if reply.client == self.bad and reply.weights is None and sent:
                up = Up(**{k: poisoned(getattr(reply.up, k)) for k in ("mean", "sum", "rows")}, weight=reply.up.weight)
                yield dataclasses.replace(reply, up=up, mine=reply.mine and poisoned(reply.mine), sound=False)
            else:
                yield reply


def poisoned(slots):
    nan = lambda t: torch.full_like(t, math.nan) if t.is_floating_point() else t
    return {slot: v.map(nan) if isinstance(v, Tree) else nan(v) for slot, v in slots.items()}


@every_method
def test_replies_that_are_no_numbers_are_as_if_their_client_was_not_there(name):
    """Whatever the exchange: with its introduction it is a stranger, otherwise refused by name in each round."""
    run_ = prepared(name)
    context, reports = run_.context(), []
    progress = Progress(context.state.server, Rows(context.state.rows), context.store(CLIENTS))
    with one_thread():
        loop(run_, context, Poisoned(context), progress, reports.append)
    bad, first = Poisoned.bad, reports[0]
    drawn = [bad in run_.participants(r) for r in range(run_.rounds)]
    assert any(drawn)
    refused = [bad in report.refused for report in reports[1:]]
    if not any(refused):
        silent = not tensors([run_.context().state.client]) and name == "local"
        assert silent or first.refused.keys() == {bad}
        assert silent or [bad in report.absent for report in reports[1:]] == drawn
    else:
        assert refused == drawn
        assert all("NaN or inf in" in why for report in reports for why in report.refused.values())
    assert all(t.isfinite().all() for k, t in table(progress).items() if t.is_floating_point()), "a NaN came through"
    assert name == "local" or not progress.store.visits[bad]
    if not plans(run_.method) and not method(name).says_hello:
        others = [[i for i in run_.participants(r) if i != bad] for r in range(run_.rounds)]
        if name != "local":
            assert same(table(progress), table(run(prepared(name, ratio=others)).progress))


# names and files


@every_method
def test_a_method_is_its_text(name):
    for made in (catalogue.build(name), method(name), changed(name)):
        scope = {type(m).__name__: type(m) for m in parts(made)}
        assert eval(repr(made), scope) == made
        assert hash(made) == hash(eval(repr(made), scope))
        run_ = Run(method=made, rounds=7, ratio="bernoulli:0.3", seed=5)
        again = Run.from_toml(run_.to_toml())
        assert again == run_
        assert again.to_toml() == run_.to_toml()
        assert catalogue.build(made.name, catalogue.settings(made)) == made


def parts(made: Method) -> list[Method]:
    return [made, *(parts(made.inner) if isinstance(made, Wrapper) else [])]


def changed(name: str) -> Method:
    """Every number another one, as far as the method takes it."""
    settings = catalogue.settings(catalogue.build(name))
    for field, value in list(settings.items()):
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                catalogue.build(name, settings | {field: value / 3 if isinstance(value, float) else value + 1})
            except UsageError:
                continue
            settings[field] = value / 3 if isinstance(value, float) else value + 1
    return catalogue.build(name, settings)


@every_method
def test_a_method_is_named_after_its_file_and_what_it_wraps(name):
    made = catalogue.build(name)
    full = name if "+" in name or not catalogue.wraps(name) else f"fedavg+{name}"
    assert made.name == full
    assert [type(m).__name__.lower() for m in reversed(parts(made))] == full.split("+")
    assert run(prepared(name, rounds=0)).summary["method"] == full
