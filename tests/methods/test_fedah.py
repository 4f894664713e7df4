"""FedAH: its reference, what it becomes at either end of its weights, their gradient, odd clients."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import checks
from harness import SIZES, agree, experiment, federation, moved, run, world
from idiolect.engine.work import Job
from idiolect.errors import UsageError
from idiolect.method import SGD, Up, unit_interval
from idiolect.methods.fedah import FedAH, aggregated
from idiolect.methods.fedavg import FedAvg
from idiolect.methods.fedrep import FedRep
from idiolect.nets import Network
from idiolect.task import Batch, Features
from idiolect.tree import Tree
from reference import fedah as reference

IMAGES = pytest.mark.parametrize("images", [False, True], ids=["mlp", "convnet with BatchNorm"])


@dataclass(frozen=True)
class AtZero(FedAH):
    """FedAH whose mixing weights are held at 0."""

    def learn(self, me, new, mine):
        return mine["mix"].zeros()


@dataclass(frozen=True)
class Plain(FedAH):
    """FedAH that puts every batch through the whole network while it learns its weights."""

    def learn(self, me, new, mine):
        return me.train(
            mine["mix"], loss=self.mixture, given=(new, mine["model"]), epochs=self.head_epochs, lr=self.weight_lr,
            optimizer=SGD(), project=unit_interval, order=9,
        )  # fmt: skip


@dataclass(frozen=True)
class BodyOnly(FedAvg):
    """FedAvg that trains the body alone, in the order of FedAH's body phase."""

    def local(self, me, down, mine):
        return Up(mean={"model": me.train(down["model"], only=me.task.net.body, order=1)}), mine


@dataclass(frozen=True)
class HeadFirst(FedAvg):
    """FedAvg that trains the received head for two epochs, then the body."""

    def local(self, me, down, mine):
        w = me.train(down["model"], only=me.task.net.head, epochs=2, order=0)
        return Up(mean={"model": me.train(w, only=me.task.net.body, order=1)}), mine


@dataclass(frozen=True)
class Watched(FedAH):
    """Keeps what clients predict with before their training and after it, what they learn, and what they reply."""

    seen: ClassVar[dict[str, dict[tuple[int, int], Any]]] = {}

    def keep(self, what, me, value):
        self.seen.setdefault(what, {})[me.round, me.id] = value.clone()

    def learn(self, me, new, mine):
        mix = super().learn(me, new, mine)
        self.keep("head", me, aggregated(new, mine["model"], mix))
        return mix

    def local(self, me, down, mine):
        up, new = super().local(me, down, mine)
        self.keep("reply", me, up.mean["model"])
        self.keep("aggregated", me, self.seen["head"][me.round, me.id])
        return up, new

    def personal(self, me, down, mine):
        w = super().personal(me, down, mine)
        after = (me.round, me.id) in self.seen.get("reply", {})
        self.keep("after" if after else "before", me, w)
        return w


# the reference


@IMAGES
@pytest.mark.parametrize(
    "hyper",
    [{}, {"head_epochs": 3}, {"head_epochs": 2, "weight_lr": None}, {"weight_lr": 25.0}, {"head_epochs": 0}],
    ids=str,
)
def test_engine_equals_reference(hyper, images):
    found = run(experiment(FedAH(**hyper), images=images))
    expected = reference.run(world(found.run), **hyper)
    agree(found, expected)
    for i, mix in enumerate(expected.extra["W"]):
        own = found.private(i)
        assert moved(own["mix"], Tree(mix)) < 1e-10
        assert moved(own["model"], Tree(expected.extra["heads"][i])) < 1e-10


def test_body_epochs_are_the_body_phase_s_alone():
    found = run(experiment(FedAH(head_epochs=2, body_epochs=3)))
    agree(found, reference.run(dataclasses.replace(world(found.run), epochs=3), head_epochs=2))


# either end of the weights


@IMAGES
def test_weights_held_at_zero_are_fedrep_to_the_bit(images):
    held = run(experiment(AtZero(head_epochs=2), images=images))
    fedrep = run(experiment(FedRep(head_epochs=2), images=images))
    assert held.server["model"].pick(fedrep.server["model"]).equals(fedrep.server["model"])
    assert all(held.personal(i).equals(fedrep.personal(i)) for i in range(len(SIZES)))
    free = run(experiment(FedAH(head_epochs=2), images=images))
    assert moved(free.server["model"], held.server["model"]) > 1e-3


@IMAGES
def test_without_head_epochs_the_body_is_trained_under_the_initial_head(images):
    found = run(experiment(FedAH(head_epochs=0), images=images))
    plain = run(experiment(BodyOnly(), images=images))
    initial = found.context.net.head
    # a mean of equal heads is that head, to rounding
    assert moved(found.server["model"].pick(initial), initial) < 1e-14
    assert moved(found.server["model"], plain.server["model"]) < 1e-12
    assert all(found.private(i)["mix"].equals(initial.ones()) for i in range(len(SIZES)))


