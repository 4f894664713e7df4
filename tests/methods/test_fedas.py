"""FedAS: its reference, FedPer as its limit, the alignment, the Fisher trace, what stays whose, odd clients."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import pytest
import torch

from harness import SIZES, agree, experiment, federation, moved, run, world
from idiolect.engine.work import Job
from idiolect.errors import UsageError
from idiolect.methods.fedas import FedAS
from idiolect.methods.fedper import FedPer
from idiolect.task import Batch
from idiolect.tree import Tree
from reference import fedas as reference

IMAGES = pytest.mark.parametrize("images", [False, True], ids=["mlp", "convnet with BatchNorm"])
EVERYONE = range(len(SIZES))
EQUAL = {"sizes": (8,) * 8, "ratio": 1.0}


@dataclass(frozen=True)
class Told(FedAS):
    """FedAS whose traces are this factor times what they are; `power` 0: this number."""

    factor: float = 1.0
    power: int = 0

    def trace(self, me, w):
        return self.factor * super().trace(me, w) ** self.power


# the reference


@IMAGES
@pytest.mark.parametrize(
    "hyper",
    [{}, {"fisher": "sample"}, {"align_epochs": 0}, {"align_lr": 0.4, "align_epochs": 3, "fisher": "sample"}],
    ids=str,
)
def test_engine_equals_reference(hyper, images):
    found = run(experiment(FedAS(**hyper), images=images))
    agree(found, reference.run(world(found.run), **hyper))


def test_the_run_s_weight_decay_is_no_part_of_the_trace():
    found = run(experiment(FedAS(), weight_decay=0.5))
    agree(found, reference.run(world(found.run)))


# the method that it becomes


@IMAGES
def test_without_alignment_and_with_equal_weights_the_body_is_fedper_s_to_the_bit(images):
    found, fedper = (run(experiment(m, images=images, **EQUAL)) for m in (Told(align_epochs=0), FedPer()))
    assert found.server["model"].equals(fedper.server["model"])
    head = found.context.net.head
    assert all(found.private(i)["model"].pick(head).equals(fedper.private(i)["model"]) for i in EVERYONE)
    weighed, aligned = (run(experiment(m, images=images, **EQUAL)) for m in (FedAS(align_epochs=0), Told(align_lr=0.3)))
    assert moved(weighed.server["model"], found.server["model"]) > 1e-3
    assert moved(aligned.server["model"], found.server["model"]) > 1e-3


def test_a_common_factor_of_all_traces_changes_nothing():
    one, four, odd = (run(experiment(Told(factor=f, power=1))) for f in (1.0, 4.0, 3.7))
    assert one.server["model"].equals(four.server["model"])
    assert moved(one.server["model"], odd.server["model"]) < 1e-12
    assert one.server["model"].equals(run(experiment(FedAS())).server["model"])


# alignment


def aligning(seed: int = 0):
    """A task, weights, a batch with two of three classes, and prototypes, all of them drawn."""
    task = experiment(FedAS()).context().task
    draw = torch.Generator().manual_seed(seed)
    w = task.net.weights.map(lambda v: torch.randn(v.shape, generator=draw, dtype=v.dtype))
    x = torch.randn(7, 6, generator=draw, dtype=torch.float64)
    prototypes = torch.randn(3, 5, generator=draw, dtype=torch.float64)
    return task, w, Batch(x, torch.tensor([0, 2, 2, 0, 2, 2, 2])), prototypes


def test_the_loss_of_alignment_is_the_sum_over_classes_of_the_mean_squared_distance():
    task, w, batch, prototypes = aligning()
    z = task.features(w, batch.x)
    by_hand = sum((z[batch.y == c] - prototypes[c]).square().mean() for c in (0, 2))
    torch.testing.assert_close(FedAS().alignment(task, w, batch, prototypes), by_hand, rtol=0, atol=1e-14)
    everyone = (z - prototypes[batch.y]).square().mean()  # were samples, not classes, to count alike
    assert abs(float(by_hand - 2 * everyone)) > 1e-3


def test_gradient_of_the_alignment_against_finite_differences():
    task, w, batch, prototypes = aligning(1)
    body = w.pick(task.net.body)

    def loss(*values):
        return FedAS().alignment(task, w | Tree(zip(body, values, strict=True)), batch, prototypes)

    assert torch.autograd.gradcheck(loss, [v.requires_grad_() for v in body.values()])


def test_features_that_are_their_prototypes_are_not_moved():
    task, w, batch, _ = aligning(2)
    each = batch._replace(x=batch.x[:3], y=torch.tensor([0, 1, 2]))
    assert float(FedAS().alignment(task, w, each, task.features(w, each.x))) == 0.0


def test_prototypes_are_of_the_client_s_own_body_and_the_received_one_moves_towards_them():
    found = run(experiment(FedAS(), rounds=2))
    i = next(i for i in EVERYONE if found.progress.store.visits[i] and found.context.shards.size("train", i) > 8)
    task, own, received = found.context.task, found.private(i)["model"], found.server["model"]
    x, y = found.context.shards.part("train", i)

    def classes(body: Tree) -> torch.Tensor:
        z = task.features(body, x)
        return torch.stack([z[y == c].mean(0) for c in y.unique()])

    context = found.context
    method = FedAS(align_lr=0.2, align_epochs=40)
    seen = {}

    def trainer(task, phase):
        after = context.trainer(task, phase)
        seen.setdefault("aligned", after)  # the first phase
        return after

    listened = dataclasses.replace(context, method=method, trainer=trainer)
    listened.do(Job("local", i, 2, 1, found.server, found.private(i)))
    before, after = ((classes(b) - classes(own)).norm() for b in (received, seen["aligned"]))
    assert after < 0.5 * before
    assert seen["aligned"].pick(context.net.head).equals(own.pick(context.net.head))


def test_what_one_client_aligns_the_next_one_does_not_receive():
    """The public code aligns the server's model in place, participant after participant."""
    context = experiment(FedAS(align_lr=0.5)).context()
    down, mine = context.state.server, context.state.client
    before = down["model"].clone()
    alone = experiment(FedAS(align_lr=0.5)).context().do(Job("local", 1, 0, 0, down, mine))
    context.do(Job("local", 0, 0, 0, down, mine))
    after_another = context.do(Job("local", 1, 0, 0, down, mine))
    assert down["model"].equals(before)
    assert after_another.up.mean["model"].equals(alone.up.mean["model"])


