"""Two exchanges in a round: `ask` and `answered` before `local`. And samples of the server's, to train on."""

from dataclasses import dataclass, replace

import pytest
import torch

from harness import SIZES, experiment, federation, moved, run
from idiolect import catalogue
from idiolect.engine.loop import loop
from idiolect.engine.progress import Progress
from idiolect.engine.serial import Serial
from idiolect.engine.work import Job
from idiolect.errors import ContractError
from idiolect.method import Method, Rows, State, Tree, Up
from idiolect.methods.fedavg import FedAvg
from idiolect.running import one_thread
from idiolect.wrap.finetune import FineTune

EVERYONE = range(len(SIZES))


@dataclass(frozen=True)
class Asking(FedAvg):
    """FedAvg whose clients first say how many samples they have; each then hears of the sum, and keeps it."""

    def init(self, net):
        zero = torch.zeros((), dtype=net.dtype)
        return State(
            server={"model": net.weights, "told": Tree()}, client={"heard": zero}, rows={"n": zero, "also": zero}
        )

    def ask(self, me, down, mine):
        assert not down["told"]
        n = torch.tensor(float(me.n), dtype=mine["heard"].dtype)
        return Up(sum={"n": n}, mean={"n": n}, rows={"n": n, "heard": mine["heard"]})

    def answered(self, server, rows, up, run):
        told = Tree({"sum": up.sum["n"], "mean": up.mean["n"], "ids": torch.tensor(run.ids)})
        rows = rows.with_(run.ids, n=up.rows["n"], also=up.rows["heard"])
        return {**server, "told": told}, rows

    def local(self, me, down, mine):
        up, _ = super().local(me, down, mine)
        return replace(up, sum={"again": down["told"]["sum"]}), {"heard": down["told"]["sum"]}

    def server(self, server, rows, up, run):
        assert torch.equal(server["told"]["ids"], torch.tensor(run.ids))
        return {**server, **up.mean, "told": Tree()}, rows


def progress_of(run_):
    """What a run leaves, and its reports."""
    context, reports = run_.context(), []
    progress = Progress(context.state.server, Rows(context.state.rows), context.store(run_.clients))
    with one_thread():
        loop(run_, context, Serial(context), progress, reports.append)
    return progress, reports


def test_local_hears_what_the_server_made_of_the_answers():
    found = run(experiment(Asking(), ratio=((0, 1, 2), (2, 3)), rounds=2))
    sums = [SIZES[0] + SIZES[1] + SIZES[2], SIZES[2] + SIZES[3]]
    assert [float(found.private(i)["heard"]) for i in range(5)] == [sums[0], sums[0], sums[1], sums[1], 0]
    rows = found.progress.rows
    assert [float(rows[i]["n"]) for i in range(5)] == [*SIZES[:4], 0]
    assert [float(rows[i]["also"]) for i in range(4)] == [0, 0, sums[0], 0]  # what it kept of the round before
    assert found.server["told"].equals(Tree())


def test_otherwise_nothing_is_changed():
    found, fedavg = run(experiment(Asking())), run(experiment(FedAvg()))
    assert found.server["model"].equals(fedavg.server["model"])
    assert [r["gradient_passes"] for r in found.rounds] == [r["gradient_passes"] for r in fedavg.rounds]
    for a, b in zip(found.clients, fedavg.clients, strict=True):
        assert a == b


@pytest.mark.parametrize("backend", [{"backend": "workers", "workers": 2}, {"backend": "stacked"}], ids=str)
def test_every_backend_asks(backend):
    serial, found = run(experiment(Asking())), run(experiment(Asking(), **backend))
    if "workers" in backend:
        assert found.server["model"].equals(serial.server["model"])
    assert moved(found.server["model"], serial.server["model"]) < 1e-10
    for i in EVERYONE:
        assert float(found.private(i)["heard"]) == float(serial.private(i)["heard"])
    for a, b in zip(found.rounds, serial.rounds, strict=True):
        assert (a["bytes_up"], a["bytes_down"]) == (b["bytes_up"], b["bytes_down"])