@IMAGES
def test_weights_that_never_move_start_the_head_from_the_received_one(images):
    found = run(experiment(FedAH(weight_lr=0.0, head_epochs=2), images=images))
    plain = run(experiment(HeadFirst(), images=images))
    assert moved(found.server["model"], plain.server["model"]) < 1e-12
    assert all(found.private(i)["mix"].equals(found.context.net.head.ones()) for i in range(len(SIZES)))
    learnt = run(experiment(FedAH(head_epochs=2), images=images))
    assert moved(learnt.server["model"], plain.server["model"]) > 1e-4


@IMAGES
def test_features_computed_once_are_the_plain_computation(images):
    found, plain = (run(experiment(m(head_epochs=2), images=images)) for m in (FedAH, Plain))
    assert moved(found.server["model"], plain.server["model"]) < 1e-12
    assert max(moved(found.personal(i), plain.personal(i)) for i in range(len(SIZES))) < 1e-12


def test_the_frozen_body_is_computed_once_for_both_head_phases():
    Counting.calls = 0
    net = Network(nn.Sequential(nn.Flatten(), Counting(6, 5), nn.ReLU()), nn.Linear(5, 3))
    context = experiment(FedAH(head_epochs=3, body_epochs=1), network=net, network_options={}).context()
    context.do(Job("local", 1, 0, 0, context.state.server, context.state.client))
    assert Counting.calls == 1 + 2  # the features; 9 samples in 2 batches of the body phase


class Counting(nn.Linear):
    calls = 0

    def forward(self, x):
        Counting.calls += 1
        return super().forward(x)


# the weights


def mixing(seed: int = 0):
    """A batch of features, a received model, an own head and weights, all of them drawn."""
    task = experiment(FedAH()).context().task
    draw = torch.Generator().manual_seed(seed)
    new, old = (
        w.map(lambda v: torch.randn(v.shape, generator=draw, dtype=v.dtype)) for w in (task.net.weights, task.net.head)
    )
    mix = old.map(lambda v: torch.rand(v.shape, generator=draw, dtype=v.dtype))
    z = torch.randn(7, 5, generator=draw, dtype=torch.float64)
    return task, mix, Batch(Features(z), torch.tensor([0, 1, 2, 0, 1, 1, 0])), new, old


def test_gradient_of_the_weights_against_finite_differences():
    task, mix, batch, new, old = mixing()

    def loss(*values):
        return FedAH().mixture(task, Tree(zip(mix, values, strict=True)), batch, new, old)

    assert torch.autograd.gradcheck(loss, [v.requires_grad_() for v in mix.values()])


def test_gradient_of_the_weights_is_the_head_s_times_the_difference():
    task, mix, batch, new, old = mixing(1)
    leaves = [v.requires_grad_() for v in mix.values()]
    found = torch.autograd.grad(FedAH().mixture(task, mix, batch, new, old), leaves)
    head = aggregated(new, old, mix.detach()).pick(old)
    p = torch.softmax(task.head(head, batch.x.z), 1) - nn.functional.one_hot(batch.y, 3)  # dL/dlogits, times the batch
    by_hand = {"head.weight": p.T @ batch.x.z / len(p), "head.bias": p.mean(0)}
    for name, value in zip(mix, found, strict=True):
        torch.testing.assert_close(value, by_hand[name] * (new[name] - old[name]), rtol=0, atol=1e-14)


@pytest.mark.parametrize("rate", [1.0, 200.0])
def test_weights_stay_in_the_unit_interval_and_move(rate):
    found = run(experiment(FedAH(weight_lr=rate)))
    visited = [i for i in range(len(SIZES)) if found.progress.store.visits[i] > 1]
    mixes = torch.stack([found.private(i)["mix"].flat() for i in visited])
    assert mixes.min() >= 0
    assert mixes.max() <= 1
    assert mixes.min() < 1
    if rate > 1:
        assert mixes.min() == 0  # the projection is at work


def test_the_personal_head_lies_between_the_client_s_own_and_the_received():
    found = run(experiment(FedAH(weight_lr=5.0)))
    for i in range(len(SIZES)):
        head, old, new = found.personal(i), found.private(i)["model"], found.server["model"]
        for k in old:
            low, high = torch.minimum(old[k], new[k]), torch.maximum(old[k], new[k])
            assert bool(((head[k] >= low - 1e-12) & (head[k] <= high + 1e-12)).all())