@pytest.mark.parametrize("n", [1, 5, 9])
def test_clients_smaller_than_a_batch_are_aligned_too(n):
    """The public code drops their only batch."""
    context = experiment(FedAS(align_lr=0.5), sizes=(n,), ratio=1.0, batch_size=16, lr=0.0).context()
    received = {"model": context.net.body.map(lambda v: 1.5 * v)}
    reply = context.do(Job("local", 0, 0, 0, received, context.state.client))
    assert moved(reply.up.mean["model"], received["model"]) > 1e-3


# the trace


def test_the_trace_by_hand():
    """Of the trained model, over the batches of one epoch or over the samples, by a plain loop."""
    for fisher in ("batch", "sample"):
        context = experiment(FedAS(fisher=fisher)).context()
        reply = context.do(Job("local", 0, 0, 0, context.state.server, context.state.client))
        w, (x, y) = reply.mine["model"], context.shards.part("train", 0)

        def square(rows, w=w, x=x, y=y, context=context):
            leaves = {k: v.clone().requires_grad_() for k, v in w.items()}
            out = torch.func.functional_call(context.net.module, leaves, (x[rows],))
            grads = torch.autograd.grad(torch.nn.functional.cross_entropy(out, y[rows]), list(leaves.values()))
            return sum(float(g.square().sum()) for g in grads)

        batches = world(experiment(FedAS())).batches(0, 0, 10, 0)
        assert len(batches) == 4
        rows = batches if fisher == "batch" else [torch.tensor([k]) for k in range(len(y))]
        expected = sum(square(r) for r in rows) / (1 if fisher == "batch" else len(y))
        assert reply.up.weight == pytest.approx(expected, rel=1e-12)