def test_what_comes_down_twice_is_sent_once():
    found, fedavg = run(experiment(Asking())), run(experiment(FedAvg()))
    for a, b in zip(found.rounds[1:], fedavg.rounds[1:], strict=True):
        assert a["bytes_down"] == b["bytes_down"] + 5 * (8 + 8 + 5 * 8)  # sum, mean and the numbers of five clients
        assert a["bytes_up"] == b["bytes_up"] + 5 * (8 + 8 + 8)  # n once, heard, again


def test_a_client_that_is_lost_is_lost_for_the_whole_round():
    lossy = experiment(Asking(), drop=0.4, rounds=6)
    progress, reports = progress_of(lossy)
    accepted = [[i for i in r.participants if i not in r.dropped] for r in reports[1:]]
    assert any(r.dropped for r in reports)
    assert all(accepted)
    heard, _ = progress_of(experiment(Asking(), ratio=accepted, rounds=6))
    assert progress.server["model"].equals(heard.server["model"])
    for i in EVERYONE:
        assert progress.store.visits[i] == heard.store.visits[i]
        assert torch.equal(progress.store.read(i)["heard"], heard.store.read(i)["heard"])
        assert torch.equal(progress.rows[i]["n"], heard.rows[i]["n"])


def test_a_round_in_which_nobody_is_heard_ends_there():
    progress, reports = progress_of(experiment(Asking(), drop=0.7, ratio=((0,),), rounds=6))
    empty = [r for r in reports[1:] if r.dropped]
    assert empty
    assert len(empty) < 6
    assert progress.store.visits[0] == 6 - len(empty)
    assert all(r.bytes_up == 0 and r.passes == 0 and r.bytes_down > 0 for r in empty)
    _, none = progress_of(experiment(Asking(), ratio="bernoulli:0.05", rounds=6))
    assert any(not r.participants for r in none[1:])


def test_asking_may_train_which_counts():
    @dataclass(frozen=True)
    class Trains(Asking):
        def ask(self, me, down, mine):
            me.train(down["model"], epochs=3)
            return super().ask(me, down, mine)

    found, plain = run(experiment(Trains())), run(experiment(Asking()))
    assert found.server["model"].equals(plain.server["model"])
    for a, b in zip(found.rounds[1:], plain.rounds[1:], strict=True):
        assert a["gradient_passes"] == pytest.approx(b["gradient_passes"] + 3)


def test_clients_with_buffers_of_their_own_are_asked_with_them():
    @dataclass(frozen=True)
    class Tells(Asking):
        def ask(self, me, down, mine):
            shift = sum(v.sum() for k, v in down["model"].items() if k in me.task.net.buffers)
            return replace(super().ask(me, down, mine), rows={"n": shift, "heard": mine["heard"]})

    fields = {"images": True, "ratio": ((0, 1),), "rounds": 2, "buffers": "local"}
    rows = run(experiment(Tells(), **fields)).progress.rows
    assert float(rows[0]["n"]) != float(rows[1]["n"])


def test_a_wrapper_asks_as_its_inner():
    assert FineTune(Asking()).asks
    assert not FineTune(FedAvg()).asks
    found, plain = run(experiment(FineTune(Asking(), epochs=1))), run(experiment(Asking()))
    assert found.server["model"].equals(plain.server["model"])
    lag = catalogue.find("fedlag")(Asking(), top_k=0, warmup=0)
    wrapped = run(experiment(lag))
    assert (
        moved(
            wrapped.server["model"],
            run(experiment(catalogue.find("fedlag")(FedAvg(), top_k=0, warmup=0))).server["model"],
        )
        == 0
    )
    assert [float(wrapped.private(i)["heard"]) for i in EVERYONE] == [
        float(plain.private(i)["heard"]) for i in EVERYONE
    ]


def test_fedlag_asks_with_the_client_s_own_layers():
    @dataclass(frozen=True)
    class Whole(Asking):
        def ask(self, me, down, mine):
            assert set(down["model"]) == set(me.task.net.weights)
            return super().ask(me, down, mine)

    found = run(experiment(catalogue.find("fedlag")(Whole(), top_k=1, warmup=0, threshold=0.0)))
    assert any(bool(v) for v in found.server["personal"].values())