@IMAGES
def test_the_personal_model_before_and_after_local_training(images):
    """Before: the received body and the aggregated head, that from which the round's head training starts; after: what
    the client replies. Both are scored."""
    Watched.seen.clear()
    found = run(experiment(Watched(), images=images))
    seen, task, shards = Watched.seen, found.context.task, found.context.shards
    assert len(seen["reply"]) == len(seen["after"]) == 4 * 5
    for key, reply in seen["reply"].items():
        assert seen["before"][key].equals(seen["aggregated"][key])
        assert seen["after"][key].equals(reply)
        assert moved(seen["before"][key], reply) > 1e-3
    scores = {(row["round"], row["client"], row["moment"]): row for row in found.clients if row["split"] == "test"}
    for r, i in seen["reply"]:
        x, y = shards.part("test", i)
        for moment, w in (("received", seen["before"][r, i]), ("trained", seen["after"][r, i])):
            row = scores[r + (moment == "trained"), i, moment]
            assert row["loss"] == pytest.approx(float(task.losses(task.logits(w, x), y).sum()), abs=1e-9)


def test_a_client_that_is_away_keeps_its_head_and_its_weights():
    """As in public code they do not: one model object serves all clients, or a broadcast changes the head."""
    *_, states = checks.history(FedAH(weight_lr=5.0), ratio=((0, 1, 2), (1, 2), (2, 4), (0, 4)))
    for r, here in enumerate(((0, 1, 2), (1, 2), (2, 4), (0, 4))):
        for i in range(len(SIZES)):
            before, after = (states[k].store.read(i) for k in (r, r + 1))
            assert before["model"].equals(after["model"]) == (i not in here)
            assert i in here or before["mix"].equals(after["mix"])


def test_an_evaluation_keeps_nothing():
    often, once = (run(experiment(FedAH(), evaluate_every=n)) for n in (1, 4))
    for i in range(len(SIZES)):
        assert all(often.private(i)[slot].equals(once.private(i)[slot]) for slot in ("model", "mix"))
    assert often.server["model"].equals(once.server["model"])


def test_weights_do_not_move_before_anybody_has_trained():
    found = run(experiment(FedAH(weight_lr=50.0), rounds=1))
    assert all(found.private(i)["mix"].equals(found.context.net.head.ones()) for i in range(len(SIZES)))


def test_a_client_that_never_took_part_mixes_from_the_initial_head():
    found = run(experiment(FedAH(), ratio=[[0, 1, 2, 4, 5]] * 4))
    initial, own = found.context.net.head, found.private(7)
    assert own["model"].equals(initial)
    assert own["mix"].equals(initial.ones())
    personal, received = found.personal(7), found.server["model"]
    assert personal.drop(initial).equals(received.drop(initial))
    assert moved(personal.pick(initial), received.pick(initial)) > 1e-6


# odd clients


@pytest.mark.parametrize("sizes", [(6, 1, 1, 3, 9), (1, 1, 1, 1)], ids=str)
def test_clients_of_one_sample_or_one_class(sizes):
    found = run(experiment(FedAH(), sizes=sizes))
    agree(found, reference.run(world(found.run)))
    images = run(experiment(FedAH(), sizes=sizes, images=True))
    assert all(bool(v.isfinite().all()) for i in range(len(sizes)) for v in images.personal(i).values())


def test_a_class_that_nobody_has():
    fed = federation()
    data = dataclasses.replace(fed.dataset, y=fed.dataset.y.clamp(max=1))
    found = run(experiment(FedAH(), federation=dataclasses.replace(fed, dataset=data)))
    agree(found, reference.run(world(found.run)))


# what it costs, and where it runs


def test_bytes_and_passes_of_a_round():
    found, fedavg = (run(experiment(m)) for m in (FedAH(head_epochs=3), FedAvg()))
    for a, b in zip(found.rounds[1:], fedavg.rounds[1:], strict=True):
        assert (a["bytes_down"], a["bytes_up"]) == (b["bytes_down"], b["bytes_up"])
        assert a["gradient_passes"] == pytest.approx(3 + 3 + 2)


def test_workers_give_the_bits_of_the_serial_backend():
    serial, workers = (
        run(experiment(FedAH(), images=True, backend=b, workers=w)) for b, w in (("serial", None), ("workers", 2))
    )
    assert serial.server["model"].equals(workers.server["model"])
    assert all(serial.personal(i).equals(workers.personal(i)) for i in range(len(SIZES)))
    assert all(serial.private(i)["mix"].equals(workers.private(i)["mix"]) for i in range(len(SIZES)))


def test_stacked_clients_agree_with_the_serial_backend():
    serial, stacked = (run(experiment(FedAH(head_epochs=2), backend=b, dtype="float32")) for b in ("serial", "stacked"))
    assert moved(serial.server["model"], stacked.server["model"]) < 1e-5
    assert max(moved(serial.personal(i), stacked.personal(i)) for i in range(len(SIZES))) < 1e-5


@pytest.mark.parametrize("hyper", [{"head_epochs": -1}, {"body_epochs": -2}, {"weight_lr": -0.5}], ids=str)
def test_impossible_values_are_refused(hyper):
    with pytest.raises(UsageError, match=f"FedAH.{next(iter(hyper))} must be 0 or more"):
        FedAH(**hyper)


def test_defaults_are_the_paper_s():
    assert FedAH() == FedAH(head_epochs=1, body_epochs=None, weight_lr=1.0)