def test_in_batches_of_one_the_sum_is_n_times_the_mean():
    contexts = [experiment(FedAS(fisher=f), batch_size=1).context() for f in ("batch", "sample")]
    batch, sample = (c.do(Job("local", 4, 0, 0, c.state.server, c.state.client)).up.weight for c in contexts)
    assert batch == pytest.approx(SIZES[4] * sample, rel=1e-12)


def test_the_trace_trains_nothing():
    """In eval mode, on a copy: neither weights nor statistics of the model move by it."""
    found, told = (run(experiment(m, images=True, rounds=1)) for m in (FedAS(), Told()))
    assert all(found.private(i)["model"].equals(told.private(i)["model"]) for i in EVERYONE)


def test_where_every_trace_is_0_samples_are_the_weights():
    found, fedper = (run(experiment(m)) for m in (Told(align_epochs=0, factor=0.0), FedPer()))
    assert moved(found.server["model"], fedper.server["model"]) < 1e-12


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_trace_that_is_no_number_counts_as_0(broken):
    @dataclass(frozen=True)
    class Broken(FedAS):
        def trace(self, me, w):
            return broken if me.id == 0 else super().trace(me, w)

    fields = {"rounds": 1}
    found, without = (run(experiment(Broken(), ratio=[who], **fields)) for who in ([0, 2, 4], [2, 4]))
    assert moved(found.server["model"], without.server["model"]) < 1e-12


# what stays whose


@IMAGES
def test_a_client_predicts_with_its_own_model_and_keeps_it_while_away(images):
    found, later = (run(experiment(FedAS(), images=images, ratio=[[0, 1, 2], [2, 4], [4]], rounds=r)) for r in (1, 3))
    assert set(found.server["model"]) == set(found.context.net.body)
    for i in (0, 1):
        assert later.personal(i).equals(found.personal(i))
    assert found.personal(7).equals(found.context.net.weights)
    assert moved(later.personal(2), found.personal(2)) > 1e-3
    heads = [later.personal(i)["head.weight"] for i in (0, 1, 2, 4)]
    assert min(float((a - b).abs().max()) for k, a in enumerate(heads) for b in heads[:k]) > 1e-4


def test_bytes_and_passes_of_a_round():
    for hyper, passes in (({}, 1 + 2 + 1), ({"align_epochs": 0}, 2 + 1), ({"align_epochs": 3}, 3 + 2 + 1)):
        found = run(experiment(FedAS(**hyper)))
        sent = 8 * found.context.net.body.size
        for row in found.rounds[1:]:
            assert (row["bytes_down"], row["bytes_up"]) == (5 * sent, 5 * sent)
            assert row["gradient_passes"] == pytest.approx(5 * passes / 5)


# odd clients


@pytest.mark.parametrize("sizes", [(6, 1, 1, 3, 9), (1, 1, 1, 1)], ids=str)
def test_clients_of_one_sample_or_one_class(sizes):
    found = run(experiment(FedAS(), sizes=sizes))
    agree(found, reference.run(world(found.run)))


def test_a_class_that_nobody_has():
    fed = federation()
    data = dataclasses.replace(fed.dataset, y=fed.dataset.y.clamp(max=1))
    found = run(experiment(FedAS(), federation=dataclasses.replace(fed, dataset=data)))
    agree(found, reference.run(world(found.run)))


@pytest.mark.parametrize(
    "hyper", [{"fisher": "batches"}, {"align_lr": 0.0}, {"align_epochs": -1}], ids=lambda h: next(iter(h))
)
def test_impossible_values_are_refused(hyper):
    with pytest.raises(UsageError, match=next(iter(hyper))):
        FedAS(**hyper)