@pytest.mark.parametrize(
    ("function", "text"),
    [("ask", r"\.ask returned up\.sum"), ("answered", r"\.answered returned server with slots model,")],
)
def test_what_breaks_the_contract_is_named(function, text):
    @dataclass(frozen=True)
    class Wrong(Asking):
        def ask(self, me, down, mine):
            up = super().ask(me, down, mine)
            return replace(up, sum={f"n{me.id}": up.sum["n"]}) if function == "ask" else up

        def answered(self, server, rows, up, run):
            return {k: v for k, v in server.items() if k == "model"}, rows

    with pytest.raises(ContractError, match=text):
        run(experiment(Wrong()))


# samples that are no client's own


def me_of(id=0, round=2, **fields):
    context = experiment("fedavg", **fields).context()
    return context.client(Job("local", id, round, 0, {}, {})), context


def test_a_view_of_the_client_s_own_samples_trains_the_same():
    me, context = me_of()
    view = me.over(me.inputs, me.labels)
    assert view.train(context.net.weights).equals(me.train(context.net.weights))
    assert view.counts.equal(me.counts)


def test_passes_over_other_samples_count_by_their_number():
    me, context = me_of()
    view = me.over(me.inputs[:3], me.labels[:3], batch_size=3)
    assert view.n == 3
    assert view.steps(1) == 1
    view.train(context.net.weights, epochs=5)
    assert me.passes == pytest.approx(5 * 3 / me.n)
    assert me.steps(1) > 1  # its own batches are as they were


def test_a_view_counts_its_own_classes_and_features():
    me, context = me_of()
    known = me.counts, me.features(context.net.weights)
    view = me.over(me.inputs[:2], torch.tensor([2, 2]))
    assert view.counts.tolist() == [0, 0, 2]
    assert torch.equal(view.features(context.net.weights), known[1][:2])
    assert torch.equal(me.counts, known[0])


def test_a_client_draws_initialisations_by_round_and_number():
    me, context = me_of()
    drawn = me.fresh("a")
    assert drawn.keys() == context.net.weights.keys()
    assert drawn.equals(me_of()[0].fresh("a"))
    for other in (me.fresh("b"), me_of(id=1)[0].fresh("a"), me_of(round=3)[0].fresh("a"), context.net.weights):
        assert moved(drawn, other) > 1e-2


@dataclass(frozen=True)
class Serving(Method):
    """The server trains on what the first participant sends: its own samples."""

    def init(self, net):
        return State(server={"model": net.weights})

    def local(self, me, down, mine):
        return Up(rows={"x": me.inputs[:3], "y": me.labels[:3]}), mine

    def server(self, server, rows, up, run):
        return {"model": run.over(up.rows["x"][0], up.rows["y"][0]).train(server["model"])}, rows


SERIAL, WORKERS, STACKED = {"backend": "serial"}, {"backend": "workers", "workers": 2}, {"backend": "stacked"}


@pytest.mark.parametrize(
    ("backend", "images"),
    [(SERIAL, False), (SERIAL, True), (WORKERS, False), (WORKERS, True), (STACKED, False)],
    ids=str,
)
def test_the_server_trains_as_a_client_would(backend, images):
    fields = {"images": images, "rounds": 2, "ratio": ((0, 1), (1, 2))}
    found = run(experiment(Serving(), **fields, **backend))
    w = found.context.net.weights
    for r, i in ((0, 0), (1, 1)):
        x, y = found.context.shards.part("train", i)
        w = found.context.server(r, x[:3], y[:3]).train(w)
    assert found.server["model"].equals(w)
    assert moved(w, found.context.net.weights) > 1e-3
    assert found.context.server(1, x, y).lr == pytest.approx(0.1 * 0.9)


def test_the_server_s_shuffles_are_no_client_s():
    context = experiment("fedavg", federation=federation((17, 17))).context()
    x, y = context.shards.part("train", 0)
    own = context.client(Job("local", 0, 0, 0, {}, {})).train(context.net.weights)
    assert moved(context.server(0, x, y).train(context.net.weights), own) > 1e-4
