"""Evaluation: in large batches and only where something has changed, with the same scores as client by client."""

import gc
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from harness import SIZES, experiment, federation, run
from idiolect.engine import work
from idiolect.engine.loop import evaluate, loop
from idiolect.engine.progress import Progress, Report
from idiolect.engine.serial import Serial
from idiolect.engine.work import Context
from idiolect.method import Method, Rows, State, Up
from idiolect.nets import Network

MANY = tuple(3 + k % 5 for k in range(40))


@pytest.fixture
def passes(monkeypatch):
    """The clients of each pass over test samples, and of each question for a personal model."""
    found = {"scored": [], "asked": []}
    scores, personal = Context.scores, Context._personal
    monkeypatch.setattr(Context, "scores", lambda self, ids, w: found["scored"].append(ids) or scores(self, ids, w))
    monkeypatch.setattr(
        Context, "_personal", lambda self, job: found["asked"].append(job.client) or personal(self, job)
    )
    return found


def received(result):
    return [
        (r["round"], r["client"], r["split"], r["correct"], r["total"], r["loss"])
        for r in result.clients
        if r["moment"] == "received"
    ]


def alone(monkeypatch, made):
    """Every client by itself, every time."""
    with monkeypatch.context() as patch:
        patch.setattr(Context, "together", 1)
        patch.setattr("idiolect.engine.evaluating.Standing.holds", lambda self, job: False)
        return received(run(made))


def same(one, two):
    assert [a[:5] for a in one] == [b[:5] for b in two]
    assert [a[5] for a in one] == pytest.approx([b[5] for b in two], rel=1e-12)
    return True


METHODS = [
    "local",
    "fedavg",
    "fedper",
    "fedbabu",
    "fedala",
    "apfl",
    "pfedme",
    "ifca",
    "cfl",
    "fedamp",
    "fedem",
    "knnper",
    "fedrep+fedlag",
    "fedavg+finetune",
    "feddbe",
    "fedpac",
]


@pytest.mark.parametrize("method", METHODS)
def test_scores_are_those_of_every_client_alone_and_anew(method, monkeypatch):
    fields = {"momentum": 0.0, "lr": 0.02} if method == "pfedme" else {}
    made = experiment(method, federation=federation(MANY), ratio=0.2, rounds=4, **fields)
    assert same(received(run(made)), alone(monkeypatch, made))


@pytest.mark.parametrize("buffers", ["average", "local", "drop"])
def test_whatever_becomes_of_running_statistics(buffers, monkeypatch):
    made = experiment(
        "fedavg", images=True, federation=federation(MANY, images=True), ratio=0.2, rounds=2, buffers=buffers
    )
    assert same(received(run(made)), alone(monkeypatch, made))


def test_clients_with_the_same_weights_are_scored_together(passes):
    made = experiment("fedavg", federation=federation(MANY), rounds=1)
    run(made)
    everyone = [ids for ids in passes["scored"] if len(ids) > 1]
    assert [len(ids) for ids in everyone] == [2] * 40  # 40 clients in parcels of 40 // 16, before and after the round
    assert sorted(i for ids in everyone[:20] for i in ids) == list(range(40))


def test_clients_with_weights_of_their_own_are_not(passes):
    run(experiment("local", federation=federation(MANY), ratio=1.0, rounds=1, evaluate_every=1))
    after = passes["scored"][20:]
    assert all(len(ids) == 1 for ids in after)


