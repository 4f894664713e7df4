"""Augmentation: a function of (sample, key), in training alone."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from harness import experiment, moved, run
from idiolect.augment import Augment, parse
from idiolect.data import federate, from_arrays
from idiolect.engine import orders, steps
from idiolect.engine.work import Job
from idiolect.errors import UsageError
from idiolect.method import Method, State, Up
from idiolect.tree import Tree

MASK = (1 << 64) - 1
EVERY = Augment(2, True)


def splitmix(row, key):
    """The paper's constants, in whole numbers of any size."""
    z = (key + (row + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def by_hand(x, row, key, crop, flip):
    """One image: cut out of the padded one, then mirrored."""
    z = splitmix(row, key)
    channels, height, width = x.shape
    padded = torch.zeros(channels, height + 2 * crop, width + 2 * crop, dtype=x.dtype)
    padded[:, crop : crop + height, crop : crop + width] = x
    top, left = (z & 0xFFFFF) % (2 * crop + 1), ((z >> 20) & 0xFFFFF) % (2 * crop + 1)
    window = padded[:, top : top + height, left : left + width]
    return window.flip(2) if flip and (z >> 40) & 1 else window


def pictures(n, seed=0, size=(3, 7, 5)):
    return torch.randn(n, *size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("augment", [Augment(1), Augment(4), Augment(flip=True), EVERY])
@pytest.mark.parametrize("key", [0, 12345, (1 << 63) - 1])
def test_each_image_is_what_one_gets_by_hand(augment, key):
    x, rows = pictures(40), torch.arange(40) * 7
    found = augment(x, rows, key)
    for k in range(40):
        assert torch.equal(found[k], by_hand(x[k], int(rows[k]), key, augment.crop, augment.flip))
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(augment(x, rows, torch.full((40,), key)), found)


def test_an_image_does_not_depend_on_its_neighbours():
    x, rows = pictures(30), torch.arange(30)
    whole = EVERY(x, rows, 9)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    assert torch.equal(EVERY(x[order], rows[order], 9), whole[order])
    for k in range(30):
        assert torch.equal(EVERY(x[k : k + 1], rows[k : k + 1], 9)[0], whole[k])


def test_all_windows_and_both_sides_are_as_likely():
    """Of an image with one bright pixel in its middle: where that comes to lie."""
    x = torch.zeros(1, 1, 9, 9)
    x[0, 0, 4, 3] = 1
    n = 54_000
    found = EVERY(x.expand(n, -1, -1, -1), torch.arange(n), 3)
    counts = found.sum((0, 1))
    cells = counts[2:7, 1:8]  # 5 places downwards; 5 across, each of them mirrored: columns 1 to 5 and 3 to 7
    expected = torch.tensor([1, 1, 2, 2, 2, 1, 1]) * n / 50
    assert counts.sum() == cells.sum() == n
    assert ((cells - expected).abs() < 5 * expected.sqrt()).all()


def test_texts():
    assert parse("none") is None
    assert parse("crop:4") == Augment(4)
    assert parse("flip") == Augment(flip=True)
    assert parse("crop:4,flip") == parse("flip, crop:4") == Augment(4, True)
    for text in (
        "",
        "crop",
        "crop:",
        "crop:0",
        "crop:-1",
        "crop:x",
        "crop:1.5",
        "flip:1",
        "flip,flip",
        "rotate",
        "None",
        4,
    ):
        with pytest.raises(UsageError, match=r"augment must be .* found"):
            parse(text)


def client(augment="crop:2,flip", round=1, **fields):
    context = experiment("fedavg", images=True, augment=augment, **fields).context()
    return context.client(Job("local", 0, round, 0, {}, {})), context.net.weights


def looped(me, w, batches, frozen=()):
    """Plain torch on images augmented by hand. `batches`: (rows, key)."""
    module, (x, y) = copy.deepcopy(me.task.net.module), (me.inputs, me.labels)
    with torch.no_grad():
        for name, value in [*module.named_parameters(), *module.named_buffers()]:
            value.copy_(w[name])
    module.train()
    for name in frozen:
        getattr(module, name).eval().requires_grad_(False)
    optimiser = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], me.lr, 0.5, 0, 0.01)
    for rows, key in batches:
        seen = torch.stack([by_hand(x[r], int(r), key, 2, True) for r in rows])
        optimiser.zero_grad()
        nn.functional.cross_entropy(module(seen), y[rows]).backward()
        optimiser.step()
    return Tree({k: v.detach().clone() for k, v in [*module.named_parameters(), *module.named_buffers()]})


def course(me, order, epochs=2, share=1.0):
    for epoch in range(epochs):
        key = orders.key(3, "augment", me.round, me.id, order, epoch)
        for rows in orders.batches(me.n, 4, 3, me.round, me.id, order, epoch, share):
            yield rows, key


@pytest.mark.parametrize("share", [1.0, 0.6])
def test_training_sees_augmented_samples_with_a_key_for_every_epoch(share):
    me, w = client()
    assert moved(me.train(w, order=4, share=share), looped(me, w, course(me, 4, share=share))) < 1e-12
    plain, _ = client("none")
    assert moved(me.train(w, order=4), plain.train(w, order=4)) > 1e-3


def test_a_frozen_body_sees_every_augmented_sample():
    """Its features are not those of the samples as they are."""
    me, w = client()
    expected = looped(me, w, course(me, 0), frozen=["body"])
    assert moved(me.train(w, only=me.task.net.head, order=0), expected) < 1e-12
    named = me.train(w, only=me.task.net.head, features=w, loss=lambda task, w, b: task.loss(w, b), order=0)
    assert moved(named, expected) < 1e-12
    assert moved(named, client("none")[0].train(w, only=me.task.net.head, order=0)) > 1e-3


def test_what_is_not_training_is_not_augmented():
    (me, w), (plain, _) = client(), client("none")
    for ask in (
        lambda c: c.features(w),
        lambda c: c.logits(w),
        lambda c: c.loss(w),
        lambda c: c.inputs,
        lambda c: c.sweep(w, lambda task, w, batch: batch.x.sum(0)),
    ):
        assert torch.equal(ask(me), ask(plain))
    views = me.over(me.inputs, me.labels), plain.over(plain.inputs, plain.labels)
    assert views[0].train(w, order=0).equals(views[1].train(w, order=0))  # other samples than the client's own
    halves = me.split(0.5)[0], plain.split(0.5)[0]
    assert moved(halves[0].train(w, order=0), halves[1].train(w, order=0)) > 1e-3


def test_evaluation_and_the_server_see_samples_as_they_are():
    context = experiment("fedavg", images=True, augment="crop:2,flip").context()
    plain = experiment("fedavg", images=True).context()
    w = context.net.weights
    assert context.scores([0], w) == plain.scores([0], w)
    x, y = context.shards.part("train", 0)
    assert context.server(0, x, y).train(w).equals(plain.server(0, x, y).train(w))


def test_none_is_as_ever(monkeypatch):
    monkeypatch.setattr(Augment, "__call__", lambda *_: pytest.fail("augmented"))
    with_default, said = (run(experiment("fedrep", images=True, rounds=2, **f)) for f in ({}, {"augment": "none"}))
    assert all(with_default.personal(i).equals(said.personal(i)) for i in range(8))


@dataclass(frozen=True)
class Pairs(Method):
    """Steps of two batches each."""

    def init(self, net):
        return State(server={"model": net.weights})

    def both(self, task, w, batches, lr):
        return w.pick(k for k in w if k not in task.net.buffers) * 0 + sum(
            b.mean(b.x.flatten(1).sum(1)) for b in batches
        )

    def local(self, me, down, mine):
        return Up(mean={"model": me.train(down["model"], step=self.both, per_step=2, steps=3)}), {}


@pytest.mark.parametrize("method", ["fedavg", "fedrep", "ditto", "fedah", Pairs()], ids=str)
def test_the_same_for_any_number_of_workers(method):
    fields = {"images": True, "augment": "crop:2,flip", "rounds": 2}
    one, two = (run(experiment(method, **fields, **f)) for f in ({}, {"backend": "workers", "workers": 2}))
    plain = run(experiment(method, images=True, rounds=2))
    assert all(one.personal(i).equals(two.personal(i)) for i in range(8))
    assert max(moved(one.personal(i), plain.personal(i)) for i in range(8)) > 1e-4
    assert one.clients == two.clients


@pytest.mark.parametrize("method", ["fedavg", "fedrep", "ditto", Pairs()], ids=str)
def test_stacked_clients_see_the_same_images(method):
    x = np.random.default_rng(0).normal(size=(90, 1, 8, 8))
    fed = federate(from_arrays(x, np.arange(90) % 3), "dirichlet:1", 6, 0)
    options = {"network": "mlp", "network_options": {"hidden": (5,)}}
    fields = {"federation": fed, "augment": "crop:2,flip", "rounds": 2, **options}
    one, two = (run(experiment(method, **fields, backend=b)) for b in ("serial", "stacked"))
    assert max(moved(one.personal(i), two.personal(i)) for i in range(6)) < 1e-12


def test_features_of_augmented_samples_are_not_stacked():
    x = np.random.default_rng(0).normal(size=(90, 1, 8, 8))
    fed = federate(from_arrays(x, np.arange(90) % 3), "iid", 6, 0)
    fields = {"federation": fed, "network": "mlp", "network_options": {"hidden": (5,)}}
    with pytest.raises(UsageError, match=r"cannot run fedah.*Use the serial or workers backend"):
        run(experiment("fedah", **fields, backend="stacked", augment="flip"))


@pytest.mark.parametrize("method", ["moon", "fedphp", "fedcp", "fedem"])
def test_a_method_that_computes_of_each_sample_beforehand_is_refused(method):
    with pytest.raises(UsageError, match=r"not of the augmented sample. Use augment=none"):
        run(experiment(method, images=True, augment="flip"))


def test_only_images_are_augmented():
    with pytest.raises(UsageError, match=r"found samples of the shape \[6\] in 'small'. Use augment=none"):
        experiment("fedavg", augment="flip").context()
    with pytest.raises(UsageError, match="needs images larger than that; found 8x8"):
        experiment("fedavg", images=True, augment="crop:8").context()
    with pytest.raises(UsageError, match="augment must be"):
        experiment("fedavg", images=True, augment="crop")


def test_a_step_without_augmentation_copies_nothing_more():
    me, w = client("none")
    phase = []
    me._trainer = lambda task, p: phase.append(p) or w
    me.train(w)
    assert (phase[0].augment, phase[0].keys, phase[0].body) == (None, [], None)
    first = next(steps.batches(me.task, phase[0]))[0]
    assert torch.equal(first.x, me.inputs[phase[0].indices[0][0]])