def test_a_network_that_may_look_at_the_whole_batch_is_asked_client_by_client(passes):
    class Centred(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    network = Network(nn.Sequential(nn.Linear(6, 5), Centred()), nn.Linear(5, 3))
    run(experiment("fedavg", federation=federation(MANY), network=network, rounds=1))
    assert all(len(ids) == 1 for ids in passes["scored"])


def test_a_client_with_more_samples_than_a_chunk_is_cut_as_alone(monkeypatch):
    monkeypatch.setattr(work, "chunk", lambda x: 3)
    made = experiment("fedavg", federation=federation(MANY), rounds=1)
    found = received(run(made))
    assert same(found, alone(monkeypatch, made))
    assert [piece for chunk in work._chunks([4, 1, 2, 7], 3) for piece in chunk] == [
        (0, 0, 3),
        (0, 3, 4),
        (1, 0, 1),
        (2, 0, 2),
        (3, 0, 3),
        (3, 3, 6),
        (3, 6, 7),
    ]
    assert all(sum(b - a for _, a, b in chunk) <= 3 for chunk in work._chunks([4, 1, 2, 7], 3))


def test_the_same_bits_in_worker_processes():
    for method in ("fedavg", "local", "cfl"):
        made = experiment(method, federation=federation(MANY), ratio=0.3, rounds=3)
        assert received(run(made)) == received(run(replace(made, backend="workers", workers=2)))


# only where something has changed


def test_who_trains_alone_is_evaluated_after_training_alone(passes):
    found = run(experiment("local", rounds=4, ratio=0.25))
    trained = [sorted(r["participants"]) for r in found.rounds[1:]]
    assert all(len(ids) == 2 for ids in trained)
    asked = passes["asked"]
    assert sorted(asked[:8]) == list(range(8))
    assert [sorted(asked[8 + 2 * k : 10 + 2 * k]) for k in range(4)] == trained
    assert [len([c for c in found.clients if c["round"] == r and c["moment"] == "received"]) for r in range(5)] == [
        8
    ] * 5


@pytest.mark.parametrize("method", ["fedavg", "fedper", "fedavg+finetune", "local+finetune"])
def test_who_receives_something_new_or_tunes_anew_is_evaluated(method, passes):
    run(experiment(method, rounds=3, ratio=0.25))
    assert len(passes["asked"]) == 8 * 4


@dataclass(frozen=True)
class Odd(Method):
    """The server's model stands still, or is written to in place; personal models depend on what is named."""

    on: str = ""

    def init(self, net):
        return State(server={"model": net.weights, "other": torch.zeros(())})

    def local(self, me, down, mine):
        return Up(sum={"n": torch.ones(())}), mine

    def server(self, server, rows, up, run):
        if self.on == "in place":
            for v in server["model"].values():
                v.mul_(0.5)
        return {**server, "other": server["other"] + 1}, rows

    def personal(self, me, down, mine):
        w = down["model"]
        if self.on == "the round":
            return w * (1 - 0.1 * me.round)
        if self.on == "the rate":
            return w * me.lr
        if self.on == "a draw":
            return w * me.draw("odd").random()
        if self.on == "every slot":
            return {**down}["model"]
        return w * (1 + down["other"]) if self.on == "another slot" else w


@pytest.mark.parametrize(
    ("on", "evaluations"),
    [
        ("", 1),
        ("in place", 4),
        ("the round", 4),
        ("the rate", 4),
        ("a draw", 4),
        ("every slot", 4),
        ("another slot", 4),
    ],
)
def test_what_a_personal_model_rests_on_is_found_out(on, evaluations, passes):
    made = experiment(Odd(on), rounds=3)
    context = made.context()
    progress = Progress(context.state.server, Rows(context.state.rows), context.store(8))
    with torch.random.fork_rng(devices=[]):
        loop(made, context, Serial(context), progress, lambda report: None)
    trained = 8 + sum(len(made.participants(r)) for r in range(3))  # their private state may be another
    assert len(passes["asked"]) == (trained if evaluations == 1 else 8 * evaluations)


def test_what_was_received_last_is_known_and_not_held():
    made = experiment("fedavg", rounds=1)
    context = made.context()
    progress = Progress({"model": context.net.weights.clone()}, Rows(context.state.rows), context.store(8))
    evaluate(made, context, Serial(context), progress, Report(0))
    reference, _ = next(iter(progress.standing[0].received["model"].values()))
    assert reference() is not None
    progress.server = {"model": progress.server["model"].clone()}
    gc.collect()
    assert reference() is None
    done = evaluate(made, context, Serial(context), progress, Report(0))
    assert list(done.received) == [i for _, i in sorted((-n, i) for i, n in enumerate(SIZES))]
